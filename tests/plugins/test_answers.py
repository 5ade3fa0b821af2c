"""What plugins answer: every wrong answer is one line with plugin, hook, expected and found."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from click.testing import CliRunner
from clones import ace, miniature
from test_plugins import install
from toy import ADAPTERS, Layered

from ace_plugins import attach
from ace_plugins.adapter import Example, Metric, Script, Shim, Site, Stem, Tap, hookimpl
from ace_plugins.cli.main import cli
from ace_plugins.engine.measure import equivariance_error
from ace_plugins.errors import AceWarning, AdapterError
from ace_plugins.plugins.plugin import EXPECTED, OPTIONAL
from ace_plugins.plugins.registry import HOOKS, registry

GARBAGE = [
    None,
    3,
    "x",
    b"x",
    1.5,
    object(),
    torch.ones(2),
    Layered,
    lambda: None,
    [3],
    ("x", None),
    [[]],
    {1: 2},
    {"a": 3},
    {"a": {1: 2}},
    {"a": [3]},
    {3},
    iter([]),
    Exception("x"),
]


def asked(hook: str, answer: Any) -> Any:
    """The hook's arguments are whatever the contract says; every implementation may take none of them."""

    class Odd(ADAPTERS["layered"]):  # type: ignore[misc]
        pass

    def implementation(self: Any) -> Any:
        return answer

    setattr(Odd, hook, hookimpl(implementation))
    registry().add(Odd(), "odd")
    try:
        plugin = registry().adapter("odd")
        arguments = {
            "ace_layers": {"model": None},
            "ace_branch": {"site": Site("here", "here", (1,), (1,)), "model": None, "config": None},
            "ace_group_action": {"model": None},
            "ace_script": {"argv": ()},
            "ace_example": {"seed": 0, "model": None},
        }
        return plugin.call(hook, **arguments.get(hook, {}))
    finally:
        registry().remove("odd")


@pytest.mark.parametrize("hook", sorted(EXPECTED))
def test_garbage_is_reported_with_plugin_hook_expected_and_found(hook: str) -> None:
    for answer in GARBAGE:
        if answer is None and hook in OPTIONAL:
            assert asked(hook, answer) is None
            continue
        with pytest.raises(AdapterError) as caught:
            asked(hook, answer)
        message = str(caught.value)
        kind = "<class 'toy.Layered'>" if answer is Layered else type(answer).__name__
        assert message.startswith(("adapter 'odd': ", "adapter 'odd' ((registered) ): ")), message
        assert f"{hook} returned" in message
        assert kind in message
        assert f", expected {EXPECTED[hook][0]}" in message
        assert "\n" not in message


def test_every_hook_that_is_answered_has_an_expectation() -> None:
    assert {*EXPECTED, "ace_attached", "ace_stepped", "ace_finished"} == HOOKS


def test_what_is_right_passes() -> None:
    assert asked("ace_preset", {"a": {}}) == {"a": {}}
    assert asked("ace_layers", ()) == ()
    shim = Shim("name", "reason", bool, print)
    assert asked("ace_shims", [shim]) == [shim]
    command = click.Command("x")
    assert asked("ace_demo", command) is command
    assert asked("ace_datasets", {"x": command}) == {"x": command}
    assert asked("ace_script", Script(3)) == Script(3)


def test_the_site_of_a_wrong_branch_is_named() -> None:
    with pytest.raises(AdapterError, match="ace_branch returned int 3 for 'here', expected a torch.nn.Module or None"):
        asked("ace_branch", 3)


@pytest.mark.parametrize("error", [SystemExit("bye"), ZeroDivisionError("bye")])
def test_no_hook_ends_the_process(error: BaseException) -> None:
    class Odd(ADAPTERS["layered"]):  # type: ignore[misc]
        @hookimpl
        def ace_layers(self) -> Any:
            raise error

    registry().add(Odd(), "odd")
    try:
        with pytest.raises(AdapterError, match=f"adapter 'odd' .*: ace_layers failed: {type(error).__name__}: bye"):
            attach(Layered(), "odd")
    finally:
        registry().remove("odd")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Site("a", "m", 8, (8,)), r"Site 'a': shape_in: expected a tuple of sizes, as \(64,\), found 8"),
        (lambda: Site("a", "m", (8,), ("8",)), r"Site 'a': shape_out: .*found \('8',\)"),
        (lambda: Site("a", "m", (8, 0), (8,)), r"Site 'a': shape_in: expected a tuple of sizes, .*found \(8, 0\)"),
        (lambda: Stem("a", None, (), (8,)), r"Stem 'a': shape_in: .*found \(\)"),
        (lambda: Site("", "m", (8,), (8,)), "Site '': name: expected a name"),
        (lambda: Site("a", 3, (8,), (8,)), "Site 'a': module: expected str, found 3"),
        (lambda: Site("a", "m", (8,), (8,), reads=0), "Site 'a': reads: expected Tap or str or None, found 0"),
        (lambda: Site("a", "m", (8,), (8,), reads=None), "Site 'a': reads: .*found None"),
        (lambda: Site("a", "m", (8,), (8,), output=1.0), "Site 'a': output: expected int or str or None, found 1.0"),
        (lambda: Site("a", "m", (8,), (8,), through=3), "Site 'a': through: expected str or None, found 3"),
        (lambda: Site("a", "m", (8,), (8,), acts=(1,)), "Site 'a': acts: expected two actions"),
        (lambda: Site("a", "m", (8,), (8,), axis=1.0), "Site 'a': axis: expected int, found 1.0"),
        (
            lambda: Site("a", "m", (8, 3), (8,), axis=1),
            "Site 'a': axis: expected -1 .*one-dimensional",
        ),
        (
            lambda: Site("a", "m", (8,), (8,), reads="b", axis=1),
            "Site 'a': axis: expected -1 .*a Tap",
        ),
        (
            lambda: Site("a", "m", (8,), (8,), through="b", axis=1),
            "Site 'a': axis: expected -1 .*no through",
        ),
        (lambda: Site("a"), r"Site 'a': shape_in: .*found \(\)"),
        (lambda: Tap(None), "Tap: argument: expected int or str, found None"),
        (lambda: Tap(0, 3), "Tap: module: expected str or None, found 3"),
        (lambda: Example(Layered), "Example: model: expected a torch.nn.Module, found <class 'toy.Layered'>"),
    ],
)
def test_fields_are_checked_where_they_are_written(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("text", ["0.5", "-3", "1e-05", "2.5E+3", ".5", "7.", "nan", "-inf"])
def test_the_number_placeholder_matches_numbers_as_python_prints_them(text: str) -> None:
    metric = Metric("test", r"loss: {number}\b", r"epoch \d{1,3} {number}")
    assert re.findall(Metric("test", "loss: {number}").pattern, f"loss: {text} after 3 epochs") == [text]
    assert re.findall(metric.curve, f"epoch 12 {text}") == [text]
    assert re.findall(metric.pattern, "loss: 0.25. Done") == ["0.25"]


def test_a_model_without_an_action_is_not_measured() -> None:
    class Mute(ADAPTERS["layered"]):  # type: ignore[misc]
        @hookimpl
        def ace_group_action(self) -> Any:
            return None

    registry().remove("layered")
    registry().add(Mute(), "layered")
    model = attach(Layered())
    with pytest.raises(AdapterError, match=r"'layered': ace_group_action returned None for Layered, expected GroupAct"):
        equivariance_error(model, (torch.randn(4, 3),))


# Commands that ask several plugins go on without the one that cannot answer.


class WithData(ADAPTERS["layered"]):  # type: ignore[misc]
    def __init__(self, data: Any, demo: Any) -> None:
        self.data, self.demo = data, demo

    @hookimpl
    def ace_datasets(self) -> Any:
        return self.data

    @hookimpl
    def ace_demo(self) -> Any:
        return self.demo() if callable(self.demo) and not isinstance(self.demo, click.Command) else self.demo


def _exit() -> None:
    raise SystemExit(3)


@pytest.fixture
def one_of_two() -> Iterator[None]:
    fine = click.Command("fine", callback=lambda: click.echo("made"))
    registry().add(WithData(["nbody"], _exit), "aaa")
    registry().add(WithData({"fine": fine}, fine), "aab")
    yield
    registry().remove("aaa")
    registry().remove("aab")


@pytest.mark.usefixtures("one_of_two")
def test_one_bad_answer_leaves_the_other_data_sets_and_demos(monkeypatch: pytest.MonkeyPatch) -> None:
    # Adapters come in the order of their names, and these are added last.
    monkeypatch.setattr(type(registry()), "adapters", property(lambda self: [self.plugins[n] for n in ("aaa", "aab")]))
    bad = r"left out: adapter 'aaa': ace_datasets returned list \['nbody'\], expected click commands by name"
    with pytest.warns(AceWarning, match=bad):
        listed = CliRunner().invoke(cli, ["data", "--help"], catch_exceptions=False)
    assert "fine" in listed.output
    with pytest.warns(AceWarning, match=bad):
        made = CliRunner().invoke(cli, ["data", "fine"], catch_exceptions=False)
    assert made.output == "made\n"
    with pytest.warns(AceWarning, match=r"left out: adapter 'aaa' .*: ace_demo failed: SystemExit: 3"):
        shown = CliRunner().invoke(cli, ["demo"], catch_exceptions=False)
    assert shown.output.endswith("made\n")
    refused = CliRunner().invoke(cli, ["demo", "aaa"], catch_exceptions=False)
    assert refused.exit_code == 2
    assert "ace-patch: adapter 'aaa' ((registered) ): ace_demo failed: SystemExit: 3" in refused.output


QUITS = "import sys\nfrom ace_plugins.adapter import hookimpl\n@hookimpl\ndef ace_upstream(): sys.exit(7)\n"
CLONED = """
from ace_plugins.adapter import Upstream, hookimpl
@hookimpl
def ace_upstream(): return Upstream("Net", ("net:Net",), checkout="me/net")
@hookimpl
def ace_datasets(): return 3
"""


def test_commands_work_beside_plugins_that_quit(tmp_path: Path) -> None:
    pytest.importorskip("ace_segnn")
    site = tmp_path / "site"
    site.mkdir()
    install(site, "ace-quits", "quits", QUITS)
    install(site, "ace-cloned", "cloned", CLONED)
    install(site, "ace-escapes", "escapes", "raise SystemExit('out')")
    clone = miniature("segnn", tmp_path)
    environment = {"PYTHONPATH": str(site), "COLUMNS": "300"}
    for command in (["--help"], ["segnn", "--dry-run"], ["status"], ["data", "--help"]):
        done = ace(clone, *command, **environment)
        assert done.returncode == 0, done.stderr
        assert "Traceback" not in done.stderr
    listed = ace(clone, "list", "--json", **environment)
    problems = {each["name"]: each["problem"] for each in json.loads(listed.stdout)}
    assert problems["quits"] == "ace_upstream failed: SystemExit: 7"
    assert problems["escapes"] == "could not be imported: SystemExit: out"
    assert problems["cloned"].startswith(
        "ace_upstream failed: ValueError: Upstream: checkout: expected Checkout or None"
    )
    assert problems["segnn"] is None
