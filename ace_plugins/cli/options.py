"""What the shell offers when people press TAB, through click: ``eval "$(_ACE_PATCH_COMPLETE=bash_source ace-patch)"``.

People wait for it at every key: nothing here imports torch.

Options that several commands of ``ace-patch`` share.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import click
from click.shell_completion import CompletionItem

from ..errors import AceError
from ..plugins.registry import registry
from ..settings.config import FIT, KINDS, NONE, SETTINGS
from ..settings.fields import Choice, Flag, Kind
from ..settings.sources import option

Items = list[CompletionItem]
_SCRIPT = "ace_plugins.script"


class ScriptCommand(click.Command):
    """A command whose last words are a script's. Once these have begun, the shell offers files, and no options."""

    def begin_script(self, ctx: click.Context) -> None:
        ctx.meta[_SCRIPT] = True

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        return [] if _in_script(ctx) else super().get_params(ctx)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> Items:
        return files(ctx, None, incomplete) if _in_script(ctx) else super().shell_complete(ctx, incomplete)


def _in_script(ctx: click.Context) -> bool:
    return ctx.resilient_parsing and _SCRIPT in ctx.meta


def files(ctx: click.Context, param: Any, incomplete: str) -> Items:
    """The shell's own completion of paths."""
    return [CompletionItem(incomplete, type="file")]


def adapters(ctx: click.Context, param: Any, incomplete: str) -> Items:
    """The adapters that can be used."""
    return matching({plugin.name: plugin.patches.title for plugin in registry().adapters}.items(), incomplete)


def adapters_or_files(ctx: click.Context, param: Any, incomplete: str) -> Items:
    """Files where no adapter is called so. The shell forgets what comes before a file, so that comes first."""
    return [*files(ctx, param, incomplete), *adapters(ctx, param, incomplete)]


def choices(words: Iterable[str]) -> Callable[[click.Context, Any, str], Items]:
    """A completion by these words."""
    known = tuple(words)

    def complete(ctx: click.Context, param: Any, incomplete: str) -> Items:
        return matching(((word, "") for word in known), incomplete)

    return complete


def presets(ctx: click.Context, param: Any, incomplete: str) -> Items:
    """Those of the adapter that was named before, as a word of the command or as the command itself."""
    words = ctx.params.get("words") or (ctx.info_name or "",)
    try:
        own = registry().adapter(words[0]).presets
    except AceError:  # not named yet, or misspelt: it will be told when the command is called
        own = {}
    return matching(((name, "") for name in sorted({*own, FIT, NONE})), incomplete)


def matching(known: Iterable[tuple[str, str]], incomplete: str) -> Items:
    """Of these words, with what each is for, those that begin like this."""
    return [CompletionItem(word, help=text or None) for word, text in known if word.startswith(incomplete)]


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
