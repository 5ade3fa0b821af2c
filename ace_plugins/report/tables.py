"""What the command shows people, as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..contract.data import StandIn
from ..plugins.registry import Plugin
from ..patch.shims import shims
from .verdicts import MEANING

if TYPE_CHECKING:
    from ..checkout.state import State
    from ..checkout.patching import Patching
    from ..settings.config import Config
    from ..testing.doctor import Diagnosis


def _console(stderr: bool = False) -> Console:
    return Console(stderr=stderr, highlight=False)


def _table(title: str, *columns: str, numbers: Sequence[str] = ()) -> Table:
    table = Table(title=title, title_justify="left", header_style="bold")
    for column in columns:
        # Names stay whole: they are what people type and search for.
        table.add_column(
            column,
            justify="right" if column in numbers else "left",
            overflow="fold",
            no_wrap=column in ("name", "site", *numbers),
        )
    return table


def print_plugins(plugins: Sequence[Plugin]) -> None:
    console = _console()
    table = _table("", "name", "state", "what it patches, where it comes from, what it wants")
    for plugin in plugins:
        if plugin.problem is None:
            state = "[green]ready[/]"
        elif plugin.missing_upstream:
            state = "[yellow]upstream not installed[/]"
        else:
            state = "[red]not usable[/]"
        what = plugin.upstream.title if plugin.upstream else "observer" if plugin.problem is None else "?"
        lines = [f"{what}, from {plugin.distribution} {plugin.version}".strip()]
        wanted = [r for r in plugin.requires if r.upstream] or [r for r in plugin.requires if not r.met]
        lines += [f"wants {r.requirement}, found {r.found or 'none installed'}" for r in wanted]
        table.add_row(escape(plugin.name), state, escape("\n".join(lines)))
    console.print(table)
    for plugin in plugins:
        if plugin.problem is not None:
            console.print(
                f"{escape(plugin.name)} ({escape(plugin.distribution)}): {escape(plugin.problem)}", soft_wrap=True
            )


def print_diagnosis(found: Diagnosis) -> None:
    console = _console()
    console.print(f"[bold]{escape(found.adapter)}[/]: {escape(found.upstream)}, from {escape(found.distribution)}")
    for requirement in found.requires:
        console.print(f"  requires {escape(requirement)}")
    elsewhere = any(part.module not in ("", part.name) for part in found.parts)
    added = ("added to",) if elsewhere else ()
    table = _table("", "name", *added, "reads", "features", "branch", "parameters", numbers=("parameters",))
    for part in found.parts:
        cells = [part.name, *([part.module] if elsewhere else []), part.reads, part.features, part.branch]
        table.add_row(*map(escape, cells), f"{part.parameters:,}")
    console.print(table)
    sites = sum(part.kind == "site" for part in found.parts)
    more = found.parameters_after - found.parameters_before
    console.print(
        f"parameters: {found.parameters_before:,} before, {found.parameters_after:,} after "
        f"({more:,} in branches and {sites} gammas)"
    )
    for gamma, error in ((0, found.error_at_0), (1, found.error_at_1)):
        console.print(
            f"equivariance error under {escape(error.group)} at gamma = {gamma}: {error.absolute:.3g} "
            f"(relative {error.relative:.3g}, {error.samples} random elements)",
            soft_wrap=True,
        )
    for name, settings in found.presets.items():
        said = ", ".join(f"{key}={value}" for key, value in settings.items())
        default = " (default)" if name == "paper" else ""
        console.print(f"preset {escape(name)}{default}: {escape(said)}", soft_wrap=True)
    for shim in found.shims:
        state = "applied" if shim.applied else "not needed here"
        console.print(f"shim {escape(shim.name)}: {state} ({escape(shim.reason)})", soft_wrap=True)

    for problem in found.problems:
        console.print(f"[red]not healthy[/]: {escape(problem)}", soft_wrap=True)
    if not found.problems:
        console.print("[green]healthy[/]")


def print_patching(adapter: Plugin, plan: Patching) -> None:
    """What was done to a checkout, and what to do next."""
    console = _console()
    assert adapter.upstream is not None
    console.print(f"{escape(adapter.upstream.title)} {escape(str(plan.print))}", soft_wrap=True)
    for change in plan.changes:
        name = plan.name(change)
        if name == plan.settings.path.name:
            done = "written" if change.before is None else "kept" if change.before == change.after else "updated"
            said = _settings_in_words(plan.settings.settings, plan.config)
        else:
            done = "already marked" if change.before == change.after else "marked"
            said = "one line"
        console.print(f"  {escape(name)}: {done} ({escape(said)})", soft_wrap=True)
    missing = [shim.name for shim in shims(adapter) if isinstance(shim, StandIn) and shim.needed()]
    if missing and plan.config.shims:
        console.print(f"not installed here, stood in for: {', '.join(missing)}", soft_wrap=True)
    _print_cautions(console, plan.config)
    scripts = ", ".join(adapter.upstream.checkout.scripts) if adapter.upstream.checkout else ""
    console.print(f"Now run {scripts} as its README says. 'ace-patch revert' undoes this.", soft_wrap=True)


def print_state(found: State) -> None:
    console = _console()
    assert found.adapter.upstream is not None
    console.print(f"{escape(found.adapter.upstream.title)} {escape(str(found.print))}", soft_wrap=True)
    for script, how in found.scripts.items():
        console.print(f"  {escape(script)}: {escape(how)}", soft_wrap=True)
    if found.settings is not None and found.config is not None:
        how = "as written" if found.settings.as_written else "edited"
        said = _settings_in_words(found.settings.settings, found.config)
        console.print(f"  {found.settings.path.name}: {how} ({escape(said)})", soft_wrap=True)
        _print_cautions(console, found.config)
    for name, value in found.environment.items():
        console.print(f"  {name}={escape(value)} in this shell goes before ace.toml", soft_wrap=True)
    if found.runs:
        console.print(f"  .ace/runs: {len(found.runs)}, the last {escape(found.runs[-1])}", soft_wrap=True)
    for problem in found.problems:
        console.print(f"[red]problem[/]: {escape(problem)}", soft_wrap=True)
    if not found.patched and not found.problems:
        console.print(f"'ace-patch {found.adapter.name}' patches it.", soft_wrap=True)


def _print_cautions(console: Console, config: Config) -> None:
    for caution in config.cautions:
        console.print(f"[yellow]warning[/]: {escape(caution)}", soft_wrap=True)


def _settings_in_words(settings: Mapping[str, Any], config: Config) -> str:
    """The preset, what it comes to, and whatever else was set."""
    told = [f"preset {settings['preset']}"] if "preset" in settings else []
    told += [f"mode {config.mode}", f"dual lr {config.dual_lr} ({config.dual_optimizer})"]
    said = ("preset", "mode", "dual_lr", "dual_optimizer")
    return ", ".join([*told, *(f"{key} {value}" for key, value in settings.items() if key not in said)])


def print_run(run: Mapping[str, Any]) -> None:
    console = _console(stderr=True)
    steps = f"{run['steps']:,} step{'' if run['steps'] == 1 else 's'}"
    steps = f"landed at step {run['steps']:,}" if run["landed"] else steps
    where = f", trace in {run['folder']}" if run["folder"] else ""
    console.print(f"ACE {run['mode']}, {steps}{escape(where)}", soft_wrap=True)
    table = _table("", "site", "gamma", "lambda", "u", "verdict", numbers=("gamma", "lambda", "u"))
    for site in run["sites"]:
        numbers = (_number(site[key]) for key in ("gamma", "lambda", "u"))
        table.add_row(escape(site["name"]), *numbers, site["verdict"])
    console.print(table)
    for word in dict.fromkeys(site["verdict"] for site in run["sites"]):
        console.print(f"{word}: {escape(MEANING[word])}", soft_wrap=True)
    if run["errors"]:
        told = ", ".join(f"{_short(error['relative'])} at step {error['step']:,}" for error in run["errors"])
        console.print(
            f"equivariance error under {run['errors'][0]['group']}, with branches, relative: {told}", soft_wrap=True
        )
    if run["verdict"]:
        console.print(escape(run["verdict"]), soft_wrap=True)


def _short(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.3g}"


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4f}"
