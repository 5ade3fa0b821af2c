"""What the command shows people, as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape

from ..checkout.patching import Patching
from ..checkout.state import State
from ..contract.upstreams import StandIn
from ..patch.shims import would_act
from ..plugins.plugin import Plugin
from ..report.tables import console, table_of
from ..settings.config import FIT, Config

if TYPE_CHECKING:
    from ..testing.audit import ExampleAudit
    from ..testing.doctor import Diagnosis


def print_plugins(plugins: Sequence[Plugin]) -> None:
    out = console()
    table = table_of("name", "state", "what it patches, where it comes from, what it wants")
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
    out.print(table, soft_wrap=False)
    for plugin in plugins:
        if plugin.problem is not None:
            out.print(f"{escape(plugin.name)} ({escape(plugin.distribution)}): {escape(plugin.problem)}")


def print_diagnosis(found: Diagnosis) -> None:
    out = console()
    out.print(f"[bold]{escape(found.adapter)}[/]: {escape(found.upstream)}, from {escape(found.distribution)}")
    for requirement in found.requires:
        out.print(f"  requires {escape(requirement)}")
    elsewhere = any(part.module not in ("", part.name) for part in found.parts)
    added = ("added to",) if elsewhere else ()
    table = table_of("name", *added, "reads", "features", "branch", "parameters", numbers=("parameters",))
    for part in found.parts:
        cells = [part.name, *([part.module] if elsewhere else []), part.reads, part.features, part.branch]
        table.add_row(*map(escape, cells), f"{part.parameters:,}")
    out.print(table, soft_wrap=False)
    sites = sum(part.kind == "site" for part in found.parts)
    more = found.parameters_after - found.parameters_before
    out.print(
        f"parameters: {found.parameters_before:,} before, {found.parameters_after:,} after "
        f"({more:,} in branches and {sites} gammas)"
    )
    for gamma, error in ((0, found.error_at_0), (1, found.error_at_1)):
        out.print(
            f"equivariance error under {escape(error.group)} at gamma = {gamma}: {error.absolute:.3g} "
            f"(relative {error.relative:.3g}, {error.samples} random elements)"
        )
    for name, settings in found.presets.items():
        said = ", ".join(f"{key}={value}" for key, value in settings.items())
        default = " (default)" if name == FIT else ""
        out.print(f"preset {escape(name)}{default}: {escape(said)}")
    for shim in found.shims:
        state = "applied" if shim.applied else "not needed here"
        out.print(f"shim {escape(shim.name)}: {state} ({escape(shim.reason)})")

    for problem in found.problems:
        out.print(f"[red]not healthy[/]: {escape(problem)}")
    for check, why in found.skipped.items():
        out.print(f"not judged: {escape(check)}, as {escape(why)}")
    if not found.problems:
        out.print(f"[green]healthy[/]: {len(found.checks)} checks pass")


def print_audit(told: ExampleAudit, *, every: bool = False) -> None:
    """The layers down to where the sites are, and those in which an error begins; ``every`` one of them if asked."""
    out = console()
    found, error = told.found, told.found.error
    weights = f"weights of {told.checkpoint}" if told.checkpoint else "weights as it begins with them"
    branches = "with branches" if told.branches else "without branches"
    out.print(f"[bold]{escape(told.adapter)}[/]: {escape(told.upstream)}, {told.model}, {escape(weights)}, {branches}")
    table = table_of("name", "kind", "its output", "error in", "error out", "", numbers=("error in", "error out"))
    culprits = {layer.name for layer in found.culprits}
    deepest = max(module.count(".") for module in told.sites.values())
    shown = [each for each in found.layers if every or each.name.count(".") <= deepest or each.name in culprits]
    for layer in shown:
        here = "the error begins here" if layer.name in culprits else ""
        errors = (_error(layer.before), _error(layer.after))
        table.add_row(escape(layer.name or "(the model)"), escape(layer.kind), layer.behaviour, *errors, here)
    out.print(table, soft_wrap=False)
    if len(shown) < len(found.layers):
        out.print(f"{len(found.layers) - len(shown)} more inside these: --all shows them")
    for name in found.uncovered:
        out.print(f"not covered: {escape(name)} stays as it is under every element; right only if it is invariant")
    if found.as_given:
        out.print(escape(f"computed in {found.precision}: {found.as_given}"))
    out.print(
        f"equivariance error under {escape(error.group)}: {error.absolute:.3g} (relative {error.relative:.3g}, "
        f"{error.samples} random elements, in {found.precision}): {found.verdict}"
    )
    if told.averaged is not None:
        frames, mean = told.averaged
        out.print(f"the mean over {frames} random frames: {mean.absolute:.3g} (relative {mean.relative:.3g})")


def _error(value: float | None) -> str:
    return "?" if value is None else f"{value:.1e}"


def print_patching(adapter: Plugin, plan: Patching) -> None:
    """What was done to a checkout, and what to do next."""
    out = console()
    out.print(f"{escape(adapter.patches.title)} {escape(str(plan.layout))}")
    for change in plan.changes:
        name = plan.name(change)
        if name == plan.settings.path.name:
            done = "written" if change.before is None else "kept" if change.before == change.after else "updated"
            said = _settings_in_words(plan.settings.settings, plan.config)
        else:
            done = "already marked" if change.before == change.after else "marked"
            said = "one line"
        out.print(f"  {escape(name)}: {done} ({escape(said)})")
    missing = [shim.name for shim in adapter.shims if isinstance(shim, StandIn) and would_act(adapter, shim)]
    if missing and plan.config.shims:
        out.print(f"not installed here, stood in for: {', '.join(missing)}")
    _print_cautions(out, plan.config)
    scripts = ", ".join(adapter.patches.checkout.scripts) if adapter.patches.checkout else ""
    out.print(f"Now run {scripts} as its README says. 'ace-patch revert' undoes this.")


def print_state(found: State) -> None:
    out = console()
    out.print(f"{escape(found.adapter.patches.title)} {escape(str(found.layout))}")
    for script, how in found.scripts.items():
        out.print(f"  {escape(script)}: {escape(how)}")
    if found.settings is not None and found.config is not None:
        how = "as written" if found.settings.as_written else "edited"
        said = _settings_in_words(found.settings.settings, found.config)
        out.print(f"  {found.settings.path.name}: {how} ({escape(said)})")
        _print_cautions(out, found.config)
    for name, value in found.environment.items():
        out.print(f"  {name}={escape(value)} in this shell goes before ace.toml")
    if found.runs:
        out.print(f"  .ace/runs: {len(found.runs)}, the last {escape(found.runs[-1])}")
    for problem in found.problems:
        out.print(f"[red]problem[/]: {escape(problem)}")
    if not found.patched and not found.problems:
        out.print(f"'ace-patch {found.adapter.name}' patches it.")


def _print_cautions(out: Console, config: Config) -> None:
    for caution in config.cautions:
        out.print(f"[yellow]warning[/]: {escape(caution)}")


def _settings_in_words(settings: Mapping[str, Any], config: Config) -> str:
    """The preset, what it comes to, and whatever else was set."""
    told = [f"preset {settings['preset']}"] if "preset" in settings else []
    told += [config.summary]
    said = ("preset", "mode", "budget", "dual_lr", "dual_optimizer")
    return ", ".join([*told, *(f"{key} {value}" for key, value in settings.items() if key not in said)])
