"""The command ``ace-patch``: all commands, and errors in one line.

No module of a command imports torch at the top, so that ``--help`` and shell completion are fast.
"""

from __future__ import annotations

import os
import sys
import warnings
from typing import Any

import click

from .. import __version__
from ..errors import AceError, AceWarning, CheckoutError
from ..plugins.registry import registry
from .compare import compare
from .models import audit, doctor, export
from .options import Commands
from .plugins import data, demo, list_, new_adapter
from .reports import report, watch
from .scripts import patch_command, revert, run, status

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
        return [*super().list_commands(ctx), *(plugin.name for plugin in registry().with_checkouts)]

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        found = super().get_command(ctx, name)
        return patch_command(name) if found is None and name.replace("-", "_") in registry().plugins else found

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        self.write_section("Commands", [*self.commands], ctx, formatter)
        checkouts = [name for name in self.list_commands(ctx) if name not in self.commands]
        self.write_section("Checkouts", checkouts, ctx, formatter)


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


for _command in (audit, compare, data, demo, doctor, export, list_, new_adapter, report, revert, run, status, watch):
    cli.add_command(_command)


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
