"""The command ``ace-patch demo c4``: turn a square into a square, a rectangle and a shape without symmetry.

A C_4-equivariant network can only learn the first. Under ACE in resilient mode it learns all three, and its gammas stay
away from 0 only where the data break the symmetry.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

import click

from ace_plugins import adapter as ace

if TYPE_CHECKING:  # imported inside the functions, so that --help does not wait for torch
    from rich.table import Table

    from .training import Result, Run

RUNS: Mapping[str, Mapping[str, Any]] = {
    "without ACE": {},
    "ACE resilient": {"mode": "resilient", "spectral_norm": True},
}
INSTALL = "run pip install './adapters/c4[demo]' in a clone of ace-plugins, or pip install matplotlib"
CLEARLY = 0.8
"""Ratio of test errors below which ACE is clearly better."""
ENOUGH = 4
"""Number of epochs below which the comparison is not meaningful."""


@click.command()
@click.option("--epochs", default=6, show_default=True, type=click.IntRange(min=1), help="Epochs of each run.")
@click.option("--seeds", default=3, show_default=True, type=click.IntRange(min=1), help="Number of seeds: 0, 1, 2, ...")
@click.option(
    "--picture",
    default="ace-demo-c4.png",
    show_default=True,
    type=click.Path(dir_okay=False, path_type=Path),
    help="Picture to write (.png, .pdf or .svg): f_eq, gamma f_neq, their sum and the error curves.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the table.")
def demo(epochs: int, seeds: int, picture: Path, as_json: bool) -> None:
    """Map images of a square to a square, to a rectangle, and to a shape without symmetry.

    Trains a small C4-equivariant network for each, without ACE and in resilient mode, with several seeds, then
    prints the errors and draws what the branches add. Takes about half a minute on a CPU.
    """
    ace.check_picture(picture, INSTALL)  # before training, not after it
    from . import picture as drawing
    from . import training
    from .shapes import TARGETS

    runs: dict[str, list[tuple[Run, Run]]] = {}
    results: dict[str, list[tuple[Result, Result]]] = {}
    with ace.one_thread(), ace.progress(len(TARGETS) * epochs, "epochs") as advance:
        for target in TARGETS:
            runs[target] = [start_pair(target, epochs, seed) for seed in range(seeds)]
            every = [run for pair in runs[target] for run in pair]
            for epoch in training.train(every, epochs):
                if advance is not None:
                    advance(1)
                else:
                    click.echo(_progress(target, epoch, epochs, every), err=True)
            results[target] = [(training.judge(plain), training.judge(ours)) for plain, ours in runs[target]]
        drawing.draw(runs, picture)
    conclusions = conclude(results, epochs)
    if not as_json:
        from rich.console import Console

        Console().print(make_table(results))
        click.echo("\n".join(["", *(f"{sentence}\n" for sentence in conclusions), f"Picture: {picture}"]))
        return
    targets = {
        target: {
            "runs": [
                to_dict(result, run)
                for pair, judged in zip(runs[target], results[target], strict=True)
                for run, result in zip(pair, judged, strict=True)
            ]
        }
        for target in runs
    }
    content = {"epochs": epochs, "seeds": seeds, "targets": targets}
    click.echo(json.dumps({**content, "conclusions": conclusions, "picture": str(picture)}))


def start_pair(target: str, epochs: int, seed: int) -> tuple[Run, Run]:
    """Start a run without ACE and one with it."""
    from . import training

    plain, ours = (training.start(name, settings, target, epochs, seed) for name, settings in RUNS.items())
    return plain, ours


def _progress(target: str, epoch: int, epochs: int, runs: Sequence[Run]) -> str:
    errors = {name: mean(run.curve[-1] for run in runs if run.name == name) for name in RUNS}
    listed = ", ".join(f"{name} {error:.4f}" for name, error in errors.items())
    return f"square to {target}, epoch {epoch}/{epochs}, validation error: {listed}"


def make_table(results: Mapping[str, Sequence[tuple[Result, Result]]]) -> Table:
    """Return a table with two rows per target."""
    from rich import box
    from rich.table import Table

    seeds = len(next(iter(results.values())))
    title = f"A square to another shape, {seeds} seed{'s' * (seeds > 1)}"
    table = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False, title_justify="left", caption_justify="left")
    table.caption = (
        "Mean squared error per pixel on held-out images, mean over the seeds and their range, of the deployed model: "
        "f_eq without ACE, f_eq + gamma f_neq in resilient mode. Equivariance error: relative change of the output "
        "under quarter turns."
    )
    table.add_column("square to\n", no_wrap=True)
    table.add_column("run\n", no_wrap=True)
    for name in ("test\nerror", "of the seeds\n", "largest\n|gamma|", "equiv.\nerror"):
        table.add_column(name, justify="right", no_wrap=True)
    for target, pairs in results.items():
        for number, name in enumerate(RUNS):
            judged = [pair[number] for pair in pairs]
            errors = [result.test for result in judged]
            largest = [max(map(abs, result.gamma)) for result in judged if result.gamma]
            table.add_row(
                "" if number else target,
                name,
                f"{mean(errors):.4f}",
                f"{min(errors):.4f}–{max(errors):.4f}",
                f"{min(largest):.2f}–{max(largest):.2f}" if largest else "",
                f"{mean(result.equivariance for result in judged):.1g}",
            )
    return table


def conclude(results: Mapping[str, Sequence[tuple[Result, Result]]], epochs: int) -> list[str]:
    """Return the conclusions, one paragraph per target."""
    conclusions = [_conclude_target(target, pairs) for target, pairs in results.items()]
    if epochs < ENOUGH:
        conclusions.append(f"After {epochs} epoch{'s' * (epochs > 1)} the comparison is not meaningful.")
    return conclusions


def _conclude_target(target: str, pairs: Sequence[tuple[Result, Result]]) -> str:
    plain, ours = ([pair[number].test for pair in pairs] for number in (0, 1))
    ratios = [after / before if before > 0 else math.nan for before, after in zip(plain, ours, strict=True)]
    seeds = f"{len(pairs)} of {len(pairs)} seeds"
    if not all(map(math.isfinite, ratios)):
        verdict = "a run diverged"
    elif max(ratios) < CLEARLY:
        verdict = f"with ACE it is clearly lower in {seeds}, {mean(ratios):.2g} times that without"
    elif min(ratios) > 1 / CLEARLY:
        verdict = f"with ACE it is clearly higher in {seeds}, {mean(ratios):.2g} times that without"
    else:
        verdict = f"neither is clearly better (with ACE {min(ratios):.2g} to {max(ratios):.2g} times that without)"
    floor = mean(pair[0].floor for pair in pairs)
    limit = f" No equivariant model gets below {floor:.4f}." if floor > 0 else ""
    largest = [max(map(abs, pair[1].gamma)) for pair in pairs]
    return (
        f"Square to {target}: test error {mean(ours):.4f} with ACE, {mean(plain):.4f} without; {verdict}.{limit} "
        f"The largest |gamma| of a run ends at {min(largest):.2g} to {max(largest):.2g}."
    )


def to_dict(result: Result, run: Run) -> dict[str, Any]:
    """Return a run for JSON."""
    described = {
        "name": result.name,
        "seed": result.seed,
        "settings": dict(RUNS[result.name]),
        "test_error": result.test,
        "test_error_f_eq": result.test_f_eq,
        "floor_of_equivariant_models": result.floor,
        "gamma": list(result.gamma),
        "equivariance_error": result.equivariance,
        "validation_curve": list(run.curve),
    }
    return dict(ace.to_json(described))
