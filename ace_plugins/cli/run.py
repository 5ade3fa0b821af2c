"""``ace-patch run``."""

from __future__ import annotations

from typing import Any

import click

from ..errors import AceError
from ..run.launch import launch
from .options import as_json, config_options, given_settings


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


@click.command(cls=RunCommand, options_metavar="ADAPTER [OPTIONS]")
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
