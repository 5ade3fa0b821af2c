"""The command ``ace-patch demo schnet``: SchNet on molecules in an electric field, and without one.

Each task is trained twice: without ACE, and with ACE in its default mode. The two runs of a task share the seed, the
initial weights, the batches and the learning rate schedule. Each keeps the epoch with the lowest validation error.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ace_plugins import adapter as ace

if TYPE_CHECKING:  # imported inside the functions, so that --help does not wait for torch
    import torch
    from rich.table import Table

    from .training import Result

Tasks = dict[float, list["Result"]]
"""The results without and with ACE, by strength of the field."""
Options = tuple[int, str, int, int, "torch.device"]
"""Molecules, target, epochs, seed and device."""

DEVICES = ("auto", "cpu", "cuda")
ENOUGH_STEPS, ENOUGH_TESTED = 500, 200
"""Training steps and test molecules below which the comparison is not meaningful."""
CHANCE = 0.1
"""Largest relative difference between runs that may be due to chance: another seed may reverse it."""


@click.command()
@click.option("--molecules", default=3000, show_default=True, help="Number of molecules, of QM9's 130,831.")
@click.option("--epochs", default=12, show_default=True, type=click.IntRange(min=1), help="Epochs of each run.")
@click.option("--target", default="alpha", show_default=True, help="Property to predict: alpha, mu, gap, u0, ...")
@click.option(
    "--field",
    default=1.0,
    show_default=True,
    type=click.FloatRange(min=0.0, min_open=True),
    help="Strength of the electric field in the first task: its energy in standard deviations of the property.",
)
@click.option(
    "--seed",
    default=0,
    show_default=True,
    type=click.IntRange(min=0),
    help="Seed of the molecules, the initial weights and the batches.",
)
@click.option("--device", default="auto", show_default=True, help="auto, cpu or cuda.")
@click.option(
    "--jobs",
    type=click.IntRange(1, 2),
    help="Tasks that train at the same time. Default: 2 on a CPU with several cores, otherwise 1.",
)
@click.option(
    "--picture",
    default="ace-demo.png",
    show_default=True,
    type=click.Path(dir_okay=False, path_type=Path),
    help="File for the curves and the remaining symmetry: .png, .pdf or .svg.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the tables.")
def demo(
    molecules: int,
    epochs: int,
    target: str,
    field: float,
    seed: int,
    device: str,
    jobs: int | None,
    picture: Path,
    as_json: bool,
) -> None:
    """SchNet on molecules in an electric field, where ACE wins, and without a field, where it ties.

    The property of molecules of QM9 is predicted twice. In the first task the energy of fixed charges in a uniform
    electric field is added to it, so that it depends on the orientation of a molecule, which SchNet ignores. The second
    task has no field. Each is trained without and with ACE. Takes two to three minutes on two CPU cores.
    """
    from . import picture as drawing
    from . import qm9

    # Check everything before training, which takes minutes.
    qm9.check(molecules, target)
    ace.check_picture(picture, qm9.INSTALL)
    where = _device(device)
    if jobs is None:
        import os

        jobs = 2 if where.type == "cpu" and (os.cpu_count() or 1) > 1 else 1
    fields = (field, 0.0)
    with ace.progress(len(fields) * epochs, "epochs") as advance:
        report = partial(click.echo, err=True) if advance is None else lambda line: advance(1)
        tasks = _train(fields, (molecules, target, epochs, seed, where), jobs, report)
    title = f"SchNet on QM9 {target} ({qm9.TARGETS[target].description}), seed {seed}"
    drawing.draw(tasks, title, picture)
    conclusions = conclude(tasks)
    if not as_json:
        from rich.console import Console

        Console().print(make_table(tasks, title))
        Console().print(make_site_table(tasks))
        click.echo("\n".join(["", *(f"{sentence}\n" for sentence in conclusions), f"Picture: {picture}"]))
        return
    report_: dict[str, Any] = {
        "target": target,
        "epochs": epochs,
        "seed": seed,
        "device": str(where),
        "runs": [to_dict(result) for results in tasks.values() for result in results],
        "conclusions": conclusions,
        "picture": str(picture),
    }
    click.echo(json.dumps(report_))


def _device(name: str) -> torch.device:
    if name not in DEVICES:
        raise ace.ConfigError(ace.one_of("device", name, DEVICES))
    import torch

    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise ace.ConfigError("device 'cuda': expected a GPU that PyTorch can use, found none; choose cpu or auto")
    return torch.device("cuda" if available and name != "cpu" else "cpu")


def _train(fields: Sequence[float], options: Options, jobs: int, report: Callable[[str], None]) -> Tasks:
    """Train the task of every field, two at a time in separate processes if ``jobs`` is 2."""
    if jobs == 1:
        return {field: _train_one(field, options, report) for field in fields}
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor, wait

    context = multiprocessing.get_context("spawn")  # a forked process cannot use a GPU, and copies the thread pool
    with context.Manager() as manager, ProcessPoolExecutor(jobs, mp_context=context) as pool:
        lines = manager.Queue()
        running = [pool.submit(_train_one, field, options, lines.put) for field in fields]
        while not lines.empty() or wait(running, timeout=0.2).not_done:
            while not lines.empty():
                report(lines.get())
        return {field: done.result() for field, done in zip(fields, running, strict=True)}


def _train_one(field: float, options: Options, report: Callable[[str], None]) -> list[Result]:
    from . import training

    with ace.one_thread():
        return training.train_task(field, *options, report)


def name_task(field: float) -> str:
    """Return the name of a task for tables and sentences."""
    return f"field {field:g}" if field else "no field"


def make_table(tasks: Tasks, title: str) -> Table:
    """Return a table with one row per run."""
    from rich import box
    from rich.table import Table

    first = next(iter(tasks.values()))[0]
    trained, _, tested = first.molecules
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", caption_justify="left")
    table.caption = (
        f"Mean absolute errors in standard deviations of the property, at the epoch with the lowest validation error. "
        f"{trained:,} molecules to train on, {tested:,} to test on, {first.steps:,} steps. Equivariance error: mean "
        "change of the prediction when molecules are rotated, reflected and moved."
    )
    table.add_column("task\n", no_wrap=True)
    table.add_column("run\n", no_wrap=True)
    for name in ("valid.\nerror", "test\nerror", "ACE /\nupstream", "branches\nkept", "equiv.\nerror", "s per\nepoch"):
        table.add_column(name, justify="right", no_wrap=True)
    for field, (plain, ours) in tasks.items():
        for result in (plain, ours):
            table.add_row(
                "" if result is ours else name_task(field),
                result.name,
                f"{result.validation:.3f}",
                f"{result.test:.3f}",
                f"{ours.test / plain.test:.2f}" if result is ours else "",
                f"{result.kept} of {len(result.sites)}" if result.sites else "",
                f"{result.equivariance:.1g}",
                f"{result.seconds:.1f}",
            )
    return table


def make_site_table(tasks: Tasks) -> Table:
    """Return a table with one row per layer: gamma, benefit and verdict in each task."""
    from rich import box
    from rich.table import Table

    table = Table(title="\nWhat ACE found in each layer", box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.title_justify = table.caption_justify = "left"
    table.caption = "Benefit: share by which the branch lowers the loss of held-out molecules."
    table.add_column("layer\n", no_wrap=True)
    for field in tasks:
        for head, name in ((name_task(field), "gamma"), ("", "benefit"), ("", "verdict")):
            table.add_column(f"{head}\n{name}", justify="right", no_wrap=True)
    for rows in zip(*(ours.sites for _, ours in tasks.values()), strict=True):
        cells = [cell for s in rows for cell in (f"{s.gamma:.3g}", _percent(s.benefit), s.verdict)]
        table.add_row(rows[0].name, *cells)
    return table


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %" if math.isfinite(share) else ""


def conclude(tasks: Tasks) -> list[str]:
    """Return the conclusions: one paragraph per task, and a note on the limits of one seed."""
    first = next(iter(tasks.values()))[0]
    tested = first.molecules[2]
    if first.steps < ENOUGH_STEPS or tested < ENOUGH_TESTED:
        return [f"After {first.steps} steps, on {tested} test molecules, the comparison is not meaningful."]
    sentences = [_conclude_task(field, *results) for field, results in tasks.items()]
    return [*sentences, f"This is one seed: differences below {100 * CHANCE:.0f} % can be chance."]


def _conclude_task(field: float, plain: Result, ours: Result) -> str:
    ratio = ours.test / plain.test
    if not math.isfinite(ratio):
        compared = "a run diverged"
    elif abs(ratio - 1) < CHANCE:
        compared = f"{ratio:.2f} times that without: a tie"
    else:
        compared = f"{ratio:.2f} times that without: ACE {'wins' if ratio < 1 else 'loses'}"
    start = "In the field" if field else "Without a field"
    told = f"{start}, the test error is {ours.test:.3f} with ACE and {plain.test:.3f} without, {compared}."
    if not ours.kept:
        return f"{told} ACE kept no branch: the trained model is plain SchNet, with its own parameters."
    told = f"{told} ACE kept {ours.kept} of {len(ours.sites)} branches."
    if not field:
        return told
    angle, least = min(ours.turns, key=lambda turn: turn[1])
    _, most = max(ours.turns, key=lambda turn: turn[1])
    return (
        f"{told} The prediction of the trained model changes least, by {least:.2g}, when molecules rotate about an "
        f"axis {angle:.0f} degrees from the field, and most, by {most:.2g}, about others. SchNet without ACE does not "
        "change at all, so it cannot represent the field."
    )


def to_dict(result: Result) -> dict[str, Any]:
    """Return a run for JSON."""
    return dict(ace.to_json({**dataclasses.asdict(result), "branches_kept": result.kept}))
