"""``ace-patch demo``: one demo, all of them, and those that cannot run."""

from __future__ import annotations

from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from ace_plugins.cli.plugins import demo
from ace_plugins.errors import AceError, AdapterError


@click.command()
@click.option("--size", default=1)
def small(size: int) -> None:
    """What a small one shows.

    More of it.
    """
    click.echo(f"size {size}")


@click.command()
def broken() -> None:
    """What nobody sees."""
    raise AdapterError("expected matplotlib")


def invoke(monkeypatch: pytest.MonkeyPatch, found: dict[str, click.Command], *arguments: str) -> Result:
    class Plugin:
        def __init__(self, name: str) -> None:
            self.name = name

        def has(self, hook: str) -> bool:
            return hook == "ace_demo"

        def call(self, hook: str) -> click.Command:
            return found[self.name]

    class Registry:
        adapters = tuple(map(Plugin, found))

        def adapter(self, name: str) -> Any:
            return Plugin(name)

    monkeypatch.setattr("ace_plugins.cli.plugins.registry", Registry)
    return CliRunner().invoke(demo, arguments)


def test_without_a_name_all_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    result = invoke(monkeypatch, {"one": small, "two": small})
    assert result.exception is None
    assert result.stdout == "one: What a small one shows.\n\nsize 1\n\ntwo: What a small one shows.\n\nsize 1\n"


def test_one_that_cannot_run_does_not_hide_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    result = invoke(monkeypatch, {"one": broken, "two": small})
    assert "size 1" in result.stdout
    assert isinstance(result.exception, AceError)
    assert str(result.exception) == "demo one: expected matplotlib"


def test_a_name_and_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    both: dict[str, click.Command] = {"one": broken, "two": small}
    assert invoke(monkeypatch, both, "two", "--size", "3").stdout == "size 3\n"
    result = invoke(monkeypatch, both, "tow")
    with pytest.raises(AceError, match="unknown demo 'tow'.*did you mean 'two'"):
        raise result.exception or AssertionError
    assert "No such option" in invoke(monkeypatch, both, "--size", "3").output
    assert "What nobody sees." in invoke(monkeypatch, both, "--help").stdout
    result = invoke(monkeypatch, {})
    with pytest.raises(AceError, match="no installed adapter has a demo"):
        raise result.exception or AssertionError
