"""Commands about plugins (``list``, ``new-adapter``) and commands that adapters provide (``demo``, ``data``)."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from rich.markup import escape

from ..errors import AceError, AceWarning
from ..plugins.plugin import Plugin
from ..plugins.registry import registry
from ..report.terminal import make_table, open_console
from ..scaffold import make_adapter
from .main import COMMANDS
from .options import FOLDER, Commands, as_json, print_json


@click.command("list")
@as_json
def list_(as_json: bool) -> None:
    """List the installed adapters, with required and found versions."""
    plugins = list(registry())
    if as_json:
        print_json([_describe(plugin) for plugin in plugins])
        return
    if not plugins and not registry().left_out:
        example = "pip install './adapters/schnet[upstream]' in a clone of ace-plugins"
        click.echo(f"no plugins found: install an adapter, for example {example}")
        return
    table = make_table("name", "state", "upstream, distribution and required versions")
    for plugin in plugins:
        state = "[yellow]upstream not installed[/]" if plugin.missing_upstream else "[red]not usable[/]"
        title = plugin.upstream.title if plugin.upstream else "observer" if plugin.problem is None else "?"
        lines = [f"{title}, from {plugin.distribution} {plugin.version}".strip()]
        lines += map(str, [r for r in plugin.requires if r.upstream] or [r for r in plugin.requires if not r.met])
        shown = "[green]ready[/]" if plugin.problem is None else state
        table.add_row(escape(plugin.name), shown, escape("\n".join(lines)))
    open_console().print(table, soft_wrap=False)
    for plugin in plugins:
        if plugin.problem is not None:
            click.echo(f"{plugin.name} ({plugin.distribution}): {plugin.problem}")
    if registry().left_out:
        click.echo(f"not loaded: {registry().left_out}")


def _describe(plugin: Plugin) -> dict[str, Any]:
    same = ("name", "distribution", "version", "target", "problem", "hooks")
    return {name: getattr(plugin, name) for name in same} | {
        "kind": "adapter" if plugin.upstream else "observer" if plugin.problem is None else "unknown",
        "upstream": plugin.upstream.title if plugin.upstream else None,
        "models": plugin.upstream.models if plugin.upstream else [],
        "requires": [vars(requirement) | {"met": requirement.met} for requirement in plugin.requires],
        "healthy": plugin.problem is None,
    }


@click.command("new-adapter")
@click.argument("name")
@click.option("--into", type=FOLDER, default=".", help="Folder for the package.  [default: the current folder]")
@as_json
def new_adapter(name: str, into: Path, as_json: bool) -> None:
    """Create the package ace-NAME: a new adapter with tests.

    The package can be installed, and its tests pass. It patches a small example network. Its README explains how to
    change it for your model.
    """
    taken = {command: f"'ace-patch {command}' is a command" for command in COMMANDS}
    taken |= {plugin.name: f"{plugin.distribution} has an adapter with this name" for plugin in registry()}
    folder, written = make_adapter(name, into, taken)
    if as_json:
        print_json({"folder": str(folder), "files": written})
        return
    click.echo(f"{folder}: {len(written)} files. Install and test it:")
    click.echo(f"  cd {folder} && pip install -e '.[test]' && pytest")
    click.echo("Then follow its README.md to patch your own model.")


def _call_hook(hook: str) -> Iterator[tuple[Plugin, Any]]:
    """Call a hook of every adapter that implements it and yield the results. Warn about adapters that fail."""
    for plugin in registry().adapters:
        if plugin.has(hook):
            try:
                yield plugin, plugin.call(hook)
            except AceError as error:
                warnings.warn(f"this adapter is left out: {error}", AceWarning, stacklevel=2)


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
    """Train small examples with and without ACE, in a few minutes.

    Without COMMAND, all demos run. Options of a demo follow its name.
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
    """Data sets that adapters generate."""

    kind, advice = "data set", "installed adapters provide these"

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({name for _, commands in _call_hook("ace_datasets") for name in commands})

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        return next((commands[name] for _, commands in _call_hook("ace_datasets") if name in commands), None)


@click.group("data", cls=Datasets)
def data() -> None:
    """Generate a data set that the scripts of an upstream can read."""
