"""The command ``ace-patch``. What it does is in the modules it calls; this is how people say it and see it.

torch is imported only by the commands that need it, and no plugin can keep ``--help`` or ``list`` from working.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Callable
from typing import Any

import click

from . import __version__
from .config import Config
from .errors import AceError, AceWarning, one_of
from .plugins import Plugin, registry


class Commands(click.Group):
    """Errors the user can mend are one line and exit code 2, and a near miss is answered with what was near."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except AceError as error:
            click.echo(_line(error), err=True)
            ctx.exit(2)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        name = args[0]
        if self.get_command(ctx, name) is None and not name.startswith("-"):
            if name in registry().plugins:
                raise AceError(
                    f"'ace-patch {name}' does not exist: {name} has no checkout to patch; run 'ace-patch run {name} -- "
                    f"your_script.py', or see 'ace-patch doctor {name}'"
                )
            raise AceError(one_of("command", name, self.commands, do="see 'ace-patch --help'"))
        return super().resolve_command(ctx, args)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="ace-patch")
def cli() -> None:
    """Train the equivariant models you already use under ACE, with the scripts you already have."""


# Older clicks print the help themselves.
_NO_ARGUMENTS: Any = getattr(click.exceptions, "NoArgsIsHelpError", ())


def main(prog_name: str = "ace-patch") -> None:
    """The console script. ``run`` hands its script back, so that it runs with no trace of click around it."""
    try:
        result = cli.main(prog_name=prog_name, standalone_mode=False)
    except _NO_ARGUMENTS as error:
        error.show()
        sys.exit(error.exit_code)
    except click.ClickException as error:
        where = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx else prog_name
        click.echo(f"ace-patch: {' '.join(error.format_message().split())} See '{where} --help'", err=True)
        sys.exit(error.exit_code)
    except click.Abort:
        click.echo("Aborted!", err=True)
        sys.exit(1)
    if callable(result):
        try:
            result = result()
        except AceError as error:
            click.echo(_line(error), err=True)
            result = 2
    sys.exit(result if isinstance(result, int) else 0)


def _line(error: AceError) -> str:
    return f"ace-patch: {' '.join(str(error).split())}"


as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")


def _print_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=2))


@cli.command("list")
@as_json
def list_(as_json: bool) -> None:
    """Every adapter: from which distribution, versions wanted and found, healthy or why not."""
    plugins = list(registry())
    if as_json:
        _print_json([_described(plugin) for plugin in plugins])
        return
    if not plugins and "ACE_LOAD_PLUGINS" not in os.environ:
        click.echo("no plugins found: install an adapter, for example pip install ace-schnet")
        return
    from .tables import print_plugins

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


@cli.command()
@click.argument("adapter")
@as_json
def doctor(adapter: str, as_json: bool) -> None:
    """Attach ADAPTER to a small model: sites, branches, parameters, symmetry at gamma = 0 and 1."""
    registry().adapter(adapter)
    from .doctor import diagnose

    found = diagnose(adapter)
    if as_json:
        _print_json(found.to_dict())
    else:
        from .tables import print_diagnosis

        print_diagnosis(found)
    if found.problems:
        sys.exit(1)


def config_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """One option for every field of `Config`; what is not given is left to the adapter's preset."""
    for field in reversed(dataclasses.fields(Config)):
        name = "--" + field.name.replace("_", "-")
        kind: Any = str
        if isinstance(field.default, bool):
            name, kind = f"{name}/--no-{name[2:]}", None
        elif isinstance(field.default, (int, float)):
            kind = type(field.default)
        option = click.option(name, field.name, type=kind, default=None, help=field.metadata["help"])
        command = option(command)
    return click.option("--preset", default=None, help="The adapter's named settings to start from.")(command)


class RunCommand(click.Command):
    """ADAPTER and options first; from the script's name on, every word is the script's, with or without '--'."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.allow_interspersed_args = False
        named = bool(args) and not args[0].startswith("-")
        rest = super().parse_args(ctx, args[1:] if named else args)
        words = list(ctx.params["words"])
        adapter = args[0] if named else words.pop(0) if words else None
        if adapter is None:
            raise AceError("no adapter given: expected ace-patch run ADAPTER -- script.py; 'ace-patch list' shows them")
        if words and words[0].startswith("-") and words[0] not in ("--", "-m", "-c"):
            raise AceError(f"option {words[0]!r}: expected options before the adapter, or between it and '--'")
        ctx.params["words"] = (adapter, *(words[1:] if words[:1] == ["--"] else words))
        return rest


@cli.command(cls=RunCommand, options_metavar="ADAPTER [OPTIONS]")
@config_options
@as_json
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="-- SCRIPT [ARGS]...")
def run(as_json: bool, words: tuple[str, ...], **options: Any) -> Callable[[], int]:
    """Run a training script with every model of ADAPTER attached. Nothing of it is changed on disk.

    The script sees the same sys.argv, __main__, sys.path and exit code as without ACE:
    ace-patch run schnet --mode resilient -- train.py --epochs 10
    """
    adapter, *command = words
    settings = {name: value for name, value in options.items() if value is not None}
    registry().adapter(adapter)
    from .running import prepared

    return prepared(adapter, settings, command, as_json=as_json)


@cli.command()
@click.argument("checkpoint", type=click.Path())
@click.option("-o", "--output", required=True, type=click.Path(), help="Where the checkpoint without ACE goes.")
@as_json
def export(checkpoint: str, output: str, as_json: bool) -> None:
    """Write CHECKPOINT without ACE, so that plain upstream loads it with strict=True."""
    import warnings

    from .checkpoints import exported

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", AceWarning)
        done = exported(checkpoint, output)
    notices = [str(warning.message) for warning in caught if issubclass(warning.category, AceWarning)]
    if as_json:
        told = {"checkpoint": checkpoint, "output": output, "kept": done.kept, "removed": done.removed}
        _print_json({**told, "warnings": notices})
        return
    click.echo(f"{output}: {done.kept} tensors kept, {done.removed} of ACE removed")
    for notice in notices:
        click.echo(f"ace-patch: {notice}", err=True)


class Demos(click.Group):
    """The demos of the adapters that have one; ``ace-patch demo`` without a name is the first."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [plugin.name for plugin in registry().adapters if plugin.has("ace_demo")]

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in self.list_commands(ctx):
            return None
        found: click.Command = registry().adapter(name).call("ace_demo")
        return found

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        names = self.list_commands(ctx)
        if not names:
            raise AceError("no installed adapter has a demo: expected one that implements ace_demo, such as ace-schnet")
        if args and args[0] not in names and not args[0].startswith("-"):
            raise AceError(one_of("demo", args[0], names, do="these adapters have one"))
        if not args or args[0] not in names:
            args = [names[0], *args]
        return super().parse_args(ctx, args)


cli.add_command(Demos("demo", help="See ACE at work on real data, in a few minutes."))
