"""Commands with which scripts train with ACE: ``run``, and for checkouts ``status``, ``revert`` and one per adapter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.markup import escape

from ..checkout.changes import Plan
from ..checkout.patching import PatchPlan, State, plan_patch, plan_revert, read_state, require_checkout
from ..contract.upstreams import StandIn
from ..patch.shims import has_effect
from ..plugins.plugin import Plugin
from ..plugins.registry import registry
from ..report.terminal import open_console
from ..run.launch import launch
from ..settings.config import Config
from ..settings.toml_file import SettingsFile, is_as_written
from .options import ScriptCommand, adapters, as_json, collect_settings, config_options, print_json, show

CHECKOUT = click.argument("checkout", type=click.Path(path_type=Path), default=".")
DRY_RUN = click.option("--dry-run", is_flag=True, help="Print the changes as a diff, without making them.")


def patch_command(name: str) -> click.Command:
    """Make the command that patches a checkout for an adapter, such as ``ace-patch segnn``."""
    adapter = registry().adapter(name)
    clone = require_checkout(adapter)

    @click.command(
        name,
        short_help=f"Patch a checkout of {adapter.patches.title}.",
        help=f"Patch CHECKOUT, a clone of {clone.repository}, so that its scripts train with ACE.\n\nAdds one marked "
        f"line to {', '.join(clone.scripts)} and writes the settings to ace.toml. CHECKOUT is the current folder by "
        "default. Call the command again with options to change settings.",
    )
    @CHECKOUT
    @config_options
    @DRY_RUN
    @as_json
    def patch(checkout: Path, dry_run: bool, as_json: bool, **options: Any) -> None:
        plan = plan_patch(checkout, adapter, collect_settings(options))
        if dry_run and not as_json:
            click.echo(plan.diff(), nl=False)
            if not plan.changed:
                click.echo(f"nothing to change: {plan.root} is already patched", err=True)
            return
        if not dry_run:
            plan.apply()
        if as_json:
            about = {"commit": plan.layout.commit, "tried": plan.layout.tried, "warnings": list(plan.config.cautions)}
            print_json(_describe(plan, dry_run) | about)
        else:
            _print_patching(adapter, plan)

    return patch


def _describe(plan: Plan, dry_run: bool) -> dict[str, Any]:
    changed = [plan.name(change) for change in plan.changed]
    about = {"checkout": str(plan.root), "changed": changed, "kept": list(plan.kept)}
    return {**about, "diff": plan.diff(), "dry_run": dry_run}


def _print_patching(adapter: Plugin, plan: PatchPlan) -> None:
    out = open_console()
    out.print(escape(f"{adapter.patches.title} {plan.layout}"))
    for change in plan.changes:
        name, same = plan.name(change), change.before == change.after
        if name == plan.settings.path.name:
            done = "kept" if same else "written" if change.before is None else "updated"
            what = _format_settings(plan.settings, plan.config)
        else:
            done, what = "already marked" if same else "marked", "one line"
        out.print(escape(f"  {name}: {done} ({what})"))
    missing = [shim.name for shim in adapter.shims if isinstance(shim, StandIn) and has_effect(adapter, shim)]
    if missing and plan.config.shims:
        out.print(f"not installed, replaced by a stub: {', '.join(missing)}")
    _print_cautions(out, plan.config)
    scripts = ", ".join(adapter.patches.checkout.scripts) if adapter.patches.checkout else ""
    out.print(f"Now run {scripts} as its README says. 'ace-patch revert' undoes the patch.")


def _format_settings(file: SettingsFile, config: Config) -> str:
    """Format the preset, the summary of the settings, and settings in the file that the summary leaves out."""
    preset = [f"preset {file.settings['preset']}"] if "preset" in file.settings else []
    in_summary = ("preset", "mode", "budget", "dual_lr", "dual_optimizer")
    others = [f"{key} {value}" for key, value in file.settings.items() if key not in in_summary]
    return ", ".join([*preset, config.summary, *others])


def _print_cautions(out: Console, config: Config) -> None:
    for caution in config.cautions:
        out.print(f"[yellow]warning[/]: {escape(caution)}")


@click.command()
@CHECKOUT
@click.option("--purge", is_flag=True, help="Remove ace.toml even if it was edited.")
@DRY_RUN
@as_json
def revert(checkout: Path, purge: bool, dry_run: bool, as_json: bool) -> None:
    """Remove ACE from CHECKOUT: the marked lines and ace.toml. Your own edits stay."""
    plan = plan_revert(checkout, purge=purge)
    if not dry_run:
        plan.apply()
    if as_json:
        print_json(_describe(plan, dry_run))
        return
    if dry_run:
        click.echo(plan.diff(), nl=False)
    for change in () if dry_run else plan.changed:
        click.echo(f"{plan.name(change)}: {'removed' if change.after is None else 'marked line removed'}")
    if not plan.changed:
        if not plan.kept:
            read_state(checkout)  # raises an error if this is not a checkout
        click.echo(f"nothing to revert in {plan.root}", err=dry_run)
    for kept in plan.kept:
        click.echo(f"kept {kept}", err=True)


@click.command()
@CHECKOUT
@as_json
def status(checkout: Path, as_json: bool) -> None:
    """Show whether CHECKOUT is patched, and with which settings."""
    show(read_state(checkout), as_json, _print_state)


def _print_state(found: State) -> None:
    out = open_console()
    out.print(escape(f"{found.adapter.patches.title} {found.layout}"))
    for script, how in found.scripts.items():
        out.print(escape(f"  {script}: {how}"))
    if found.settings is not None and found.config is not None:
        edited = "not edited" if is_as_written(found.settings.text) else "edited"
        what = _format_settings(found.settings, found.config)
        out.print(escape(f"  {found.settings.path.name}: {edited} ({what})"))
        _print_cautions(out, found.config)
    for name, value in found.environment.items():
        out.print(escape(f"  {name}={value} in this shell overrides ace.toml"))
    if found.runs:
        out.print(escape(f"  .ace/runs: {len(found.runs)}, the last {found.runs[-1]}"))
    for problem in found.problems:
        out.print(f"[red]problem[/]: {escape(problem)}")
    if not found.patched and not found.problems:
        out.print(f"'ace-patch {found.adapter.name}' patches it.")


class RunCommand(ScriptCommand):
    """A command with ADAPTER and options in any order. The next word, or the one after '--', begins the script."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.allow_interspersed_args = False  # options of the script may have the same names
        options, words = self._split(ctx, args)
        adapter, script = words[:1], words[1:]
        if script[:1] not in (["-m"], ["-c"]):
            more, script = self._split(ctx, script)
            options += more
        return super().parse_args(ctx, [*options, *adapter, *script])

    def _split(self, ctx: click.Context, args: list[str]) -> tuple[list[str], list[str]]:
        """Return the options at the beginning, with a '--' that follows them, and the other words."""
        options = [param for param in self.params if isinstance(param, click.Option)]
        _, words, _ = click.Command(self.name, params=[*options]).make_parser(ctx).parse_args(list(args))
        return args[: len(args) - len(words)], words


@click.command(cls=RunCommand)
@click.argument("adapter", shell_complete=adapters)
@click.argument("words", nargs=-1, type=click.Path(), metavar="-- SCRIPT [ARGS]...")
@config_options
@as_json
def run(adapter: str, words: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Run a script with ACE, without changing any file.

    ACE is attached to every model of ADAPTER that the script builds.

    \b
    ace-patch run schnet --mode resilient -- train.py --epochs 10

    SCRIPT is script.py, -m module, -c code or a program such as torchrun. It replaces the ace-patch process, and
    processes that it starts train with ACE too.
    """
    launch(adapter, collect_settings(options), words, as_json=as_json)
