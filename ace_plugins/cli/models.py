"""Commands about models: ``audit``, ``doctor`` and ``export``. They import torch when called, so that TAB is fast."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import AceError
from ..output import printable
from ..report.tables import TableData, build_left_table
from ..report.terminal import open_console, render_table
from ..settings.config import FIT
from .options import PATH, adapters, as_json, print_json, show

if TYPE_CHECKING:
    from ..symmetry.measure import EquivarianceError
    from ..testing.audit import ExampleAudit
    from ..testing.doctor import Diagnosis

ADAPTER = click.argument("adapter", shell_complete=adapters)
CHECKOUT = click.argument("checkout", type=PATH, required=False)
TRUST = click.option("--trust", is_flag=True, help="Also read files with a whole model. Such files can run code.")


@click.command()
@ADAPTER
@CHECKOUT
@as_json
def doctor(adapter: str, checkout: Path | None, as_json: bool) -> None:
    """Check ADAPTER on its example model.

    Attaches ACE to the example and runs all checks of the test kit. Shows sites, branches, parameters, the equivariance
    error at gamma = 0 and gamma = 1, presets, and shims (fixes that let the upstream run). If the upstream is a cloned
    repository, CHECKOUT is the clone (default: the current folder), and the code of the clone is run.
    """
    from ..testing.doctor import diagnose

    show(diagnose(adapter, checkout=checkout), as_json, _print_diagnosis)


def _print_diagnosis(found: Diagnosis) -> None:
    click.echo(f"{click.style(found.adapter, bold=True)}: {found.upstream}, from {found.distribution}")
    for requirement in found.requires:
        click.echo(f"  requires {requirement}")
    headers = ["name", "module", "reads", "features", "branch", "parameters"]
    rows = [[*(part[key] for key in headers[:-1]), f"{part['parameters']:,}"] for part in found.parts]
    open_console().print(render_table(TableData(headers, rows, numbers=["parameters"])), soft_wrap=False)
    before, after = found.parameters_before, found.parameters_after
    sites = sum(part["kind"] == "site" for part in found.parts)
    click.echo(f"parameters: {before:,} before, {after:,} after ({after - before:,} in branches and {sites} gammas)")
    for gamma, error in ((0, found.error_at_0), (1, found.error_at_1)):
        click.echo(f"equivariance error under {error.group} at gamma = {gamma}: {_format_error(error)}")
    for name, settings in found.presets.items():
        values = ", ".join(f"{key}={value}" for key, value in settings.items())
        click.echo(f"preset {name}{' (default)' if name == FIT else ''}: {values}")
    for shim in found.shims:
        click.echo(f"shim {shim['name']}: {'applied' if shim['applied'] else 'not needed'} ({shim['reason']})")
    for problem in found.problems:
        click.echo(f"{click.style('not healthy', fg='red')}: {problem}")
    for check, reason in found.skipped.items():
        click.echo(f"does not apply: {check}, because {reason}")
    if not found.problems:
        click.echo(f"{click.style('healthy', fg='green')}: {len(found.checks)} checks pass")


def _format_error(error: EquivarianceError, more: str = "") -> str:
    return f"{error.absolute:.3g} (relative {error.relative:.3g}, {error.samples} random elements{more})"


@click.command()
@ADAPTER
@CHECKOUT
@click.option("--checkpoint", type=PATH, help="File with weights of the example model, or with a whole model.")
@TRUST
@click.option("--branches", type=click.Choice(["on", "off"]), help="Branches on or off.  [default: as in model.eval()]")
@click.option(
    "--averaged",
    "average",
    type=click.IntRange(min=1),
    metavar="N",
    help="Also measure the error of the mean output over N random rotations or other group elements.",
)
@click.option("--left", is_flag=True, help="Also find the subgroup that the model keeps, such as rotations about z.")
@click.option("--all", "every", is_flag=True, help="Also show submodules nested deeper than the sites.")
@as_json
def audit(adapter: str, branches: str | None, every: bool, as_json: bool, **options: Any) -> None:
    """Measure the equivariance error of ADAPTER's example model.

    Shows the error of the whole model and of each layer. If the upstream is a cloned repository, CHECKOUT is the clone
    (default: the current folder), and the code of the clone is run. To audit your own model, or a function with your
    preprocessing, call ace_plugins.audit(model, batch) in Python.
    """
    from ..testing.audit import audit_example

    on = None if branches is None else branches == "on"
    show(audit_example(adapter, branches_on=on, **options), as_json, partial(_print_audit, every=every))


def _print_audit(example: ExampleAudit, *, every: bool) -> None:
    """Print the layers down to the depth of the sites and those where the error starts; with ``every``, all layers."""
    found = example.found
    weights = f"weights of {example.checkpoint}" if example.checkpoint else "initial weights"
    branches = "with branches" if example.branches else "without branches"
    click.echo(f"{click.style(example.adapter, bold=True)}: {example.upstream}, {example.model}, {weights}, {branches}")
    culprits = {layer.name for layer in found.culprits}
    deepest = max(module.count(".") for module in example.sites.values())
    shown = [each for each in found.layers if every or each.name.count(".") <= deepest or each.name in culprits]
    rows = []
    for layer in shown:
        errors = ["?" if value is None else f"{value:.1e}" for value in (layer.before, layer.after)]
        note = "the error starts here" if layer.name in culprits else ""
        rows.append([layer.name or "(the model)", layer.kind, layer.behaviour, *errors, note])
    headers = ["name", "kind", "output", "error in", "error out", ""]
    open_console().print(render_table(TableData(headers, rows, numbers=headers[3:5])), soft_wrap=False)
    if len(shown) < len(found.layers):
        click.echo(f"{len(found.layers) - len(shown)} deeper submodules are hidden: --all shows them")
    for name in found.uncovered:
        unknown = f"input {name}: the adapter defines no action on it, so audit leaves it unchanged"
        click.echo(f"{unknown}; this is correct only if {name} is invariant")
    if found.as_given:
        click.echo(f"computed in {found.precision}: {found.as_given}")
    whole = _format_error(found.error, f", in {found.precision}")
    click.echo(f"equivariance error under {found.error.group}: {whole}: {found.verdict}")
    if example.left is not None:
        if tried := example.left.subgroups:
            table = build_left_table([(p.name, p.error, p.low, p.high, p.verdict) for p in tried])
            open_console().print(render_table(table), soft_wrap=False)
        click.echo(example.left.sentence)
    if example.averaged is not None:
        frames, mean = example.averaged
        smooth = f"{mean.absolute:.3g} (relative {mean.relative:.3g})"
        click.echo(f"equivariance error of the output averaged over {frames} random frames: {smooth}")


@click.command()
@click.argument("checkpoint", type=click.Path())
@click.option("-o", "--output", required=True, type=click.Path(), help="File to write.")
@click.option("--overwrite", is_flag=True, help="Replace an existing file.")
@TRUST
@as_json
def export(checkpoint: str, output: str, overwrite: bool, trust: bool, as_json: bool) -> None:
    """Remove ACE from CHECKPOINT and write the rest to a new file.

    The upstream's own model can load this file with strict=True.
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
        click.echo(printable(f"{output}: {done.kept} tensors kept, {done.removed} of ACE removed"))
