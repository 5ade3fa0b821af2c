"""The command ``ace-patch``. What it does is in the modules it calls; this is how people say it and see it.

torch is imported only by the commands that need it, and no plugin can keep ``--help`` or ``list`` from working.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import click

from .. import __version__
from ..errors import AceError, AceWarning, CheckoutError, one_of
from ..plugins.registry import Plugin, registry
from ..run.launch import launch
from .checkouts import patch_command, revert, status
from .options import as_json, config_options, given_settings, print_json


class Commands(click.Group):
    """Errors the user can mend are one line and exit code 2, and a near miss is answered with what was near."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except AceError as error:
            _tell(error)
            ctx.exit(2)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        return super().get_command(ctx, name) or patch_command(name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_commands(ctx, formatter)
        rows = [(p.name, f"Patch a checkout of {p.upstream.title}.") for p in registry().with_checkouts if p.upstream]
        if rows:
            with formatter.section("Checkouts"):
                formatter.write_dl(rows)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        name = args[0]
        if self.get_command(ctx, name) is None and not name.startswith("-"):
            if name.replace("-", "_") in registry().plugins:
                from ..checkout.patching import checkout_of

                checkout_of(registry().adapter(name))  # says why it has no such command
            known = [*self.commands, *(p.name for p in registry().with_checkouts)]
            raise AceError(one_of("command", name, known, do="see 'ace-patch --help'"))
        return super().resolve_command(ctx, args)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="ace-patch")
def cli() -> None:
    """Train the equivariant models you already use under ACE, with the scripts you already have."""


# Older clicks print the help themselves.
_NO_ARGUMENTS: Any = getattr(click.exceptions, "NoArgsIsHelpError", ())


def main(prog_name: str = "ace-patch") -> None:
    """The console script."""
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
    sys.exit(result if isinstance(result, int) else 0)


def _tell(error: AceError) -> None:
    """One line; only where there are many things to say, a line for each."""
    details = error.details if isinstance(error, CheckoutError) else ()
    message = error.message if isinstance(error, CheckoutError) else str(error)
    click.echo(f"ace-patch: {' '.join(message.split())}{':' if details else ''}", err=True)
    for detail in details:
        click.echo(f"  {detail}", err=True)


@cli.command("list", short_help="Every adapter: versions wanted and found, healthy or why not.")
@as_json
def list_(as_json: bool) -> None:
    """Every adapter: from which distribution, versions wanted and found, healthy or why not."""
    plugins = list(registry())
    if as_json:
        print_json([_described(plugin) for plugin in plugins])
        return
    if not plugins and "ACE_LOAD_PLUGINS" not in os.environ:
        example = "pip install './adapters/schnet[upstream]' in a clone of ace-plugins"
        click.echo(f"no plugins found: install an adapter, for example {example}")
        return
    from ..report.tables import print_plugins

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


@cli.command(short_help="Attach an adapter to a small model and examine it.")
@click.argument("adapter")
@click.argument("checkout", type=click.Path(path_type=Path), required=False)
@as_json
def doctor(adapter: str, checkout: Path | None, as_json: bool) -> None:
    """Attach ADAPTER to a small model: sites, branches, parameters, symmetry at gamma = 0 and 1.

    An upstream that is cloned is looked for in CHECKOUT, or in the current folder.
    """
    registry().adapter(adapter)
    from ..testing.doctor import diagnose

    found = diagnose(adapter, checkout=checkout)
    if as_json:
        print_json(found.to_dict())
    else:
        from ..report.tables import print_diagnosis

        print_diagnosis(found)
    if found.problems:
        sys.exit(1)


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


@cli.command(
    cls=RunCommand, short_help="Run a script with ACE; nothing is written to it.", options_metavar="ADAPTER [OPTIONS]"
)
@config_options
@as_json
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="-- SCRIPT [ARGS]...")
def run(as_json: bool, words: tuple[str, ...], **options: Any) -> None:
    """Run a training script with every model of ADAPTER attached. Nothing of it is changed on disk.

    ace-patch becomes the command itself, so everything about it is as without ACE:
    ace-patch run schnet --mode resilient -- train.py --epochs 10

    The command is script.py, -m module, -c code or a program such as torchrun; processes it starts train with ACE too.
    """
    adapter, *command = words
    launch(adapter, given_settings(options), command, as_json=as_json)


@cli.command(short_help="A checkpoint without ACE, for plain upstream.")
@click.argument("checkpoint", type=click.Path())
@click.option("-o", "--output", required=True, type=click.Path(), help="Where the checkpoint without ACE goes.")
@as_json
def export(checkpoint: str, output: str, as_json: bool) -> None:
    """Write CHECKPOINT without ACE, so that plain upstream loads it with strict=True."""
    import warnings

    from ..engine.checkpoints import exported

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", AceWarning)
        done = exported(checkpoint, output)
    notices = [str(warning.message) for warning in caught if issubclass(warning.category, AceWarning)]
    if as_json:
        told = {"checkpoint": checkpoint, "output": output, "kept": done.kept, "removed": done.removed}
        print_json({**told, "warnings": notices})
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


class Datasets(click.Group):
    """Data sets that upstreams read, made by the adapters that can."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(_datasets())

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        return _datasets().get(name)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if args[0] not in _datasets() and not args[0].startswith("-"):
            raise AceError(one_of("data set", args[0], _datasets(), do="installed adapters make these"))
        return super().resolve_command(ctx, args)


def _datasets() -> dict[str, click.Command]:
    found: dict[str, click.Command] = {}
    for plugin in registry().adapters:
        if plugin.has("ace_datasets"):
            found.update(plugin.call("ace_datasets"))
    return found


cli.add_command(Datasets("data", help="Make a data set that an upstream reads."))
cli.add_command(revert)
cli.add_command(status)
