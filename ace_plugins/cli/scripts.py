"""Commands that make scripts train with ACE: ``run``, ``status``, ``revert``, and one for each kind of checkout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ..checkout.changes import Plan
from ..checkout.patching import PatchPlan, State, plan_patch, plan_revert, read_state, require_checkout
from ..contract.upstreams import StandIn
from ..output import printable
from ..patch.shims import has_effect
from ..plugins.plugin import Plugin
from ..plugins.registry import registry
from ..run.launch import launch
from ..settings.config import Config
from ..settings.toml_file import SettingsFile, is_as_written
from .options import PATH, ScriptCommand, adapters, as_json, collect_settings, config_options, print_json, show

CHECKOUT = click.argument("checkout", type=PATH, default=".")
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
        "default. To change settings, call the command again with other options.",
    )
    @CHECKOUT
    @config_options
    @DRY_RUN
    @as_json
    def patch(checkout: Path, dry_run: bool, as_json: bool, **options: Any) -> None:
        plan = plan_patch(checkout, adapter, collect_settings(options))
        if not dry_run:
            plan.apply()
        if as_json:
            about = {"commit": plan.layout.commit, "tried": plan.layout.tried, "warnings": list(plan.config.cautions)}
            print_json(_describe(plan, dry_run) | about)
        elif dry_run and not plan.changed:
            click.echo(f"nothing to change: {plan.root} is already patched", err=True)
        elif dry_run:
            click.echo(printable(plan.diff()), nl=False)
        else:
            _print_patching(adapter, plan)

    return patch


def _describe(plan: Plan, dry_run: bool) -> dict[str, Any]:
    files = {"changed": [plan.name(change) for change in plan.changed], "kept": list(plan.kept)}
    return {"checkout": str(plan.root), **files, "diff": plan.diff(), "dry_run": dry_run}


def _print_patching(adapter: Plugin, plan: PatchPlan) -> None:
    click.echo(f"{adapter.patches.title} {plan.layout}")
    for change in plan.changes:
        name, same = plan.name(change), change.before == change.after
        if name == plan.settings.path.name:
            done = "kept" if same else "written" if change.before is None else "updated"
            what = _format_settings(plan.settings, plan.config)
        else:
            done, what = "already marked" if same else "marked", "one line"
        click.echo(f"  {name}: {done} ({what})")
    missing = [shim.name for shim in adapter.shims if isinstance(shim, StandIn) and has_effect(adapter, shim)]
    if missing and plan.config.shims:
        click.echo(f"not installed, replaced by a stub: {', '.join(missing)}")
    for caution in plan.config.cautions:
        click.echo(f"{click.style('warning', fg='yellow')}: {caution}")
    scripts = ", ".join(require_checkout(adapter).scripts)
    click.echo(f"Now run {scripts} as its README says. 'ace-patch revert' undoes the patch.")


def _format_settings(file: SettingsFile, config: Config) -> str:
    """Format the summary of the settings, and those settings in the file that the summary leaves out."""
    in_summary = ("mode", "budget", "dual_lr", "dual_optimizer")
    others = [f"{key} {value}" for key, value in file.settings.items() if key not in in_summary]
    return ", ".join([config.summary, *others])


@click.command()
@CHECKOUT
@click.option("--purge", is_flag=True, help="Remove ace.toml even if you have edited it.")
@DRY_RUN
@as_json
def revert(checkout: Path, purge: bool, dry_run: bool, as_json: bool) -> None:
    """Remove ACE from CHECKOUT: the marked lines and ace.toml. Your own edits are kept."""
    plan = plan_revert(checkout, purge=purge)
    if not dry_run:
        plan.apply()
    if as_json:
        print_json(_describe(plan, dry_run))
        return
    if dry_run:
        click.echo(printable(plan.diff()), nl=False)
    else:
        for change in plan.changed:
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
    click.echo(f"{found.adapter.patches.title} {found.layout}")
    for script, how in found.scripts.items():
        click.echo(f"  {script}: {how}")
    if found.settings is not None and found.config is not None:
        edited = "not edited" if is_as_written(found.settings.text) else "edited"
        click.echo(f"  {found.settings.path.name}: {edited} ({_format_settings(found.settings, found.config)})")
        for caution in found.config.cautions:
            click.echo(f"{click.style('warning', fg='yellow')}: {caution}")
    for name, value in found.environment.items():
        click.echo(f"  {name}={value} in this shell overrides ace.toml")
    if found.runs:
        click.echo(f"  .ace/runs: {len(found.runs)} runs, the newest is {printable(found.runs[-1])}")
    for problem in found.problems:
        click.echo(f"{click.style('problem', fg='red')}: {problem}")
    if not found.patched and not found.problems:
        click.echo(f"'ace-patch {found.adapter.name}' patches it.")


class RunCommand(ScriptCommand):
    """The command ``run``. Without '--', the first word after ADAPTER and its options begins the script."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if "--" not in args and not ctx.resilient_parsing:
            ctx.allow_interspersed_args = False  # options of the script may have the same names as ours
            before, words = self._split(ctx, args)
            after, script = ([], words[1:]) if words[1:2] in (["-m"], ["-c"]) else self._split(ctx, words[1:])
            args = [*before, *after, *words[:1], *(["--", *script] if script else [])]
            ctx.allow_interspersed_args = True
        return super().parse_args(ctx, args)

    def _split(self, ctx: click.Context, args: list[str]) -> tuple[list[str], list[str]]:
        """Return the options at the beginning, and the other words."""
        options: list[click.Parameter] = [param for param in self.params if isinstance(param, click.Option)]
        words = click.Command(self.name, params=options).make_parser(ctx).parse_args(list(args))[1]
        return args[: len(args) - len(words)], words


@click.command(cls=RunCommand)
@click.argument("adapter", shell_complete=adapters)
@click.argument("words", nargs=-1, type=click.Path(), metavar="-- SCRIPT [ARGS]...")
@config_options
@as_json
def run(adapter: str, words: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Run a script with ACE, without changing any file.

    ACE is attached to every model that the script builds and ADAPTER supports.

    \b
    ace-patch run schnet --mode resilient -- train.py --epochs 10

    SCRIPT is a file such as train.py, -m MODULE, -c CODE, or a program such as torchrun. Processes that the script
    starts train with ACE too.
    """
    launch(adapter, collect_settings(options), words, as_json=as_json)
