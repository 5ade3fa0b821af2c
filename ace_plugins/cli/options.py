"""Options and shell completions that several commands share. Nothing here imports torch: TAB must be fast."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import click
from click.shell_completion import CompletionItem

from ..errors import AceError, one_of
from ..plugins.registry import registry
from ..settings.config import KINDS, SETTINGS
from ..settings.fields import Choice, Flag, Kind
from ..settings.sources import option

Items = list[CompletionItem]


class Commands(click.Group):
    """A group with the whole first sentence of each command in its help, and similar names in its errors."""

    kind, advice = "command", ""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        found = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        if found:
            with formatter.section("Commands"):
                formatter.write_dl([(name, command.get_short_help_str(300)) for name, command in found if command])

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        name = args[0]
        try:
            if not (ctx.resilient_parsing or name.startswith("-")) and self.get_command(ctx, name) is None:
                raise AceError(one_of(self.kind, name, self.list_commands(ctx), do=self.advice))
            return super().resolve_command(ctx, args)
        except AceError:
            if ctx.resilient_parsing:  # completion: an error would be printed into the line that the user is typing
                return None, None, args
            raise


class ScriptCommand(click.Command):
    """A command that ends with a script and its arguments (``words``), for which the shell completes files only."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        return [] if ctx.resilient_parsing and ctx.params.get("words") else super().get_params(ctx)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> Items:
        return files(ctx, None, incomplete) if ctx.params.get("words") else super().shell_complete(ctx, incomplete)


def files(ctx: click.Context, param: Any, incomplete: str) -> Items:
    """Let the shell complete paths."""
    return [CompletionItem(incomplete, type="file")]


def adapters(ctx: click.Context, param: Any, incomplete: str) -> Items:
    """Complete names of usable adapters."""
    return matching(((plugin.name, plugin.patches.title) for plugin in registry().adapters), incomplete)


def adapters_or_files(ctx: click.Context, param: Any, incomplete: str) -> Items:
    """Complete adapters and files. Files come first, because the shell drops items before a file."""
    return [*files(ctx, param, incomplete), *adapters(ctx, param, incomplete)]


def matching(known: Iterable[tuple[str, str]], incomplete: str) -> Items:
    """Return the words that start with ``incomplete``. ``known`` has pairs of a word and its help text."""
    return [CompletionItem(word, help=text or None) for word, text in known if word.startswith(incomplete)]


as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")


def print_json(value: Any) -> None:
    """Print a value as JSON."""
    click.echo(json.dumps(value, indent=2))


def show(found: Any, as_json: bool, print_tables: Callable[[Any], None]) -> None:
    """Print a result as JSON or as tables, and exit with code 1 if the result lists problems."""
    if as_json:
        print_json(found.to_dict())
    else:
        print_tables(found)
    if getattr(found, "problems", ()):
        sys.exit(1)


class SettingType(click.ParamType):  # type: ignore[type-arg]
    """Parameter type of an option that gives the value of a setting."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self.choices = kind.choices if isinstance(kind, Choice) else ()
        self.name = "|".join(self.choices) or kind.placeholder + ("|auto" if kind.auto else "")

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return self.kind.parse(value)
        except ValueError:
            self.fail(f"{value!r}: expected {self.kind.expected}.", param, ctx)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> Items:
        return matching(((word, "") for word in self.choices), incomplete)


def config_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add one option for every setting. Options that are not given are left to the preset."""
    for field in reversed(SETTINGS.values()):
        kind, name, text = KINDS[field.name], option(field.name), field.metadata["help"]
        if isinstance(kind, Flag):
            add = click.option(f"{name}/--no-{name[2:]}", field.name, default=None, help=text)
        else:
            value = SettingType(kind)
            add = click.option(name, field.name, type=value, metavar=value.name, default=None, help=text)
        command = add(command)
    command = click.option("--cpu", is_flag=True, default=None, help="The same as --device cpu.")(command)
    return click.option("--preset", default=None, help="Named settings of the adapter to start from.")(command)


def collect_settings(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that were given on the command line."""
    given = {name: value for name, value in options.items() if value is not None}
    if given.pop("cpu", False):
        given["device"] = "cpu"
    return given
