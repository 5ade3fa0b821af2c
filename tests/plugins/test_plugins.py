"""Plugins come in through entry points, each on its own: tried with real distributions on disk."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from clones import ace
from toy import ADAPTERS, Layered

from ace_plugins import attach
from ace_plugins.adapter import hookimpl
from ace_plugins.cli.main import cli
from ace_plugins.errors import AdapterError
from ace_plugins.plugins.plugin import Requires
from ace_plugins.plugins.registry import Registry, registry

GOOD = """
from ace_plugins.adapter import hookimpl, Upstream
@hookimpl
def ace_upstream():
    return Upstream(title="Good Net", models=("goodnet:Net",))
"""


def install(
    site: Path, distribution: str, name: str, source: str, requires: tuple[str, ...] = (), target: str = ""
) -> None:
    """A distribution as pip would leave it: a module, and metadata with an entry point."""
    module = target or distribution.replace("-", "_")
    if source:
        (site / f"{module}.py").write_text(source)
    info = site / f"{distribution.replace('-', '_')}-1.2.dist-info"
    info.mkdir()
    lines = [f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.2"]
    lines += [f"Requires-Dist: {requirement}" for requirement in requires]
    (info / "METADATA").write_text("\n".join(lines) + "\n")
    (info / "entry_points.txt").write_text(f"[ace_plugins]\n{name} = {module}\n")


def loaded(site: Path, monkeypatch: pytest.MonkeyPatch) -> Registry:
    monkeypatch.syspath_prepend(str(site))
    found = importlib.metadata.distributions(path=[str(site)])
    return Registry(ep for dist in found for ep in dist.entry_points if ep.group == "ace_plugins")


BROKEN = {
    "raises": ("1 / 0", "could not be imported: ZeroDivisionError: division by zero"),
    "exits": ("import sys; sys.exit('bye')", "could not be imported: SystemExit: bye"),
    "syntax": ("def (", "could not be imported: SyntaxError: invalid syntax"),
    "needs": ("import no_such_module", "could not be imported: ModuleNotFoundError: No module named 'no_such_module'"),
    "misspelt": (
        GOOD + "@hookimpl\ndef ace_layer(model): pass\n",
        "unknown hook ace_layer: the hooks of ace-plugins .* ace_layers",
    ),
    "unmarked": (GOOD + "def ace_layers(model): pass\n", "ace_layers not marked with @hookimpl"),
    "arguments": (
        GOOD + "@hookimpl\ndef ace_layers(net): pass\n",
        "could not be registered: PluginValidationError: .*net",
    ),
    "dotted": (GOOD.replace("goodnet:Net", "goodnet.Net"), "ace_upstream failed: ValueError: .*found .*'goodnet.Net'"),
    "string": (GOOD.replace('("goodnet:Net",)', '"goodnet:Net"'), "ace_upstream failed: .*expected a tuple of"),
    "answers": (GOOD.replace("Upstream(title", "dict(title"), "ace_upstream returned dict .*expected Upstream"),
    "silent": (GOOD.replace("return Upstream", "Upstream"), "ace_upstream returned NoneType None, expected Upstream"),
    "quits": (GOOD.replace("return Upstream", "raise SystemExit(7) or dict"), "ace_upstream failed: SystemExit: 7"),
    "checkout": (
        GOOD.replace('",))', '",), checkout="me/net")'),
        "ace_upstream failed: ValueError: Upstream: checkout: expected Checkout or None, found 'me/net'",
    ),
    "outside": (
        GOOD.replace("Upstream\n@", "Upstream, Checkout\n@").replace(
            '",))', '",), checkout=Checkout("me/net", ("../main.py",), {"net.py": ""}))'
        ),
        "ace_upstream failed: ValueError: Checkout: scripts: expected files in the clone.*'../main.py'",
    ),
    "wrapper": (
        GOOD + "@hookimpl(wrapper=True)\ndef ace_layers(model):\n    return (yield)\n",
        "ace_layers is a hook wrapper, which is not supported",
    ),
    "hookwrapper": (
        GOOD + "@hookimpl(hookwrapper=True)\ndef ace_stepped(model):\n    yield\n",
        "ace_stepped is a hook wrapper, which is not supported",
    ),
    "lazy_form": (
        GOOD + "from ace_plugins.adapter import LazyHook\nace_example = LazyHook('example.small')\n",
        "could not be imported: ValueError: LazyHook: expected 'module:name'.*'example.small'",
    ),
    "lazy_observer": (
        GOOD + "from ace_plugins.adapter import LazyHook\nace_stepped = LazyHook('watch:stepped')\n",
        "ace_stepped: an observer hook cannot be a LazyHook",
    ),
    "nothing": ("x = 1", "ace_bad_nothing implements no hook, expected functions such as ace_upstream"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_plugin_is_named_and_the_rest_work(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, reason = BROKEN[kind]
    install(tmp_path, f"ace-bad-{kind}", "bad", source)
    install(tmp_path, f"ace-fine-{kind}", "zfine", GOOD)
    registry = loaded(tmp_path, monkeypatch)
    with pytest.raises(AdapterError, match=rf"adapter 'bad' \(ace-bad-{kind} 1.2\): {reason}") as caught:
        registry.adapter("bad")
    assert "\n" not in str(caught.value)
    assert [plugin.name for plugin in registry.adapters] == ["zfine"]
    assert registry.manager.has_plugin("zfine")
    assert not registry.manager.has_plugin("bad")


class Touchy:
    """An object that does not like to be looked at."""

    @property
    def ace_layers(self) -> Any:
        raise SystemExit("do not look")


@pytest.mark.parametrize(
    ("plugin", "problem"),
    [
        (Touchy(), "could not be registered: SystemExit: do not look"),
        (ADAPTERS["layered"], "is the class BrokenLayered, expected a module or an object; name an instance of it"),
        ("ace_mine.plugin", "str implements no hook, expected functions such as ace_upstream marked with @hookimpl"),
        (None, "NoneType implements no hook, .*"),
        (3, "int implements no hook, .*"),
    ],
)
def test_things_that_are_no_plugins(plugin: Any, problem: str) -> None:
    found = Registry([])
    found.add(plugin, "odd")
    assert re.fullmatch(problem, found.plugins["odd"].problem or "")
    assert found.adapters == []
    assert not found.manager.has_plugin("odd")


def test_requirements_are_checked_before_the_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = importlib.metadata.version("torch")
    marker = tmp_path / "imported"
    source = f"open({str(marker)!r}, 'w')\n" + GOOD
    install(tmp_path, "ace-future", "future", source, ('torch>=99; extra == "upstream"', "pluggy>=1"))
    registry = loaded(tmp_path, monkeypatch)
    plugin = registry.plugins["future"]
    assert plugin.problem == f"requires torch>=99, found {torch}; pip install 'torch>=99'"
    assert not plugin.missing_upstream, "installed but incompatible is loud"
    assert not marker.exists()


def test_an_upstream_that_is_not_installed_is_quiet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "ace-absent", "absent", GOOD, ('no-such-upstream>=2; extra == "upstream"', 'x; extra == "demo"'))
    plugin = loaded(tmp_path, monkeypatch).plugins["absent"]
    assert plugin.problem == "requires no-such-upstream>=2, found none installed; pip install 'no-such-upstream>=2'"
    assert plugin.missing_upstream
    assert plugin.requires == (Requires("no-such-upstream>=2", None, upstream=True),)


def test_two_distributions_with_one_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "ace-first", "same", GOOD)
    install(tmp_path, "ace-second", "same", GOOD)
    registry = loaded(tmp_path, monkeypatch)
    assert registry.adapter("same").distribution == "ace-first"
    problem = registry.plugins["same (ace-second)"].problem
    assert problem == "its name is taken by ace-first (ace_first); uninstall one of the two"


def test_observers_are_no_adapters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "from ace_plugins.adapter import hookimpl\n@hookimpl\ndef ace_stepped(model, step): pass\n"
    install(tmp_path, "ace-watcher", "watcher", source)
    registry = loaded(tmp_path, monkeypatch)
    assert registry.plugins["watcher"].hooks == ("ace_stepped",)
    with pytest.raises(AdapterError, match="'watcher' .* is an observer, not an adapter"):
        registry.adapter("watcher")


def test_observers_are_called_in_their_requested_order() -> None:
    names: list[str] = []

    def observer(name: str, **options: bool) -> object:
        class Observer:
            @hookimpl(**options)
            def ace_attached(self, model: Any) -> None:
                names.append(name)

        return Observer()

    observers = {"last": {"trylast": True}, "early": {}, "first": {"tryfirst": True}, "late": {}}
    for name, options in observers.items():
        registry().add(observer(name, **options), name)
    try:
        attach(Layered())
    finally:
        for name in observers:
            registry().remove(name)
    assert names == ["first", "late", "early", "last"], "among equals the last that came"


def test_a_missing_hook_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "ace-half", "half", GOOD)
    plugin = loaded(tmp_path, monkeypatch).adapter("half")
    with pytest.raises(AdapterError, match=r"adapter 'half' \(ace-half 1.2\) does not implement ace_layers"):
        plugin.call("ace_layers", model=None)


LAZY = """
from ace_plugins.adapter import LazyHook, Upstream
ace_upstream = LazyHook("ace_lazy_parts:UPSTREAM")
ace_layers = LazyHook("ace_lazy_parts:layers")
ace_demo = LazyHook("ace_lazy_parts:demo")
ace_script = LazyHook("ace_lazy_parts:script")
ace_example = LazyHook("ace_lazy_parts:absent")
ace_shims = LazyHook("ace_lazy_nowhere:SHIMS")
"""
LAZY_PARTS = """
import click
from ace_plugins.adapter import Site, Upstream
UPSTREAM = Upstream("Lazy", models=("goodnet:Net",))
demo = click.Command("demo")
def layers(model, names=("a", "b")):
    return [Site(name, shape_in=(1,), shape_out=(1,)) for name in names]
def script(argv, net):
    return None
"""


@pytest.fixture
def lazy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Registry:
    (tmp_path / "ace_lazy_parts.py").write_text(LAZY_PARTS)
    install(tmp_path, "ace-lazy", "lazy", LAZY)
    return loaded(tmp_path, monkeypatch)


def test_lazy_hooks_name_a_function_or_a_result(lazy: Registry) -> None:
    plugin = lazy.adapter("lazy")
    assert plugin.patches.title == "Lazy"
    assert [site.name for site in plugin.call("ace_layers", model=None)] == ["a", "b"]
    assert plugin.call("ace_demo").name == "demo"
    module: Any = sys.modules["ace_lazy"]
    assert [site.name for site in module.ace_layers(None, ("c",))] == ["c"], "tests call the hook itself"
    assert module.ace_demo().name == "demo"


@pytest.mark.parametrize(
    ("hook", "arguments", "error"),
    [
        ("ace_script", {"argv": ()}, "TypeError: script.*'net'"),
        ("ace_example", {"seed": 0, "model": None}, "AttributeError: .*'absent'"),
        ("ace_shims", {}, "ModuleNotFoundError: .*'ace_lazy_nowhere'"),
    ],
)
def test_errors_of_lazy_hooks_name_plugin_and_hook(
    lazy: Registry, hook: str, arguments: dict[str, Any], error: str
) -> None:
    with pytest.raises(AdapterError, match=rf"adapter 'lazy' \(ace-lazy 1.2\): {hook} failed: {error}"):
        lazy.adapter("lazy").call(hook, **arguments)


def test_lazy_hooks_are_imported_when_they_are_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    marker = tmp_path / "imported"
    source = GOOD + "from ace_plugins.adapter import LazyHook\nace_layers = LazyHook('ace_late_parts:layers')\n"
    install(tmp_path, "ace-late", "late", source)
    (tmp_path / "ace_late_parts.py").write_text(f"open({str(marker)!r}, 'w').close()\ndef layers():\n    return []\n")
    plugin = loaded(tmp_path, monkeypatch).adapter("late")
    assert plugin.hooks == ("ace_layers", "ace_upstream")
    assert not marker.exists()
    assert plugin.call("ace_layers", model=None) == []
    assert marker.exists()


def listing(site: Path, *arguments: str, **environment: str) -> Any:
    return ace(site, *arguments, PYTHONPATH=str(site), **environment)


@pytest.fixture(scope="module")
def everything_broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    site = tmp_path_factory.mktemp("site")
    for kind, (source, _) in BROKEN.items():
        install(site, f"ace-bad-{kind}", f"bad-{kind}", source)
    install(site, "ace-good", "good", GOOD)
    return site


def test_the_command_survives_every_plugin(everything_broken: Path) -> None:
    assert listing(everything_broken, "--help").returncode == 0
    done = listing(everything_broken, "list", "--json")
    assert done.returncode == 0, done.stderr
    found = {plugin["name"]: plugin for plugin in json.loads(done.stdout)}
    assert {f"bad-{kind}" for kind in BROKEN} <= found.keys()
    assert all(not found[f"bad-{kind}"]["healthy"] and found[f"bad-{kind}"]["problem"] for kind in BROKEN)
    assert found["good"]["healthy"]
    table = listing(everything_broken, "list", COLUMNS="300")
    assert table.returncode == 0
    assert "bad-raises (ace-bad-raises): could not be imported: ZeroDivisionError" in table.stdout


def test_load_plugins_chooses(everything_broken: Path) -> None:
    for value, expected in {"good": ["good"], " good , nothing": ["good"], "": []}.items():
        done = listing(everything_broken, "list", "--json", ACE_LOAD_PLUGINS=value)
        assert [plugin["name"] for plugin in json.loads(done.stdout)] == expected
    done = listing(everything_broken, "list", ACE_LOAD_PLUGINS="goood")
    assert "unknown plugin in ACE_LOAD_PLUGINS 'goood': did you mean 'good'?" in done.stdout
    done = listing(everything_broken, "doctor", "good", ACE_LOAD_PLUGINS="goood")
    assert "not loaded: unknown plugin in ACE_LOAD_PLUGINS 'goood'" in done.stderr


def test_help_and_list_do_not_import_torch(everything_broken: Path) -> None:
    code = "import sys\nfrom ace_plugins.cli.main import cli\ncli.main(sys.argv[1:], standalone_mode=False)\n"
    code += "assert 'torch' not in sys.modules"
    for arguments in (["--help"], ["list"]):
        env = {**os.environ, "PYTHONPATH": str(everything_broken), "ACE_LOAD_PLUGINS": "good"}
        subprocess.run([sys.executable, "-c", code, *arguments], env=env, check=True, capture_output=True, timeout=60)


def test_presets_that_are_none_are_reported() -> None:
    class Odd(ADAPTERS["layered"]):  # type: ignore[misc]
        @hookimpl
        def ace_preset(self) -> Any:
            return {"paper": 0.1}

    registry().add(Odd(), "odd")
    try:
        with pytest.raises(AdapterError, match="adapter 'odd': ace_preset returned .*expected names and settings"):
            attach(Layered(), "odd")
    finally:
        registry().remove("odd")


def test_an_adapter_of_this_repository_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    none = Registry([])
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_: importlib.metadata.EntryPoints())
    for module in ("ace_plugins.cli.main", "ace_plugins.cli.scripts", "ace_plugins.run.launch"):
        monkeypatch.setattr(f"{module}.registry", lambda: none)
    folder = Path(__file__).parents[2] / "adapters" / "segnn"
    message = f"adapter 'segnn' is not installed: run pip install '{folder}[upstream]'"
    for words in (["segnn"], ["run", "segnn", "--", "train.py"]):
        done = CliRunner().invoke(cli, words)
        assert (done.exit_code, done.output) == (2, f"ace-patch: {message}\n")
    with pytest.raises(AdapterError, match="unknown adapter 'painn'.*the package of an adapter is usually called ace-"):
        none.adapter("painn")
    with pytest.raises(AdapterError, match="unknown adapter"):
        none.adapter("../adapters/segnn")


def test_an_adapter_that_is_not_loaded_is_not_called_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = importlib.metadata.EntryPoint("segnn", "ace_segnn", "ace_plugins")
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_: importlib.metadata.EntryPoints([entry]))
    none = Registry([])
    for module in ("ace_plugins.cli.main", "ace_plugins.cli.scripts", "ace_plugins.run.launch"):
        monkeypatch.setattr(f"{module}.registry", lambda: none)
    for words in (["segnn"], ["run", "segnn", "--", "train.py"]):
        done = CliRunner().invoke(cli, words)
        message = "adapter 'segnn' is installed but not loaded: add it to ACE_LOAD_PLUGINS, or unset this variable"
        assert (done.exit_code, done.output) == (2, f"ace-patch: {message}\n")
