"""Commands about models: ``audit``, ``doctor`` and ``export``.

Functions that need torch are imported when a command is called, because shell completion imports this module too.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.markup import escape

from ..errors import AceError
from ..report.terminal import make_table, open_console
from ..settings.config import FIT
from .options import adapters, as_json, print_json, show

if TYPE_CHECKING:
    from ..symmetry.measure import EquivarianceError
    from ..testing.audit import ExampleAudit
    from ..testing.doctor import Diagnosis

ADAPTER = click.argument("adapter", shell_complete=adapters)
CHECKOUT = click.argument("checkout", type=click.Path(path_type=Path), required=False)
TRUST = click.option("--trust", is_flag=True, help="Also read files that contain a whole model; they can run code.")


@click.command()
@ADAPTER
@CHECKOUT
@as_json
def doctor(adapter: str, checkout: Path | None, as_json: bool) -> None:
    """Attach ADAPTER to a small model and check it.

    Shows sites, branches, parameters, the equivariance error at gamma = 0 and gamma = 1, presets and shims, and runs
    all checks of the test kit. A cloned upstream is expected in CHECKOUT or in the current folder; its code runs.
    """
    from ..testing.doctor import diagnose

    show(diagnose(adapter, checkout=checkout), as_json, _print_diagnosis)


def _print_diagnosis(found: Diagnosis) -> None:
    out = open_console()
    out.print(f"[bold]{escape(found.adapter)}[/]: {escape(found.upstream)}, from {escape(found.distribution)}")
    for requirement in found.requires:
        out.print(f"  requires {escape(requirement)}")
    elsewhere = any(part["module"] not in ("", part["name"]) for part in found.parts)
    added = ("added to",) if elsewhere else ()
    table = make_table("name", *added, "reads", "features", "branch", "parameters", numbers=("parameters",))
    for part in found.parts:
        shown = ("name", *(("module",) if elsewhere else ()), "reads", "features", "branch")
        table.add_row(*(escape(part[key]) for key in shown), f"{part['parameters']:,}")
    out.print(table, soft_wrap=False)
    sites = sum(part["kind"] == "site" for part in found.parts)
    more = found.parameters_after - found.parameters_before
    out.print(
        f"parameters: {found.parameters_before:,} before, {found.parameters_after:,} after "
        f"({more:,} in branches and {sites} gammas)"
    )
    for gamma, error in ((0, found.error_at_0), (1, found.error_at_1)):
        out.print(f"equivariance error under {escape(error.group)} at gamma = {gamma}: {_error(error)}")
    for name, settings in found.presets.items():
        default = " (default)" if name == FIT else ""
        values = ", ".join(f"{key}={value}" for key, value in settings.items())
        out.print(f"preset {escape(name)}{default}: {escape(values)}")
    for shim in found.shims:
        applied = "applied" if shim["applied"] else "not needed"
        out.print(f"shim {escape(shim['name'])}: {applied} ({escape(shim['reason'])})")
    for problem in found.problems:
        out.print(f"[red]not healthy[/]: {escape(problem)}")
    for check, why in found.skipped.items():
        out.print(f"does not apply: {escape(check)}, because {escape(why)}")
    if not found.problems:
        out.print(f"[green]healthy[/]: {len(found.checks)} checks pass")


def _error(error: EquivarianceError) -> str:
    return f"{error.absolute:.3g} (relative {error.relative:.3g}, {error.samples} random elements)"


@click.command()
@ADAPTER
@CHECKOUT
@click.option("--checkpoint", type=click.Path(path_type=Path), help="File with weights for the example, or a model.")
@TRUST
@click.option("--branches", type=click.Choice(["on", "off"]), help="Branches on or off.  [default: as deployed]")
@click.option("--averaged", type=click.IntRange(min=1), metavar="N", help="Also measure the mean over N random frames.")
@click.option("--all", "every", is_flag=True, help="Show every submodule, not only those down to the sites.")
@as_json
def audit(
    adapter: str,
    checkout: Path | None,
    checkpoint: Path | None,
    trust: bool,
    branches: str | None,
    averaged: int | None,
    every: bool,
    as_json: bool,
) -> None:
    """Measure how equivariant an example model of ADAPTER is.

    The error is measured for the whole model and for each layer.

    A cloned upstream is expected in CHECKOUT or in the current folder. To audit your own model, or a function with your
    preprocessing, call ace_plugins.audit(model, batch) in Python.
    """
    from ..testing.audit import audit_example

    on = None if branches is None else branches == "on"
    found = audit_example(
        adapter, checkout=checkout, checkpoint=checkpoint, trust=trust, branches_on=on, average=averaged
    )
    show(found, as_json, partial(_print_audit, every=every))


def _print_audit(example: ExampleAudit, *, every: bool) -> None:
    """Print the layers down to the depth of the sites, and all layers in which the error starts; or ``every`` layer."""
    out = open_console()
    found = example.found
    weights = f"weights of {example.checkpoint}" if example.checkpoint else "initial weights"
    branches = "with branches" if example.branches else "without branches"
    about = f"{example.upstream}, {example.model}, {weights}, {branches}"
    out.print(f"[bold]{escape(example.adapter)}[/]: {escape(about)}")
    table = make_table("name", "kind", "output", "error in", "error out", "", numbers=("error in", "error out"))
    culprits = {layer.name for layer in found.culprits}
    deepest = max(module.count(".") for module in example.sites.values())
    shown = [each for each in found.layers if every or each.name.count(".") <= deepest or each.name in culprits]
    for layer in shown:
        errors = ("?" if value is None else f"{value:.1e}" for value in (layer.before, layer.after))
        note = "the error starts here" if layer.name in culprits else ""
        table.add_row(escape(layer.name or "(the model)"), escape(layer.kind), layer.behaviour, *errors, note)
    out.print(table, soft_wrap=False)
    if len(shown) < len(found.layers):
        out.print(f"{len(found.layers) - len(shown)} more inside these: --all shows them")
    for name in found.uncovered:
        out.print(f"not covered: {escape(name)} has no action and stays unchanged, which is correct only if invariant")
    if found.as_given:
        out.print(escape(f"computed in {found.precision}: {found.as_given}"))
    whole = _error(found.error).replace(" random elements", f" random elements, in {found.precision}")
    out.print(f"equivariance error under {escape(found.error.group)}: {whole}: {found.verdict}")
    if example.averaged is not None:
        frames, mean = example.averaged
        out.print(f"mean over {frames} random frames: {mean.absolute:.3g} (relative {mean.relative:.3g})")


@click.command()
@click.argument("checkpoint", type=click.Path())
@click.option("-o", "--output", required=True, type=click.Path(), help="File to write.")
@click.option("--overwrite", is_flag=True, help="Replace an existing file.")
@TRUST
@as_json
def export(checkpoint: str, output: str, overwrite: bool, trust: bool, as_json: bool) -> None:
    """Write CHECKPOINT without ACE, for plain upstream.

    Upstream can then load it with strict=True.
    """
    from ..engine.checkpoint import export_checkpoint
    from ..patch.shims import REPAIRS

    if Path(output).exists() and not overwrite:
        raise AceError(f"{output!r} exists: choose another name, or add --overwrite")
    if trust:
        REPAIRS.make_importable()
    done = export_checkpoint(checkpoint, output, trust=trust)
    if as_json:
        print_json({"checkpoint": checkpoint, "output": output, "kept": done.kept, "removed": done.removed})
    else:
        click.echo(f"{output}: {done.kept} tensors kept, {done.removed} of ACE removed")
