"""Options that several commands of ``ace-patch`` share."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import click

from ..settings.config import KINDS, SETTINGS
from ..settings.kinds import Choice, Flag, Kind
from ..settings.sources import option
from .completing import choices, presets

as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")


def print_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=2))


def _parser(kind: Kind) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        try:
            return kind.parse(text)
        except ValueError:
            raise click.BadParameter(f"{text!r}: expected {kind.expected}.") from None

    return parse


def config_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """One option for every field of `Config`; what is not given is left to the adapter's preset."""
    for field in reversed(SETTINGS.values()):
        kind, name, text = KINDS[field.name], option(field.name), field.metadata["help"]
        if isinstance(kind, Flag):
            added = click.option(f"{name}/--no-{name[2:]}", field.name, default=None, help=text)
        else:
            metavar = "|".join(kind.choices) if isinstance(kind, Choice) else kind.metavar
            offered = choices(kind.choices if isinstance(kind, Choice) else ())
            added = click.option(
                name,
                field.name,
                type=_parser(kind),
                metavar=metavar,
                default=None,
                help=text,
                shell_complete=offered,
            )
        command = added(command)
    command = click.option("--cpu", is_flag=True, default=None, help="The same as --device cpu.")(command)
    named = click.option(
        "--preset", default=None, help="The adapter's named settings to start from.", shell_complete=presets
    )
    return named(command)


def given_settings(options: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that were given."""
    given = {name: value for name, value in options.items() if value is not None}
    if given.pop("cpu", False):
        given["device"] = "cpu"
    return given
