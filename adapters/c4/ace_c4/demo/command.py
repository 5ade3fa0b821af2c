"""``ace-patch demo c4``: a square becomes a square, a rectangle, and a shape without symmetry.

A C_4-equivariant network can learn only the first. Under ACE, resilient, it learns all three: its gammas stay away from
0 where the symmetry does not fit, and there only.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ace_plugins.adapter import check_picture

if TYPE_CHECKING:  # torch is imported where it is used: --help does not wait for it
    from rich.table import Table

    from .training import Result, Run

RUNS: Mapping[str, Mapping[str, Any]] = {
    "without ACE": {},
    "ACE resilient": {"mode": "resilient", "spectral_norm": True},
}
INSTALL = "run pip install './adapters/c4[demo]' in a clone of ace-plugins, or pip install matplotlib"
CLEARLY = 0.8
"""Test error beside that without ACE from which on a seed counts as better."""
ENOUGH = 4
"""Epochs below which a comparison says nothing."""


@click.command()
@click.option("--epochs", default=6, show_default=True, type=click.IntRange(min=1), help="Epochs of each run.")
@click.option("--seeds", default=3, show_default=True, type=click.IntRange(min=1), help="Seeds of each run, from 0.")
@click.option(
    "--picture",
    default="ace-demo-c4.png",
    show_default=True,
    type=click.Path(dir_okay=False, path_type=Path),
    help="Where f_eq, gamma f_neq, their sum and the curves are drawn: .png, .pdf or .svg.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the table.")
def demo(epochs: int, seeds: int, picture: Path, as_json: bool) -> None:
    """Images under quarter turns: a square to a square, to a rectangle, to a shape without symmetry.

    Trains a small C4-equivariant network for each, without ACE and under ACE resilient, with several seeds, then
    prints the errors and draws what the branches add. Takes about half a minute on a CPU.
    """
    check_picture(picture, INSTALL)  # before training rather than after
    from . import picture as drawing
    from . import training
    from .shapes import TARGETS

    runs: dict[str, list[tuple[Run, Run]]] = {}
    results: dict[str, list[tuple[Result, Result]]] = {}
    with _one_thread(), _telling(len(TARGETS) * epochs) as tell:
        for target in TARGETS:
            pairs = [_pair(target, epochs, seed) for seed in range(seeds)]
            every = [run for pair in pairs for run in pair]
            for epoch in training.train(every, epochs):
                tell(_line(target, epoch, epochs, every))
            runs[target] = pairs
            results[target] = [(training.judge(plain), training.judge(ours)) for plain, ours in pairs]
        drawing.draw(runs, picture)
    told = conclusions(results, epochs)
    if as_json:
        targets = {
            target: {
                "runs": [
                    _as_dict(result, run)
                    for pair, judged in zip(runs[target], results[target], strict=True)
                    for run, result in zip(pair, judged, strict=True)
                ]
            }
            for target in runs
        }
        report = {"epochs": epochs, "seeds": seeds, "targets": targets, "conclusions": told, "picture": str(picture)}
        click.echo(json.dumps(report))
        return
    from rich.console import Console

    console = Console()
    console.print(table(results))
    for sentence in told:
        console.print(f"\n{sentence}", highlight=False, markup=False)
    click.echo(f"\nPicture: {picture}")


def _pair(target: str, epochs: int, seed: int) -> tuple[Run, Run]:
    from . import training

    plain, ours = (training.start(name, settings, target, epochs, seed) for name, settings in RUNS.items())
    return plain, ours


@contextmanager
def _one_thread() -> Iterator[None]:
    """One CPU thread: images this small are no faster with more, and the sums are the same on every machine."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _telling(epochs: int) -> Iterator[Callable[[str], None]]:
    """What to call with a line for every epoch: a bar on a terminal, lines elsewhere. On stderr, both."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda line: click.echo(line, err=True)
        return
    columns = (BarColumn(bar_width=24), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("", total=epochs)
        yield lambda line: progress.update(bar, advance=1, description=line)


def _line(target: str, epoch: int, epochs: int, runs: Sequence[Run]) -> str:
    errors = {name: [run.curve[-1] for run in runs if run.name == name] for name in RUNS}
    told = ", ".join(f"{name} {_mean(values):.4f}" for name, values in errors.items())
    return f"square to {target}, epoch {epoch}/{epochs}, validation error: {told}"


def table(results: Mapping[str, Sequence[tuple[Result, Result]]]) -> Table:
    """Two rows a target."""
    from rich import box
    from rich.table import Table

    seeds = len(next(iter(results.values())))
    title = f"A square to another shape, {seeds} seed{'s' * (seeds > 1)}"
    made = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False)
    made.title_justify = made.caption_justify = "left"
    made.caption = (
        "Mean squared error of a pixel on held-out images, mean over the seeds and their range, of the deployed model: "
        "f_eq without ACE, f_eq + gamma f_neq under ACE resilient. Equivariance error: how much its output changes "
        "under quarter turns, relative."
    )
    made.add_column("square to\n", no_wrap=True)
    made.add_column("run\n", no_wrap=True)
    for name in ("test\nerror", "of the seeds\n", "largest\n|gamma|", "equiv.\nerror"):
        made.add_column(name, justify="right", no_wrap=True)
    for target, pairs in results.items():
        for number, (name, *_) in enumerate(RUNS.items()):
            judged = [pair[number] for pair in pairs]
            errors = [result.test for result in judged]
            largest = [max(map(abs, result.gamma)) for result in judged if result.gamma]
            made.add_row(
                "" if number else target,
                name,
                f"{_mean(errors):.4f}",
                f"{min(errors):.4f}–{max(errors):.4f}",
                f"{min(largest):.2f}–{max(largest):.2f}" if largest else "",
                f"{_mean([result.equivariance for result in judged]):.1g}",
            )
    return made


def conclusions(results: Mapping[str, Sequence[tuple[Result, Result]]], epochs: int) -> list[str]:
    """What the numbers say, and no more."""
    told = [_about(target, pairs) for target, pairs in results.items()]
    if epochs < ENOUGH:
        told.append(f"After {epochs} epoch{'s' * (epochs > 1)} the comparison means nothing.")
    return told


def _about(target: str, pairs: Sequence[tuple[Result, Result]]) -> str:
    plain, ours = ([pair[number].test for pair in pairs] for number in (0, 1))
    ratios = [after / before if before > 0 else math.nan for before, after in zip(plain, ours, strict=True)]
    seeds = f"{len(pairs)} of {len(pairs)} seeds"
    if not all(map(math.isfinite, ratios)):
        verdict = "a run diverged"
    elif max(ratios) < CLEARLY:
        verdict = f"with ACE it is clearly lower in {seeds}, {_mean(ratios):.2g} of that without"
    elif min(ratios) > 1 / CLEARLY:
        verdict = f"with ACE it is clearly higher in {seeds}, {_mean(ratios):.2g} times that without"
    else:
        verdict = f"neither is clearly better (with ACE {min(ratios):.2g} to {max(ratios):.2g} of that without)"
    floor = _mean([pair[0].floor for pair in pairs])
    limit = f" No equivariant model gets below {floor:.4f}." if floor > 0 else ""
    largest = [max(map(abs, pair[1].gamma)) for pair in pairs]
    return (
        f"Square to {target}: test error {_mean(ours):.4f} with ACE, {_mean(plain):.4f} without; {verdict}.{limit} "
        f"The largest |gamma| of a run ends at {min(largest):.2g} to {max(largest):.2g}."
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _as_dict(result: Result, run: Run) -> dict[str, Any]:
    return {
        "name": result.name,
        "seed": result.seed,
        "settings": dict(RUNS[result.name]),
        "test_error": _number(result.test),
        "test_error_f_eq": _number(result.test_f_eq),
        "floor_of_equivariant_models": result.floor,
        "gamma": [_number(value) for value in result.gamma],
        "equivariance_error": _number(result.equivariance),
        "validation_curve": [_number(error) for error in run.curve],
    }


def _number(value: float) -> float | None:
    """JSON has no nan."""
    return value if math.isfinite(value) else None
