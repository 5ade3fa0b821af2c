"""Runs as one picture file, with matplotlib: for slides and papers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import AceError
from ..pictures import check_picture
from .lines import LINES_AT_MOST, shortened
from .run import QUANTITIES, Run
from .scales import beginning, columns, spans, wants_log

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#8b8f94")
"""Told apart by everyone (Okabe and Ito)."""
ACROSS = 200
NAMED = 20
"""Rows of a map that are named, at most."""


def draw(runs: Sequence[Run], path: Path) -> None:
    """A row for each run: gamma, lambda, u, the loss and the equivariance error."""
    check_picture(path)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(17, 3.1 * len(runs)), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(runs), 5, squeeze=False)
    for run, row in zip(runs, grid, strict=True):
        for name, axes in zip(QUANTITIES, row, strict=False):
            _layers(figure, axes, run, name)
        _curve(row[3], "training loss", run.loss)
        _curve(row[4], f"equivariance error {run.group}".strip(), run.errors)
        row[0].set_ylabel(f"{run.title}\n{run.name}", fontsize=9)
    save(figure, path)


def save(figure: Any, path: Path) -> None:
    try:
        figure.savefig(path)
    except OSError as error:
        raise AceError(
            f"picture {path} cannot be written: {error.strerror or error}; mend that and try again"
        ) from None


def _layers(figure: Any, axes: Any, run: Run, name: str) -> None:
    _dress(axes, name)
    values = run.values[name]
    if not run.steps or not values:
        return
    if len(values) > LINES_AT_MOST:
        places = spans(run.steps, ACROSS)
        rows = [columns(places, site, ACROSS) for site in values]
        most = max((abs(value) for row in rows for value in row if math.isfinite(value)), default=0.0) or 1.0
        signed = any(value < 0 for row in rows for value in row)
        shown = axes.imshow(
            rows,
            aspect="auto",
            cmap="PuOr_r" if signed else "Oranges",
            vmin=-most if signed else 0,
            vmax=most,
            interpolation="nearest",
            extent=(beginning(min(run.steps), run.length), run.length, len(rows) - 0.5, -0.5),
        )
        figure.colorbar(shown, ax=axes, fraction=0.05)
        axes.grid(False)
        every = -(-len(rows) // NAMED)
        axes.set_yticks(range(0, len(rows), every), [shortened(site) for site in run.sites[::every]], fontsize=6)
        return
    for number, (site, at) in enumerate(zip(run.sites, values, strict=True)):
        axes.plot(run.steps, at, color=COLOURS[number % len(COLOURS)], linewidth=1.3, label=site)
    if name == QUANTITIES[0]:
        axes.legend(frameon=False, fontsize=7)


def _curve(axes: Any, title: str, points: Sequence[tuple[int, float]]) -> None:
    _dress(axes, title)
    if not points:
        axes.set_axis_off()
        return
    axes.plot(
        [step for step, _ in points],
        [value for _, value in points],
        color=COLOURS[0],
        linewidth=1.2 if len(points) < 500 else 0.4,
    )
    if wants_log([value for _, value in points]):
        axes.set_yscale("log")


def _dress(axes: Any, title: str) -> None:
    axes.set_title(title, fontsize=10)
    axes.set_xlabel("step", fontsize=8)
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.2)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
