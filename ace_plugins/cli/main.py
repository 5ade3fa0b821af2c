"""The command ``ace-patch``. Its commands are imported when they are called, so that ``--help`` and TAB are fast."""

from __future__ import annotations

import importlib
import sys
import warnings
from itertools import chain
from typing import Any, cast

import click

from .. import __version__
from ..errors import AceError, AceWarning, AdapterError
from ..output import printable
from ..plugins.registry import find_installable, registry
from .options import Commands, Items, matching

COMMANDS = {
    "audit": ("models:audit", "Measure the equivariance error of ADAPTER's example model."),
    "compare": ("runs:compare", "Compare a script with and without ACE over several seeds."),
    "data": ("plugins:data", "Generate a data set that the scripts of an upstream can read."),
    "demo": ("plugins:demo", "Train small examples with and without ACE, in a few minutes."),
    "doctor": ("models:doctor", "Check ADAPTER on its example model."),
    "export": ("models:export", "Remove ACE from CHECKPOINT and write the rest to a new file."),
    "list": ("plugins:list_", "List the installed adapters, with required and found versions."),
    "new-adapter": ("plugins:new_adapter", "Create the package ace-NAME: a new adapter with tests."),
    "report": ("runs:report", "Write a report on runs, as one self-contained HTML page."),
    "revert": ("scripts:revert", "Remove ACE from CHECKOUT: the marked lines and ace.toml."),
    "run": ("scripts:run", "Run a script with ACE, without changing any file."),
    "status": ("scripts:status", "Show whether CHECKOUT is patched, and with which settings."),
    "watch": ("runs:watch", "Watch a run in the terminal while it trains."),
}
"""The module and attribute of each command, and the first sentence of its help."""
COMPLETION = """\b
To complete commands, adapters and options with TAB, add this line to ~/.bashrc:
  eval "$(_ACE_PATCH_COMPLETE=bash_source ace-patch)"
In zsh use zsh_source; in fish: _ACE_PATCH_COMPLETE=fish_source ace-patch | source"""


class AcePatch(Commands):
    """Group of `COMMANDS` and one command per adapter of a cloned upstream. Prints errors in one line."""

    advice = "see 'ace-patch --help'"

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except AceError as error:
            details = getattr(error, "details", ())  # of a CheckoutError: differences from the expected layout
            message = " ".join(getattr(error, "message", str(error)).split())
            click.echo(printable("\n  ".join([f"ace-patch: {message}{':' if details else ''}", *details])), err=True)
            ctx.exit(2)

    def sections(self, ctx: click.Context) -> dict[str, list[tuple[str, str]]]:
        commands = [(name, text) for name, (_, text) in COMMANDS.items()]
        checkouts = [(p.name, f"Patch a checkout of {p.patches.title}.") for p in registry().with_checkouts]
        return {"Commands": commands, "Checkouts": checkouts}

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for commands in self.sections(ctx).values() for name, _ in commands]

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name in COMMANDS:
            module, attribute = COMMANDS[name][0].split(":")
            return cast(click.Command, getattr(importlib.import_module(f".{module}", __package__), attribute))
        if name.replace("-", "_") in registry().plugins:
            from .scripts import patch_command

            return patch_command(name)
        if how := find_installable(name):
            raise AdapterError(how)
        return None

    def shell_complete(self, ctx: click.Context, incomplete: str) -> Items:
        options = click.Command.shell_complete(self, ctx, incomplete)
        return [*matching(chain(*self.sections(ctx).values()), incomplete), *options]


@click.group(cls=AcePatch, epilog=COMPLETION, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="ace-patch")
def cli() -> None:
    """Train existing equivariant models with ACE, using their own training scripts."""


def main(prog_name: str = "ace-patch") -> None:
    """Run the console script."""

    def show_warning(message: Any, category: type[Warning], *where: Any) -> None:
        ours = issubclass(category, AceWarning)
        text = f"ace-patch: {message}" if ours else warnings.formatwarning(message, category, *where[:2])
        click.echo(printable(text), err=True)

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("once", AceWarning)
            warnings.showwarning = show_warning  # type: ignore[assignment]
            result = cli.main(prog_name=prog_name, standalone_mode=False)
    except click.ClickException as error:
        command = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx else prog_name
        message = f"ace-patch: {' '.join(error.format_message().split())} See '{command} --help'"
        click.echo(printable(message), err=True)
        sys.exit(error.exit_code)
    except click.Abort:
        sys.exit(130)  # Ctrl-C
    sys.exit(result if isinstance(result, int) else 0)
