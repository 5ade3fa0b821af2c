"""Options and shell completions of several commands. This module does not import torch, so that TAB is fast."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from ..errors import AceError, one_of
from ..plugins.registry import registry
from ..settings.config import KINDS, SETTINGS
from ..settings.fields import Choice, Flag, Kind
from ..settings.sources import option

Items = list[CompletionItem]
PATH = click.Path(path_type=Path)
FILE, FOLDER = click.Path(dir_okay=False, path_type=Path), click.Path(file_okay=False, path_type=Path)


class Commands(click.Group):
    """A group that shows the whole first sentence of each command, and suggests a similar name for an unknown one."""

    kind, advice = "command", ""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        alone = self.invoke_without_command or ctx.resilient_parsing
        return super().parse_args(ctx, args or ([] if alone else ["--help"]))

    def sections(self, ctx: click.Context) -> dict[str, list[tuple[str, str]]]:
        """Return the sections of the help by title, each with the names and first sentences of its commands."""
        found = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        return {"Commands": [(name, command.get_short_help_str(300)) for name, command in found if command]}

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, commands in self.sections(ctx).items():
            if commands:
                with formatter.section(title):
                    formatter.write_dl(commands)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        try:
            if self.get_command(ctx, args[0]) is None:
                raise AceError(one_of(self.kind, args[0], self.list_commands(ctx), do=self.advice))
            return super().resolve_command(ctx, args)
        except AceError:
            if ctx.resilient_parsing:  # completion: an error would be printed into the line that the user is typing
                return None, None, args
            raise


class ScriptCommand(click.Command):
    """A command that takes options before '--', and a script with its arguments (``words``) after '--'."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        script = args[args.index("--") + 1 :] if "--" in args else []
        try:
            rest = super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            message = f"{error.message} (write '--' before the script and its options)."
            raise click.NoSuchOption(error.option_name, message, ctx=ctx) from None
        words = ctx.params["words"]
        if [*words] != script and not ctx.resilient_parsing:
            example = f"ace-patch {self.name} schnet -- train.py"
            if not words or script[1:] == [*words]:
                raise AceError(f"expected an adapter, then '--' and the script: {example}")
            raise AceError(f"{words[0]!r}: expected '--' before the script: {example}")
        return rest

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        # After the script, the shell completes files only.
        return [] if ctx.resilient_parsing and ctx.params.get("words") else super().get_params(ctx)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> Items:
        return files(ctx, None, incomplete) if ctx.params.get("words") else super().shell_complete(ctx, incomplete)


def files(ctx: click.Context, param: Any, incomplete: str) -> Items:
    return [CompletionItem(incomplete, type="file")]


def adapters(ctx: click.Context, param: Any, incomplete: str) -> Items:
    return matching(((plugin.name, plugin.patches.title) for plugin in registry().adapters), incomplete)


def matching(words_and_help: Iterable[tuple[str, str]], incomplete: str) -> Items:
    return [CompletionItem(word, help=text or None) for word, text in words_and_help if word.startswith(incomplete)]


as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")


def print_json(value: Any) -> None:
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
    """Type of an option that sets a setting."""

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
    """Add an option for every setting, without a default: presets define the defaults."""
    for field in reversed(SETTINGS.values()):
        kind, name, text = KINDS[field.name], option(field.name), field.metadata["help"]
        if isinstance(kind, Flag):
            add = click.option(f"{name}/--no-{name[2:]}", field.name, default=None, help=text)
        else:
            add = click.option(name, field.name, type=(value := SettingType(kind)), metavar=value.name, help=text)
        command = add(command)
    command = click.option("--cpu", is_flag=True, default=None, help="The same as --device cpu.")(command)
    return click.option("--preset", metavar="NAME", help="Start from this preset of the adapter.")(command)


def collect_settings(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the given options as settings."""
    given = {name: value for name, value in options.items() if value is not None}
    return given | {"device": "cpu"} if given.pop("cpu", False) else given
