"""The demo's picture: one column per task with the validation curves, gamma of every layer, and the symmetry left."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .training import Result

COLOURS = ("#4c4c4c", "#d55e00")
"""Colours of upstream and ACE."""
LABELS = (
    "validation error\n(standard deviations)",
    "gamma of every layer\n(weight of its branch)",
    "change of the prediction\nunder rotations",
)


def draw(tasks: Mapping[float, Sequence[Result]], title: str, path: Path) -> None:
    """Draw the runs without and with ACE of every task into a file."""
    from matplotlib.figure import Figure  # not pyplot, which has global state and may open windows
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    figure = Figure(figsize=(10, 9), layout="constrained")
    figure.suptitle(title, fontsize=13)
    grid = figure.subplots(len(LABELS), len(tasks), sharey="row", squeeze=False)
    for (field, results), column in zip(tasks.items(), grid.T, strict=True):
        curves, gammas, turns = column
        curves.set_title(f"field of strength {field:g}" if field else "no field")
        for result, colour in zip(results, COLOURS, strict=True):
            epochs = range(1, len(result.curve) + 1)
            curves.plot(epochs, result.curve, color=colour, linewidth=1.6, marker=".", label=result.name)
            turns.scatter(*zip(*result.turns, strict=True), color=colour, s=14, label=result.name)
        _draw_gammas(gammas, results[-1])
        for axes, name in zip(column, ("epoch", "step", "angle between axis and field (degrees)"), strict=True):
            axes.set_xlabel(name)
            style_axes(axes)
        curves.xaxis.set_major_locator(MaxNLocator(integer=True))
        curves.set_yscale("log")
        for set_formatter in (curves.yaxis.set_major_formatter, curves.yaxis.set_minor_formatter):
            set_formatter(FuncFormatter(lambda value, _: f"{value:.2g}"))
        turns.set_xlim(0, 90)
    for axes, label in zip(grid[:, 0], LABELS, strict=True):
        axes.set_ylabel(label)
    for axes in (grid[0, -1], grid[2, 0], grid[1, 0]):
        axes.legend(frameon=False, fontsize=8, ncols=2 if axes is grid[1, 0] else 1)
    figure.savefig(path, dpi=130)


def _draw_gammas(axes: Any, result: Result) -> None:
    """Draw one line per layer, from the first (dark) to the last (light)."""
    from matplotlib import colormaps

    steps = [step for step, _ in result.gammas]
    for number, site in enumerate(result.sites):
        colour = colormaps["viridis"](0.92 * number / max(1, len(result.sites) - 1))
        axes.plot(steps, [g[number] for _, g in result.gammas], color=colour, linewidth=1.4, label=site.name)
    axes.axhline(0.0, color="0.7", linewidth=0.8, zorder=0)


def style_axes(axes: Any) -> None:
    """Give axes a light grid, behind the data, and no frame at the top and on the right."""
    axes.grid(True, color="0.92")
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
