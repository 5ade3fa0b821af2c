"""Options that several commands of ``ace-patch`` share."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import click

from ..settings.config import SETTINGS

as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")


@contextmanager
def progress_on_a_terminal(length: int, label: str) -> Iterator[Callable[[int], None] | None]:
    """What to call with every few that are done; None where nobody watches."""
    if not sys.stderr.isatty():
        yield None
        return
    with click.progressbar(length=length, label=label, file=sys.stderr) as bar:
        yield bar.update


def print_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=2))


def config_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """One option for every field of `Config`; what is not given is left to the adapter's preset."""
    for field in reversed(SETTINGS.values()):
        name = "--" + field.name.replace("_", "-")
        kind: Any = str
        if isinstance(field.default, bool):
            name, kind = f"{name}/--no-{name[2:]}", None
        elif isinstance(field.default, (int, float)):
            kind = type(field.default)
        option = click.option(name, field.name, type=kind, default=None, help=field.metadata["help"])
        command = option(command)
    command = click.option("--cpu", is_flag=True, default=None, help="The same as --device cpu.")(command)
    return click.option("--preset", default=None, help="The adapter's named settings to start from.")(command)


def given_settings(options: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that were given, with a dual learning rate that is a number as a number."""
    given = {name: value for name, value in options.items() if value is not None}
    if given.pop("cpu", False):
        given["device"] = "cpu"
    with suppress(ValueError, KeyError):
        given["dual_lr"] = float(given["dual_lr"])
    return given
