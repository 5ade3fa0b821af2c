"""``ace-patch demo``: SchNet on molecules of QM9, three times: as it is, under ACE strict and ACE resilient.

The three runs share the seed, upstream's initial weights, the batches and the learning rates. Each keeps the
epoch with the lowest validation error of the model it deploys.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ace_plugins.adapter import ConfigError, check_picture, one_of

if TYPE_CHECKING:  # torch is imported where it is used: --help does not wait for it
    import torch
    from rich.table import Table

    from .training import Result, Run, Task

DEVICES = ("auto", "cpu", "cuda")
MODES = {"upstream": "off", "ACE strict": "strict", "ACE resilient": "resilient"}


def settings(mode: str, steps: int) -> dict[str, Any]:
    """ACE's for a run of so many steps; none for upstream."""
    return {} if mode == "off" else {"mode": mode, "budget": steps}


@click.command()
@click.option("--molecules", default=3000, show_default=True, help="How many of QM9's 130,831 molecules.")
@click.option("--epochs", default=12, show_default=True, type=click.IntRange(min=1), help="Epochs of each run.")
@click.option("--target", default="alpha", show_default=True, help="What is predicted: alpha, mu, gap, u0, ...")
@click.option(
    "--seed",
    default=0,
    show_default=True,
    type=click.IntRange(min=0),
    help="Decides molecules, initial weights and batches.",
)
@click.option("--device", default="auto", show_default=True, help="auto, cpu or cuda.")
@click.option(
    "--picture",
    default="ace-demo.png",
    show_default=True,
    type=click.Path(dir_okay=False, path_type=Path),
    help="Where the validation curves, gamma, lambda and u are drawn: .png, .pdf or .svg.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the table.")
def demo(molecules: int, epochs: int, target: str, seed: int, device: str, picture: Path, as_json: bool) -> None:
    """SchNet on QM9: as it is, under ACE strict, and under ACE resilient.

    Trains the three side by side, from the same start and on the same batches, then prints their errors and
    draws their validation curves and how gamma, lambda and u moved. Takes three to five minutes on a CPU.

    Molecules have the symmetry that SchNet has, and on this budget ACE ties with upstream. Where data break the
    symmetry it wins: ace-patch demo c4.
    """
    from . import picture as drawing
    from . import qm9

    # Everything that can be wrong is found before minutes of training rather than after.
    qm9.check(molecules, target)
    check_picture(picture, qm9.INSTALL)
    where = _device(device)
    from . import training

    about = qm9.TARGETS[target]
    task = training.standardised(qm9.load(molecules, target, seed), where)
    with _one_thread():
        runs = _trained(task, epochs, seed, where)
        results = [training.judge(run, task) for run in runs]
    drawing.draw(runs, f"SchNet on QM9 {target}, seed {seed}", f"validation MAE\n({about.unit})", picture)
    told = conclusions(results, runs, about.unit, len(task.test))
    if as_json:
        report = {
            "target": target,
            "unit": about.unit,
            "molecules": {part: len(getattr(task, part)) for part in ("train", "validation", "test")},
            "epochs": epochs,
            "steps": runs[0].step,
            "seed": seed,
            "device": str(where),
            "runs": [as_dict(result, run) for result, run in zip(results, runs, strict=True)],
            "conclusions": told,
            "picture": str(picture),
        }
        click.echo(json.dumps(report))
        return
    from rich.console import Console

    console = Console()
    console.print(table(results, f"QM9 {target}, {about.description}. Errors in {about.unit}"))
    for sentence in told:
        console.print(f"\n{sentence}", highlight=False, markup=False)
    click.echo(f"\nPicture: {picture}")


def _device(name: str) -> torch.device:
    if name not in DEVICES:
        raise ConfigError(one_of("device", name, DEVICES))
    import torch

    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise ConfigError("device 'cuda': expected a GPU that PyTorch can use, found none; choose cpu or auto")
    return torch.device("cuda" if available and name != "cpu" else "cpu")


@contextmanager
def _one_thread() -> Iterator[None]:
    """One CPU thread: for graphs this small little slower than two, much faster where cores are shared, and
    the same sums in the same order on every machine."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _trained(task: Task, epochs: int, seed: int, device: torch.device) -> list[Run]:
    """The three runs. While they train, stderr has a bar each on a terminal, a line for every epoch elsewhere."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from . import training

    steps = epochs * task.batches
    runs = [training.start(name, settings(mode, steps), steps, seed, device) for name, mode in MODES.items()]
    console = Console(stderr=True)
    if not console.is_terminal:

        def line(run: Run) -> None:
            if run is runs[-1]:
                told = ", ".join(f"{each.name} {each.curve[-1]:.4g}" for each in runs)
                click.echo(f"SchNet, epoch {len(run.curve)}/{epochs}, validation MAE: {told}", err=True)

        training.train(runs, task, epochs, seed, line)
        return runs
    columns = (
        TextColumn("{task.description:<13}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("validation MAE {task.fields[mae]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        bars = {run.name: progress.add_task(run.name, total=epochs, mae="") for run in runs}

        def tell(run: Run) -> None:
            progress.update(bars[run.name], advance=1, mae=f"{run.curve[-1]:.4g}")

        training.train(runs, task, epochs, seed, tell)
    return runs


def table(results: Sequence[Result], title: str) -> Table:
    """One row a run; what the run deploys is bold."""
    from rich import box
    from rich.table import Table

    made = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", caption_justify="left")
    made.caption = (
        "MAE at the epoch with the lowest validation MAE of the deployed model, which is f_eq for upstream and "
        "strict, f_eq + gamma f_neq for resilient. Equivariance error: mean change of the deployed model's "
        "prediction when molecules are rotated, reflected and moved."
    )
    made.add_column("run\n\n", no_wrap=True)
    for part in ("valid.", "test"):
        made.add_column(f"{part}\nf_eq\n", justify="right")
        made.add_column(f"{part}\nf_eq +\ngamma f_neq", justify="right")
    made.add_column("s per\nepoch\n", justify="right")
    made.add_column("equiv.\nerror\n", justify="right")
    for result in results:
        cells = [
            "" if value is None else f"[bold]{value:.4g}[/bold]" if place == result.deployed else f"{value:.4g}"
            for values in (result.validation, result.test)
            for place, value in enumerate(values)
        ]
        made.add_row(result.name, *cells, f"{result.seconds:.2f}", f"{result.equivariance:.1e}")
    return made


ENOUGH = (500, 200)
"""Steps and test molecules below which a comparison says nothing."""


CHANCE = 0.05
"""Relative differences between runs that another seed may turn round."""


def conclusions(results: Sequence[Result], runs: Sequence[Run], unit: str, tested: int) -> list[str]:
    """What the numbers say, and no more."""
    plain, *others = results
    caution = _caution(results, runs[0].step, tested)
    against = "; ".join(_against(result, plain) for result in others)
    _, strict, resilient = zip(runs, results, strict=True)
    return [
        f"Test MAE of the deployed models, upstream {plain.test_deployed:.4g} {unit}: {against}. {caution}",
        _strict(*strict),
        _resilient(*resilient, unit),
    ]


def _caution(results: Sequence[Result], steps: int, tested: int) -> str:
    """What one seed can tell."""
    plain, *others = results
    if steps < ENOUGH[0] or tested < ENOUGH[1]:
        return f"After {steps} steps, on {tested} test molecules, the comparison means nothing."
    chance = f"differences below {100 * CHANCE:.0f} % can be chance"
    if all(abs(result.test_deployed / plain.test_deployed - 1) < CHANCE for result in others):
        return f"This is one seed, and {chance}: a tie."
    return f"This is one seed: {chance}."


def _against(result: Result, plain: Result) -> str:
    change = 100 * (result.test_deployed / plain.test_deployed - 1)
    if not math.isfinite(change):
        return f"{result.name} diverged"
    how = "the same" if abs(change) < 0.05 else f"{abs(change):.1f} % {'lower' if change < 0 else 'higher'}"
    return f"{result.name} {result.test_deployed:.4g}, {how}"


def _strict(run: Run, result: Result) -> str:
    kept = result.best_epoch * run.step // len(run.curve)
    landing = run.landing
    told = f"every gamma had landed by step {landing}" if landing else "gamma did not land: too few steps"
    return (
        f"Strict: the largest |gamma| went from {_largest(run.records[0][1][0])} to {_largest(run.records[-1][1][0])}; "
        f"{told} of {run.step}; the model kept is from step {kept}."
    )


def _resilient(run: Run, result: Result, unit: str) -> str:
    gamma, lambda_, u = run.records[-1][1]
    most, least = (choose(range(len(u)), key=u.__getitem__) for choose in (max, min))
    name, other = (run.ace.sites[place].name for place in (most, least))
    if u[most] < 0.001:
        slack = "every slack u is below 0.001: no layer asks to stay relaxed"
    elif u[most] < 1.05 * u[least]:
        slack = f"all layers keep about the same slack (u {u[least]:.3g} to {u[most]:.3g}): none is asked for most"
    else:
        slack = (
            f"{name} keeps the most slack (u {u[most]:.3g}, lambda {lambda_[most]:.3g}), "
            f"{other} the least (u {u[least]:.3g}, lambda {lambda_[least]:.3g})"
        )
    rho = float(run.ace.duals.price())
    if any(abs(u_ - l_ / rho) > 0.2 * u_ for u_, l_ in zip(u, lambda_, strict=True)):
        slack += "; u has not settled at lambda / rho on this budget"
    return (
        f"Resilient: {slack}; the largest |gamma| at the end is {_largest(gamma)}. Rotating, reflecting or moving a "
        f"molecule changes the deployed model's prediction by {result.equivariance:.2g} {unit} on average."
    )


def _largest(gamma: Sequence[float]) -> str:
    return f"{max(map(abs, gamma)):.2g}"


def as_dict(result: Result, run: Run) -> dict[str, Any]:
    """A run for JSON, with gamma, lambda and u as they are at the end."""
    kinds = ("f_eq", "f_eq+gamma*f_neq")
    columns = zip(*run.records[-1][1], strict=True) if run.records else ()
    return {
        "name": result.name,
        "settings": dict(run.settings),
        "deployed": kinds[result.deployed],
        "best_epoch": result.best_epoch,
        "validation_mae": dict(zip(kinds, map(_number, result.validation), strict=True)),
        "test_mae": dict(zip(kinds, map(_number, result.test), strict=True)),
        "seconds_per_epoch": round(result.seconds, 3),
        "equivariance_error": _number(result.equivariance),
        "validation_curve": [_number(error) for error in run.curve],
        "sites": [
            {"name": site.name, **dict(zip(("gamma", "lambda", "u"), map(_number, column), strict=True))}
            for site, column in zip(run.ace.sites if run.settings else (), columns, strict=True)
        ],
    }


def _number(value: float | None) -> float | None:
    """JSON has no nan."""
    return value if value is not None and math.isfinite(value) else None
