"""Commands that have scripts train with ACE: ``run``; for a checkout ``segnn`` and its like, ``status``, ``revert``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from ..checkout.patching import Plan, checkout_of, patching, reverting
from ..checkout.state import state
from ..errors import AceError
from ..plugins.registry import registry
from ..run.launch import launch
from .options import Items, ScriptCommand, adapters, as_json, config_options, files, given_settings, print_json
from .tables import print_patching, print_state

CHECKOUT = click.argument("checkout", type=click.Path(path_type=Path), default=".")
DRY_RUN = click.option("--dry-run", is_flag=True, help="Print what would be changed, as a diff, and change nothing.")


def patch_command(name: str) -> click.Command:
    """``ace-patch segnn``: one command for every adapter whose upstream is a checkout; an error for the others."""
    of = checkout_of(registry().adapter(name))
    scripts = ", ".join(of.scripts)

    @click.command(
        name,
        help=f"Patch CHECKOUT, a clone of {of.repository} (by default the current folder), so "
        f"that its own scripts train with ACE. One marked line goes into {scripts}, and the settings into ace.toml. "
        "Run again with options to change settings.",
    )
    @CHECKOUT
    @config_options
    @DRY_RUN
    @as_json
    def patch(checkout: Path, dry_run: bool, as_json: bool, **options: Any) -> None:
        adapter = registry().adapter(name)
        settings = given_settings(options)
        plan = patching(checkout, adapter, settings)
        if dry_run and not as_json:
            click.echo(plan.diff(), nl=False)
            if not plan.changed:
                click.echo(f"nothing to change: {plan.root} is patched already", err=True)
            return
        if not dry_run:
            plan.carry_out()
        if as_json:
            about = {"commit": plan.layout.commit, "tried": plan.layout.tried, "warnings": list(plan.config.cautions)}
            print_json(_planned(plan, dry_run) | about)
            return
        print_patching(adapter, plan)

    return patch


def _planned(plan: Plan, dry_run: bool) -> dict[str, Any]:
    return {
        "checkout": str(plan.root),
        "changed": [plan.name(change) for change in plan.changed],
        "kept": list(plan.kept),
        "diff": plan.diff(),
        "dry_run": dry_run,
    }


@click.command()
@CHECKOUT
@click.option("--purge", is_flag=True, help="Remove ace.toml even if it was edited.")
@DRY_RUN
@as_json
def revert(checkout: Path, purge: bool, dry_run: bool, as_json: bool) -> None:
    """Take ACE out of CHECKOUT again: the marked lines go, your own edits stay."""
    plan = reverting(checkout, purge=purge)
    if not dry_run:
        plan.carry_out()
    if as_json:
        print_json(_planned(plan, dry_run))
        return
    if dry_run:
        click.echo(plan.diff(), nl=False)
    for change in () if dry_run else plan.changed:
        click.echo(f"{plan.name(change)}: {'removed' if change.after is None else 'the marked line is gone'}")
    if not plan.changed:
        if not plan.kept:
            state(checkout)  # says so where this is no checkout at all
        click.echo(f"nothing to revert in {plan.root}", err=dry_run)
    for kept in plan.kept:
        click.echo(f"kept {kept}", err=True)


@click.command()
@CHECKOUT
@as_json
def status(checkout: Path, as_json: bool) -> None:
    """How CHECKOUT is: whose it is, at which commit, patched or not, with which settings."""
    found = state(checkout)
    if as_json:
        print_json(found.to_dict())
    else:
        print_state(found)
    if found.problems:
        sys.exit(1)


class RunCommand(ScriptCommand):
    """ADAPTER and options first; from the script's name on, every word is the script's, with or without '--'."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.allow_interspersed_args = False
        named = bool(args) and not args[0].startswith("-")
        rest = super().parse_args(ctx, args[1:] if named else args)
        words = list(ctx.params["words"])
        adapter = args[0] if named else words.pop(0) if words else None
        if words or "--" in args or (adapter is not None and not named):  # options are not for after both
            self.begin_script(ctx)
        if ctx.resilient_parsing:  # the shell asks what could come next: nothing is wrong yet
            ctx.params["words"] = () if adapter is None else (adapter, *words)
            return rest
        if adapter is None:
            raise AceError("no adapter given: expected ace-patch run ADAPTER -- script.py; 'ace-patch list' shows them")
        if words and words[0].startswith("-") and words[0] not in ("--", "-m", "-c"):
            raise AceError(f"option {words[0]!r}: expected options before the adapter, or between it and '--'")
        ctx.params["words"] = (adapter, *(words[1:] if words[:1] == ["--"] else words))
        return rest


def _adapter_or_script(ctx: click.Context, param: Any, incomplete: str) -> Items:
    return (files if ctx.params["words"] else adapters)(ctx, param, incomplete)


@click.command(cls=RunCommand, options_metavar="ADAPTER [OPTIONS]")
@config_options
@as_json
@click.argument(
    "words", nargs=-1, type=click.UNPROCESSED, metavar="-- SCRIPT [ARGS]...", shell_complete=_adapter_or_script
)
def run(as_json: bool, words: tuple[str, ...], **options: Any) -> None:
    """Run a training script with every model of ADAPTER attached. Nothing of it is changed on disk.

    ace-patch becomes the command itself, so everything about it is as without ACE:
    ace-patch run schnet --mode resilient -- train.py --epochs 10

    The command is script.py, -m module, -c code or a program such as torchrun; processes it starts train with ACE too.
    """
    adapter, *command = words
    launch(adapter, given_settings(options), command, as_json=as_json)
