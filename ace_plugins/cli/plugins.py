"""The commands of ``ace-patch`` about plugins: ``list``, ``new-adapter``; and what these bring: ``demo``, ``data``."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from ..errors import AceError, AceWarning, one_of
from ..plugins.plugin import Plugin
from ..plugins.registry import registry
from ..scaffold import make_adapter
from .options import as_json, print_json
from .tables import print_plugins


@click.command("list")
@as_json
def listing(as_json: bool) -> None:
    """Every adapter: from which distribution, versions wanted and found, healthy or why not."""
    plugins = list(registry())
    if as_json:
        print_json([_described(plugin) for plugin in plugins])
        return
    if not plugins and "ACE_LOAD_PLUGINS" not in os.environ:
        example = "pip install './adapters/schnet[upstream]' in a clone of ace-plugins"
        click.echo(f"no plugins found: install an adapter, for example {example}")
        return
    print_plugins(plugins)
    if registry().left_out:
        click.echo(f"not loaded: {registry().left_out}")


def _described(plugin: Plugin) -> dict[str, Any]:
    return {
        "name": plugin.name,
        "kind": "adapter" if plugin.upstream else "observer" if plugin.problem is None else "unknown",
        "upstream": plugin.upstream.title if plugin.upstream else None,
        "models": list(plugin.upstream.models) if plugin.upstream else [],
        "distribution": plugin.distribution,
        "version": plugin.version,
        "target": plugin.target,
        "requires": [
            {"requirement": r.requirement, "found": r.found, "met": r.met, "upstream": r.upstream}
            for r in plugin.requires
        ],
        "healthy": plugin.problem is None,
        "problem": plugin.problem,
        "hooks": list(plugin.hooks),
    }


@click.command("new-adapter")
@click.argument("name")
@click.option(
    "--into",
    type=click.Path(path_type=Path, file_okay=False),
    default=".",
    help="The folder to put it into; by default this one.",
)
@as_json
@click.pass_context
def new_adapter(ctx: click.Context, name: str, into: Path, as_json: bool) -> None:
    """Write the package ace-NAME: an adapter for a small network that stands in for yours, with its tests.

    It installs and passes its tests as it is. Its README says what to change.
    """
    taken = {plugin.name: f"{plugin.distribution} has an adapter of that name" for plugin in registry()}
    ace_patch = ctx.find_root().command
    if isinstance(ace_patch, click.Group):  # an adapter of a checkout is a word of the command line, too
        taken |= {command: f"'ace-patch {command}' is a command" for command in ace_patch.list_commands(ctx)}
    folder, written = make_adapter(name, into, taken)
    if as_json:
        print_json({"folder": str(folder), "files": written})
        return
    click.echo(f"{folder}: {len(written)} files. It works as it is:")
    click.echo(f"  cd {folder} && pip install -e '.[test]' && pytest")
    click.echo("Then make it yours, as its README.md says.")


class Demos(click.Group):
    """The demos of the adapters that have one; ``ace-patch demo`` without a name is all of them, one by one."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [plugin.name for plugin in registry().adapters if plugin.has("ace_demo")]

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in self.list_commands(ctx):
            return None
        found: click.Command = registry().adapter(name).call("ace_demo")
        return found

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        names = self.list_commands(ctx)
        if ctx.resilient_parsing and (not args or args[0] not in names):  # the shell asks for names
            return super().parse_args(ctx, args)
        if not names:
            raise AceError("no installed adapter has a demo: expected one that implements ace_demo, such as ace-schnet")
        if args and args[0] not in names and args[0] not in ctx.help_option_names:
            if not args[0].startswith("-"):
                raise AceError(one_of("demo", args[0], names, do="these adapters have one"))
            if len(names) > 1:
                raise AceError(f"demo {args[0]}: expected the name of a demo before its options: {', '.join(names)}")
            args = [names[0], *args]
        return super().parse_args(ctx, args)


class Datasets(click.Group):
    """Data sets that upstreams read, made by the adapters that can."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(_datasets())

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        return _datasets().get(name)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        known = _datasets()
        if args[0] not in known and not args[0].startswith("-") and not ctx.resilient_parsing:
            raise AceError(one_of("data set", args[0], known, do="installed adapters make these"))
        return super().resolve_command(ctx, args)


def _datasets() -> dict[str, click.Command]:
    found: dict[str, click.Command] = {}
    for _, commands in _answers("ace_datasets"):
        found = {**commands, **found}  # the first that has a name keeps it
    return found


def _answers(hook: str) -> Iterator[tuple[Plugin, Any]]:
    """What the adapters that have this hook answer. One that cannot is told of, and the rest are asked."""
    for plugin in registry().adapters:
        if plugin.has(hook):
            try:
                answer = plugin.call(hook)
            except AceError as error:
                warnings.warn(f"left out: {error}", AceWarning, stacklevel=2)
            else:
                yield plugin, answer


@click.group("demo", cls=Demos, invoke_without_command=True)
@click.pass_context
def demo(ctx: click.Context) -> None:
    """See ACE at work, in a few minutes: all demos, or the one that is named.

    Options are each demo's own and come after its name.
    """
    if ctx.invoked_subcommand is not None:
        return
    failed = []
    for number, (plugin, found) in enumerate(_answers("ace_demo")):
        click.echo(f"{chr(10) * (number > 0)}{plugin.name}: {found.get_short_help_str(200)}\n")
        try:
            found.main([], f"{ctx.command_path} {plugin.name}", standalone_mode=False)
        except AceError as error:  # that one cannot run is no reason to show none
            failed.append(f"demo {plugin.name}: {error}")
    if failed:
        raise AceError("; ".join(failed))


data = Datasets("data", help="Make a data set that an upstream reads.")
