"""Commands about plugins: ``list`` and ``new-adapter``, and what adapters provide: ``demo`` and ``data``."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click
from rich.markup import escape

from ..errors import AceError, AceWarning
from ..plugins.plugin import Plugin
from ..plugins.registry import registry
from ..report.terminal import make_table, open_console
from ..scaffold import make_adapter
from .options import Commands, as_json, print_json


@click.command("list")
@as_json
def list_(as_json: bool) -> None:
    """List adapters, with the versions they require and find."""
    plugins = list(registry())
    if as_json:
        print_json([_describe(plugin) for plugin in plugins])
        return
    if not plugins and "ACE_LOAD_PLUGINS" not in os.environ:
        example = "pip install './adapters/schnet[upstream]' in a clone of ace-plugins"
        click.echo(f"no plugins found: install an adapter, for example {example}")
        return
    _print_plugins(plugins)
    if registry().left_out:
        click.echo(f"not loaded: {registry().left_out}")


def _describe(plugin: Plugin) -> dict[str, Any]:
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


def _print_plugins(plugins: Sequence[Plugin]) -> None:
    out = open_console()
    table = make_table("name", "state", "upstream, distribution and required versions")
    for plugin in plugins:
        if plugin.problem is None:
            state = "[green]ready[/]"
        else:
            state = "[yellow]upstream not installed[/]" if plugin.missing_upstream else "[red]not usable[/]"
        title = plugin.upstream.title if plugin.upstream else "observer" if plugin.problem is None else "?"
        lines = [f"{title}, from {plugin.distribution} {plugin.version}".strip()]
        required = [r for r in plugin.requires if r.upstream] or [r for r in plugin.requires if not r.met]
        lines += [f"requires {r.requirement}, found {r.found or 'none installed'}" for r in required]
        table.add_row(escape(plugin.name), state, escape("\n".join(lines)))
    out.print(table, soft_wrap=False)
    for plugin in plugins:
        if plugin.problem is not None:
            out.print(escape(f"{plugin.name} ({plugin.distribution}): {plugin.problem}"))


@click.command("new-adapter")
@click.argument("name")
@click.option(
    "--into", type=click.Path(path_type=Path, file_okay=False), default=".", help="Parent folder.  [default: this one]"
)
@as_json
@click.pass_context
def new_adapter(ctx: click.Context, name: str, into: Path, as_json: bool) -> None:
    """Create the package ace-NAME: a new adapter with tests.

    It patches a small network in place of yours, can be installed and passes its tests at once. Its README says what to
    change.
    """
    taken = {}
    ace_patch = ctx.find_root().command
    if isinstance(ace_patch, click.Group):
        taken = {command: f"'ace-patch {command}' is a command" for command in ace_patch.list_commands(ctx)}
    taken |= {plugin.name: f"{plugin.distribution} has an adapter with this name" for plugin in registry()}
    folder, written = make_adapter(name, into, taken)
    if as_json:
        print_json({"folder": str(folder), "files": written})
        return
    click.echo(f"{folder}: {len(written)} files. Install and test it:")
    click.echo(f"  cd {folder} && pip install -e '.[test]' && pytest")
    click.echo("Then follow its README.md to patch your own model.")


def _call_hook(hook: str) -> Iterator[tuple[Plugin, Any]]:
    """Call a hook of every adapter that implements it and yield the results; warn about adapters that fail."""
    for plugin in registry().adapters:
        if plugin.has(hook):
            try:
                answer = plugin.call(hook)
            except AceError as error:
                warnings.warn(f"left out: {error}", AceWarning, stacklevel=2)
            else:
                yield plugin, answer


class Demos(Commands):
    """The adapters' demos, each with the name of its adapter."""

    kind = "demo"

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [plugin.name for plugin in registry().adapters if plugin.has("ace_demo")]

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        return registry().adapter(name).call("ace_demo") if name in self.list_commands(ctx) else None


@click.group("demo", cls=Demos, invoke_without_command=True)
@click.pass_context
def demo(ctx: click.Context) -> None:
    """Show ACE on small examples, in a few minutes.

    Without a name, all demos run. Options of a demo follow its name.
    """
    if ctx.invoked_subcommand is not None:
        return
    found, failed = list(_call_hook("ace_demo")), []
    if not found:
        raise AceError("no installed adapter has a demo: expected one that implements ace_demo, such as ace-schnet")
    for number, (plugin, command) in enumerate(found):
        click.echo(f"{chr(10) * (number > 0)}{plugin.name}: {command.get_short_help_str(200)}\n")
        try:
            command.main([], f"{ctx.command_path} {plugin.name}", standalone_mode=False)
        except AceError as error:  # the other demos still run
            failed.append(f"demo {plugin.name}: {error}")
    if failed:
        raise AceError("; ".join(failed))


class Datasets(Commands):
    """Data sets that adapters generate. Of two data sets with the same name, the first one is used."""

    kind, advice = "data set", "installed adapters provide these"

    def _commands(self) -> dict[str, click.Command]:
        found: dict[str, click.Command] = {}
        for _, commands in _call_hook("ace_datasets"):
            found = {**commands, **found}
        return found

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(self._commands())

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        return self._commands().get(name)


@click.group("data", cls=Datasets, invoke_without_command=True)
@click.pass_context
def data(ctx: click.Context) -> None:
    """Generate a data set for an upstream."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())
