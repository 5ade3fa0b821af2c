"""The command ``ace-patch demo schnet``: SchNet on QM9 as upstream has it, under ACE strict and under ACE resilient.

The three runs share the seed, the initial weights, the batches and the learning rate schedule. Each keeps the epoch
with the lowest validation error of the model that it deploys.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ace_plugins import adapter as ace

if TYPE_CHECKING:  # imported inside the functions, so that --help does not wait for torch
    import torch
    from rich.table import Table

    from .training import Result, Run, Task

DEVICES = ("auto", "cpu", "cuda")
MODES = {"upstream": "off", "ACE strict": "strict", "ACE resilient": "resilient"}
ENOUGH_STEPS, ENOUGH_TESTED = 500, 200
"""Training steps and test molecules below which the comparison is not meaningful."""
CHANCE = 0.05
"""Largest relative difference between runs that may be due to chance: another seed may reverse it."""


def settings(mode: str, steps: int) -> dict[str, Any]:
    """Return the ACE settings of a run of so many steps; none for upstream."""
    return {} if mode == "off" else {"mode": mode, "budget": steps}


@click.command()
@click.option("--molecules", default=3000, show_default=True, help="Number of molecules, of QM9's 130,831.")
@click.option("--epochs", default=12, show_default=True, type=click.IntRange(min=1), help="Epochs of each run.")
@click.option("--target", default="alpha", show_default=True, help="Property to predict: alpha, mu, gap, u0, ...")
@click.option(
    "--seed",
    default=0,
    show_default=True,
    type=click.IntRange(min=0),
    help="Seed of the molecules, the initial weights and the batches.",
)
@click.option("--device", default="auto", show_default=True, help="auto, cpu or cuda.")
@click.option(
    "--picture",
    default="ace-demo.png",
    show_default=True,
    type=click.Path(dir_okay=False, path_type=Path),
    help="File for the validation curves, gamma, lambda and u: .png, .pdf or .svg.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the table.")
def demo(molecules: int, epochs: int, target: str, seed: int, device: str, picture: Path, as_json: bool) -> None:
    """SchNet on QM9: plain, under ACE strict, and under ACE resilient.

    Trains the three side by side, with the same initial weights and batches, prints their errors and draws their
    validation curves and how gamma, lambda and u moved. Takes three to five minutes on a CPU.

    Molecules have the symmetry of SchNet, and ACE ties with upstream on this budget. It wins where the data breaks the
    symmetry: see ace-patch demo c4.
    """
    from . import picture as drawing
    from . import qm9

    # Check everything before training, which takes minutes.
    qm9.check(molecules, target)
    ace.check_picture(picture, qm9.INSTALL)
    where = _device(device)
    from . import training

    about = qm9.TARGETS[target]
    task = training.standardise(qm9.load(molecules, target, seed), where)
    with ace.one_thread():
        runs = _train(task, epochs, seed, where)
        results = [training.judge(run, task) for run in runs]
    drawing.draw(runs, f"SchNet on QM9 {target}, seed {seed}", f"validation MAE\n({about.unit})", picture)
    conclusions = conclude(results, runs, about.unit, len(task.test))
    if not as_json:
        title = f"QM9 {target}, {about.description}. Errors in {about.unit}"
        ace.print_results(make_table(results, title), conclusions, picture)
        return
    report = {
        "target": target,
        "unit": about.unit,
        "molecules": {part: len(getattr(task, part)) for part in ("train", "validation", "test")},
        "epochs": epochs,
        "steps": runs[0].step,
        "seed": seed,
        "device": str(where),
        "runs": [to_dict(result, run) for result, run in zip(results, runs, strict=True)],
        "conclusions": conclusions,
        "picture": str(picture),
    }
    click.echo(json.dumps(report))


def _device(name: str) -> torch.device:
    if name not in DEVICES:
        raise ace.ConfigError(ace.one_of("device", name, DEVICES))
    import torch

    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise ace.ConfigError("device 'cuda': expected a GPU that PyTorch can use, found none; choose cpu or auto")
    return torch.device("cuda" if available and name != "cpu" else "cpu")


def _train(task: Task, epochs: int, seed: int, device: torch.device) -> list[Run]:
    """Train the three runs, with one line of progress per epoch."""
    from . import training

    steps = epochs * task.batches
    runs = [training.start(name, settings(mode, steps), steps, seed, device) for name, mode in MODES.items()]
    with ace.progress_lines(epochs) as report:
        for epoch in training.train(runs, task, epochs, seed):
            errors = ", ".join(f"{run.name} {run.curve[-1]:.4g}" for run in runs)
            report(f"SchNet, epoch {epoch}/{epochs}, validation MAE: {errors}")
    return runs


def make_table(results: Sequence[Result], title: str) -> Table:
    """Return a table with one row per run. Errors of deployed models are bold."""
    from rich import box
    from rich.table import Table

    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", caption_justify="left")
    table.caption = (
        "MAE at the epoch with the lowest validation MAE of the deployed model, which is f_eq for upstream and "
        "strict, f_eq + gamma f_neq for resilient. Equivariance error: mean change of the deployed model's "
        "prediction when molecules are rotated, reflected and moved."
    )
    table.add_column("run\n\n", no_wrap=True)
    for part in ("valid.", "test"):
        table.add_column(f"{part}\nf_eq\n", justify="right")
        table.add_column(f"{part}\nf_eq +\ngamma f_neq", justify="right")
    table.add_column("s per\nepoch\n", justify="right")
    table.add_column("equiv.\nerror\n", justify="right")
    for result in results:
        cells = [
            "" if value is None else f"[bold]{value:.4g}[/bold]" if place == result.deployed else f"{value:.4g}"
            for values in (result.validation, result.test)
            for place, value in enumerate(values)
        ]
        table.add_row(result.name, *cells, f"{result.seconds:.2f}", f"{result.equivariance:.1e}")
    return table


def conclude(results: Sequence[Result], runs: Sequence[Run], unit: str, tested: int) -> list[str]:
    """Return what the numbers show, one paragraph per topic: the comparison, strict mode, resilient mode."""
    plain, *others = results
    against = "; ".join(_compare(result, plain) for result in others)
    caution = _caution(results, runs[0].step, tested)
    return [
        f"Test MAE of the deployed models, upstream {plain.test_deployed:.4g} {unit}: {against}. {caution}",
        _about_strict(runs[1], results[1]),
        _about_resilient(runs[2], results[2], unit),
    ]


def _caution(results: Sequence[Result], steps: int, tested: int) -> str:
    plain, *others = results
    if steps < ENOUGH_STEPS or tested < ENOUGH_TESTED:
        return f"After {steps} steps, on {tested} test molecules, the comparison is not meaningful."
    chance = f"differences below {100 * CHANCE:.0f} % can be chance"
    if all(abs(result.test_deployed / plain.test_deployed - 1) < CHANCE for result in others):
        return f"This is one seed, and {chance}: a tie."
    return f"This is one seed: {chance}."


def _compare(result: Result, plain: Result) -> str:
    change = 100 * (result.test_deployed / plain.test_deployed - 1)
    if not math.isfinite(change):
        return f"{result.name} diverged"
    how = "the same" if abs(change) < 0.05 else f"{abs(change):.1f} % {'lower' if change < 0 else 'higher'}"
    return f"{result.name} {result.test_deployed:.4g}, {how}"


def _about_strict(run: Run, result: Result) -> str:
    first, last = (max(map(abs, gamma)) for _, (gamma, _, _) in (run.records[0], run.records[-1]))
    landed = f"every gamma had landed by step {run.landing}" if run.landing else "gamma did not land: too few steps"
    kept = result.best_epoch * run.step // len(run.curve)
    return (
        f"Strict: the largest |gamma| went from {first:.2g} to {last:.2g}; {landed} of {run.step}; the best model is "
        f"from step {kept}."
    )


def _about_resilient(run: Run, result: Result, unit: str) -> str:
    gamma, lambda_, u = run.records[-1][1]
    most, least = (choose(range(len(u)), key=u.__getitem__) for choose in (max, min))
    if u[most] < 0.001:
        slack = "every slack u is below 0.001: no layer needs to stay relaxed"
    elif u[most] < 1.05 * u[least]:
        slack = f"all layers keep about the same slack (u {u[least]:.3g} to {u[most]:.3g})"
    else:
        names = run.sites
        slack = (
            f"{names[most]} keeps the most slack (u {u[most]:.3g}, lambda {lambda_[most]:.3g}), "
            f"{names[least]} the least (u {u[least]:.3g}, lambda {lambda_[least]:.3g})"
        )
    return (
        f"Resilient: {slack}; the largest |gamma| at the end is {max(map(abs, gamma)):.2g}. Rotating, reflecting or "
        f"moving a molecule changes the deployed model's prediction by {result.equivariance:.2g} {unit} on average."
    )


def to_dict(result: Result, run: Run) -> dict[str, Any]:
    """Return a run for JSON, with the final gamma, lambda and u."""
    kinds = ("f_eq", "f_eq+gamma*f_neq")
    columns = zip(*run.records[-1][1], strict=True) if run.records else ()
    number = ace.finite_or_none
    return {
        "name": result.name,
        "settings": dict(run.settings),
        "deployed": kinds[result.deployed],
        "best_epoch": result.best_epoch,
        "validation_mae": dict(zip(kinds, map(number, result.validation), strict=True)),
        "test_mae": dict(zip(kinds, map(number, result.test), strict=True)),
        "seconds_per_epoch": round(result.seconds, 3),
        "equivariance_error": number(result.equivariance),
        "validation_curve": [number(error) for error in run.curve],
        "sites": [
            {"name": name, **dict(zip(("gamma", "lambda", "u"), map(number, column), strict=True))}
            for name, column in zip(run.sites, columns, strict=True)
        ],
    }
