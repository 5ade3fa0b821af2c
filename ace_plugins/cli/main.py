"""The command ``ace-patch``: the list of its commands, and errors in one line.

A command is imported when it is called, so that ``--help`` and shell completion are fast.
"""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from typing import Any

import click

from .. import __version__
from ..errors import AceError, AceWarning, CheckoutError
from ..plugins.registry import registry
from .options import Commands, Items, matching

COMMANDS = {
    "audit": ("models:audit", "Measure how equivariant an example model of ADAPTER is."),
    "compare": ("compare:compare", "Compare a script with and without ACE over several seeds."),
    "data": ("plugins:data", "Generate a data set for an upstream."),
    "demo": ("plugins:demo", "Show ACE on small examples, in a few minutes."),
    "doctor": ("models:doctor", "Attach ADAPTER to a small model and check it."),
    "export": ("models:export", "Write CHECKPOINT without ACE, for plain upstream."),
    "list": ("plugins:list_", "List adapters, with the versions they require and find."),
    "new-adapter": ("plugins:new_adapter", "Create the package ace-NAME: a new adapter with tests."),
    "report": ("reports:report", "Write a report on runs, as one self-contained HTML page."),
    "revert": ("scripts:revert", "Remove ACE from CHECKOUT: the marked lines and ace.toml."),
    "run": ("scripts:run", "Run a script with ACE, without changing any file."),
    "status": ("scripts:status", "Show whether CHECKOUT is patched, and with which settings."),
    "watch": ("reports:watch", "Watch a run in the terminal while it trains."),
}
"""The module and attribute of each command, and the first sentence of its help."""
COMPLETION = """\b
To complete commands, adapters and options with TAB, add this line to ~/.bashrc:
  eval "$(_ACE_PATCH_COMPLETE=bash_source ace-patch)"
In zsh use zsh_source; in fish: _ACE_PATCH_COMPLETE=fish_source ace-patch | source"""


class AcePatch(Commands):
    """The commands, and one command for each adapter of a cloned upstream. Errors are printed in one line."""

    advice = "see 'ace-patch --help'"

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except AceError as error:
            _print_error(error)
            ctx.exit(2)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*COMMANDS, *(plugin.name for plugin in registry().with_checkouts)]

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name in COMMANDS:
            module, attribute = COMMANDS[name][0].split(":")
            command: click.Command = getattr(importlib.import_module(f".{module}", __package__), attribute)
            return command
        if name.replace("-", "_") in registry().plugins:
            from .scripts import patch_command

            return patch_command(name)
        return None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, commands in (("Commands", _commands()), ("Checkouts", _checkouts())):
            if commands:
                with formatter.section(title):
                    formatter.write_dl(commands)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> Items:
        options = click.Command.shell_complete(self, ctx, incomplete)
        return [*matching([*_commands(), *_checkouts()], incomplete), *options]


def _commands() -> list[tuple[str, str]]:
    return [(name, text) for name, (_, text) in COMMANDS.items()]


def _checkouts() -> list[tuple[str, str]]:
    return [(p.name, f"Patch a checkout of {p.patches.title}.") for p in registry().with_checkouts]


@click.group(
    cls=AcePatch,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=COMPLETION,
)
@click.version_option(__version__, prog_name="ace-patch")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Train the equivariant models you already use under ACE, with the scripts you already have."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def main(prog_name: str = "ace-patch") -> None:
    """Run the console script."""
    try:
        os.getcwd()
    except FileNotFoundError:
        click.echo("ace-patch: the current folder does not exist any more: change to another folder", err=True)
        sys.exit(2)
    shown: set[str] = set()

    def show_warning(message: Any, category: type[Warning], filename: str, lineno: int, *more: Any) -> None:
        """Print each warning only once. A warning of ACE takes one line, without the source code."""
        ours = issubclass(category, AceWarning)
        text = f"ace-patch: {message}" if ours else warnings.formatwarning(message, category, filename, lineno)
        if text not in shown:
            shown.add(text)
            click.echo(text, err=True)

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always", AceWarning)
            warnings.showwarning = show_warning  # type: ignore[assignment]
            result = cli.main(prog_name=prog_name, standalone_mode=False)
    except click.ClickException as error:
        command = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx else prog_name
        click.echo(f"ace-patch: {' '.join(error.format_message().split())} See '{command} --help'", err=True)
        sys.exit(error.exit_code)
    except click.Abort:
        click.echo("Aborted!", err=True)
        sys.exit(1)
    sys.exit(result if isinstance(result, int) else 0)


def _print_error(error: AceError) -> None:
    """Print the error in one line, and each detail of a CheckoutError in a further line."""
    details = error.details if isinstance(error, CheckoutError) else ()
    message = error.message if isinstance(error, CheckoutError) else str(error)
    click.echo(f"ace-patch: {' '.join(message.split())}{':' if details else ''}", err=True)
    for detail in details:
        click.echo(f"  {detail}", err=True)
