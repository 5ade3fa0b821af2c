"""Whose model is it: by class, where upstream defines it or offers it, and by looking at the model."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
from test_plugins import install, loaded
from torch import nn
from toy import Layered

from ace_plugins import attach, patched, status
from ace_plugins.adapter import Upstream, hookimpl
from ace_plugins.errors import AdapterError
from ace_plugins.plugins.registry import registry


class Generic:
    """An adapter of every model that has layers."""

    looked = 0

    @hookimpl
    def ace_upstream(self) -> Upstream:
        return Upstream("models with layers", recognises=self.recognises)

    def recognises(self, model: nn.Module) -> bool:
        self.looked += 1
        return hasattr(model, "layers")


@pytest.fixture
def generic() -> Any:
    plugin = Generic()
    registry().add(plugin, "generic")
    yield plugin
    registry().remove("generic")


def test_a_model_is_claimed_by_class_first_and_then_by_looking(generic: Generic) -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList()

    assert registry().find_adapter(Layered()).name == "layered"
    assert generic.looked == 0, "nobody looks where somebody knows the class"
    assert registry().find_adapter(Own()).name == "generic"
    with pytest.raises(AdapterError, match=r"no adapter supports.*generic \(models with layers\)"):
        registry().find_adapter(nn.Linear(2, 2))
    with pytest.raises(AdapterError, match="names no model class"):
        patched("generic")


@pytest.mark.usefixtures("generic")
def test_two_that_recognise_a_model() -> None:
    registry().add(Generic(), "second")
    try:
        with pytest.raises(AdapterError, match="several adapters support .* .generic, second"):
            registry().find_adapter(nn.ParameterDict({"layers": nn.Parameter()}))
    finally:
        registry().remove("second")


REEXPORT = """
from ace_plugins.adapter import Site, Upstream, hookimpl
@hookimpl
def ace_upstream():
    return Upstream("Net", ("offering:Net",))
@hookimpl
def ace_layers(model):
    return [Site("linear", "linear", (2,), (2,))]
"""


def test_a_class_is_known_by_where_upstream_offers_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "offering"
    package.mkdir()
    (package / "__init__.py").write_text("from .inside import Net\n")
    net = "from torch import nn\nclass Net(nn.Module):\n"
    net += "    def __init__(self):\n        super().__init__()\n        self.linear = nn.Linear(2, 2)\n"
    (package / "inside.py").write_text(net)
    scope: dict[str, Any] = {}
    exec(REEXPORT, scope)
    plugin = type(sys)("plugin")
    vars(plugin).update(scope)
    monkeypatch.syspath_prepend(str(tmp_path))
    registry().add(plugin, "offered")
    try:
        with patched("offered"):
            inside = importlib.import_module("offering.inside")
            assert status(inside.Net()).adapter == "offered"
        assert status(attach(inside.Net())).adapter == "offered"

        class Derived(inside.Net):  # type: ignore[misc, name-defined]
            pass

        assert registry().find_adapter(Derived()).name == "offered"
    finally:
        registry().remove("offered")
        for name in ("offering", "offering.inside"):
            sys.modules.pop(name, None)


SEVERAL = """
from ace_plugins.adapter import Upstream, hookimpl
class Adapter:
    def __init__(self, name):
        self.name = name
    @hookimpl
    def ace_upstream(self):
        return Upstream(self.name, (f"{self.name}:Net",))
ONE, TWO = Adapter("one"), Adapter("two")
"""


def test_two_entry_points_of_one_distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "ace-pair", "first", SEVERAL)
    entry = tmp_path / "ace_pair-1.2.dist-info" / "entry_points.txt"
    entry.write_text("[ace_plugins]\nfirst = ace_pair:ONE\nsecond = ace_pair:TWO\nagain = ace_pair:TWO\n")
    found = loaded(tmp_path, monkeypatch)
    assert found.adapter("first").patches.title == "one"
    told = {name: plugin.problem or "" for name, plugin in found.plugins.items()}
    assert "already registered" in told["second"] + told["again"], "one object is one plugin"
