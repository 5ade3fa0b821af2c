"""The command ``ace-patch``: the words people type, and which module carries each out.

Commands are loaded when they are called: torch is imported only by those that need it, and no plugin can keep
``--help`` or ``list`` from working.
"""

from __future__ import annotations

import os
import sys
import warnings
from typing import Any

import click

from .. import __version__
from ..errors import AceError, AceWarning, CheckoutError, one_of
from ..later import later
from ..plugins.registry import registry
from .options import Items, matching

COMMANDS = {
    "audit": ("models", "audit", "How equivariant a model is, as a whole and by layer."),
    "compare": ("compare", "compare", "Does it pay, here? One script with and without ACE, over seeds."),
    "data": ("plugins", "data", "Make a data set that an upstream reads."),
    "demo": ("plugins", "demo", "See ACE at work, where it wins and where it ties, in a few minutes."),
    "doctor": ("models", "doctor", "Attach an adapter to a small model and examine it."),
    "export": ("models", "export", "A checkpoint without ACE, for plain upstream."),
    "list": ("plugins", "listing", "Every adapter: versions wanted and found, healthy or why not."),
    "new-adapter": ("plugins", "new_adapter", "A new adapter as a whole package that works, to make your own."),
    "report": ("reports", "report", "What runs came to: a page with verdicts in plain words."),
    "revert": ("scripts", "revert", "Undo a patch; your own edits stay."),
    "run": ("scripts", "run", "Run a script with ACE; nothing is written to it."),
    "status": ("scripts", "status", "Whose checkout, which commit, patched or not."),
    "watch": ("reports", "watch", "A run under way, live in the terminal."),
}
"""Module and name of each, and what it is for. Every adapter whose upstream people clone has a command besides."""

COMPLETION = """\b
TAB completes commands, adapters, options and their values, with this line in ~/.bashrc:
  eval "$(_ACE_PATCH_COMPLETE=bash_source ace-patch)"
zsh and fish have zsh_source and fish_source; in fish: ... | source"""


class Commands(click.Group):
    """Errors the user can mend are one line and exit code 2, and a near miss is answered with what was near."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except AceError as error:
            _tell(error)
            ctx.exit(2)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        found: click.Command | None = None
        if name in COMMANDS:
            module, command, _ = COMMANDS[name]
            found = getattr(later(f"ace_plugins.cli.{module}"), command)
        elif name.replace("-", "_") in registry().plugins:
            found = later("ace_plugins.cli.scripts").patch_command(name)
        return found

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(_commands())
        if _checkouts():
            with formatter.section("Checkouts"):
                formatter.write_dl(_checkouts())

    def shell_complete(self, ctx: click.Context, incomplete: str) -> Items:
        """Words alone: to load every command for what it is for would take longer than people wait for TAB."""
        options = click.Command.shell_complete(self, ctx, incomplete)
        return [*matching([*_commands(), *_checkouts()], incomplete), *options]

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        name = args[0]
        if ctx.resilient_parsing:  # the shell asks: an error would be printed into the line that is being typed
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
    """The console script."""
    try:
        os.getcwd()
    except FileNotFoundError:
        click.echo("ace-patch: the current folder is gone: cd to one that exists", err=True)
        sys.exit(2)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always", AceWarning)
            warnings.showwarning = Notices()  # type: ignore[assignment]
            result = cli.main(prog_name=prog_name, standalone_mode=False)
    except click.ClickException as error:
        where = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx else prog_name
        click.echo(f"ace-patch: {' '.join(error.format_message().split())} See '{where} --help'", err=True)
        sys.exit(error.exit_code)
    except click.Abort:
        click.echo("Aborted!", err=True)
        sys.exit(1)
    sys.exit(result if isinstance(result, int) else 0)


class Notices:
    """Shows warnings: ACE's own in one line, once, without the place in our code they came from."""

    def __init__(self) -> None:
        self.told: set[str] = set()

    def __call__(self, message: Any, category: type[Warning], filename: str, lineno: int, *more: Any) -> None:
        ours = issubclass(category, AceWarning)
        text = f"ace-patch: {message}" if ours else warnings.formatwarning(message, category, filename, lineno)
        if text not in self.told:
            self.told.add(text)
            click.echo(text, err=True)


def _tell(error: AceError) -> None:
    """One line; only where there are many things to say, a line for each."""
    details = error.details if isinstance(error, CheckoutError) else ()
    message = error.message if isinstance(error, CheckoutError) else str(error)
    click.echo(f"ace-patch: {' '.join(message.split())}{':' if details else ''}", err=True)
    for detail in details:
        click.echo(f"  {detail}", err=True)
