"""The command ``ace-patch``: finds the module of each command, and prints errors in one line.

Commands are imported when they are called, so that ``--help`` does not wait for torch and no broken plugin can stop it.
"""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from typing import Any

import click

from .. import __version__
from ..errors import AceError, AceWarning, CheckoutError, one_of
from ..plugins.registry import registry
from .options import Items, matching

COMMANDS = {
    "audit": ("models", "audit", "Measure how equivariant a model is, as a whole and by layer."),
    "compare": ("compare", "compare", "Compare a script with and without ACE over several seeds."),
    "data": ("plugins", "data", "Generate a data set for an upstream."),
    "demo": ("plugins", "demo", "Show ACE on small examples, in a few minutes."),
    "doctor": ("models", "doctor", "Attach an adapter to a small model and check it."),
    "export": ("models", "export", "Write a checkpoint without ACE, for plain upstream."),
    "list": ("plugins", "list_", "List adapters, with the versions they require and find."),
    "new-adapter": ("plugins", "new_adapter", "Create a new adapter, as a package that works."),
    "report": ("reports", "report", "Write a report on runs, as an HTML page."),
    "revert": ("scripts", "revert", "Remove ACE from a patched checkout."),
    "run": ("scripts", "run", "Run a script with ACE, without changing any file."),
    "status": ("scripts", "status", "Show whether and how a checkout is patched."),
    "watch": ("reports", "watch", "Watch a run in the terminal while it trains."),
}
"""Mapping from each command to its module, attribute and summary. Each adapter of a cloned upstream adds a command."""

COMPLETION = """\b
To complete commands, adapters and options with TAB, add this line to ~/.bashrc:
  eval "$(_ACE_PATCH_COMPLETE=bash_source ace-patch)"
In zsh use zsh_source; in fish: _ACE_PATCH_COMPLETE=fish_source ace-patch | source"""


class Commands(click.Group):
    """A group that imports a command when it is called, prints errors in one line, and suggests similar names."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except AceError as error:
            _print_error(error)
            ctx.exit(2)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        found: click.Command | None = None
        if name in COMMANDS:
            module, command, _ = COMMANDS[name]
            found = getattr(importlib.import_module(f".{module}", __package__), command)
        elif name.replace("-", "_") in registry().plugins:
            from .scripts import patch_command

            found = patch_command(name)
        return found

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, commands in (("Commands", _commands()), ("Checkouts", _checkouts())):
            if commands:
                with formatter.section(title):
                    formatter.write_dl(commands)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> Items:
        """Complete names without importing every command, which is too slow for TAB."""
        options = click.Command.shell_complete(self, ctx, incomplete)
        return [*matching([*_commands(), *_checkouts()], incomplete), *options]

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        name = args[0]
        if ctx.resilient_parsing:  # completion: an error would be printed into the line that the user is typing
            try:
                found = self.get_command(ctx, name)
            except AceError:
                found = None
            return name, found or click.Command(name, add_help_option=False), args[1:]
        if not name.startswith("-") and self.get_command(ctx, name) is None:
            known = [*COMMANDS, *(p.name for p in registry().with_checkouts)]
            raise AceError(one_of("command", name, known, do="see 'ace-patch --help'"))
        return super().resolve_command(ctx, args)


def _commands() -> list[tuple[str, str]]:
    return [(name, text) for name, (_, _, text) in COMMANDS.items()]


def _checkouts() -> list[tuple[str, str]]:
    return [(p.name, f"Patch a checkout of {p.patches.title}.") for p in registry().with_checkouts]


@click.group(
    cls=Commands,
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
