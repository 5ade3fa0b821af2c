"""The demo's picture: validation curves on top, then gamma, lambda and u of every layer in one column per mode."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ace_plugins.adapter import style_axes

if TYPE_CHECKING:
    from .training import Run

COLOURS = ("#4c4c4c", "#0072b2", "#d55e00")
"""Upstream, strict and resilient."""
LABELS = ("gamma\n(weight of the branch)", "lambda\n(price of equivariance)", "u\n(learned slack)")


def draw(runs: Sequence[Run], title: str, error: str, path: Path) -> None:
    """Draw the runs into a file. ``error`` labels the validation error."""
    from matplotlib.figure import Figure  # not pyplot, which has global state and may open windows

    figure = Figure(figsize=(10, 10.5), layout="constrained")
    figure.suptitle(title, fontsize=13)
    parts: Any = figure.subfigures(2, 1, height_ratios=(1, 3))
    above, below = parts
    _draw_curves(above.subplots(), runs, error)
    relaxed = [run for run in runs if run.settings]
    grid = below.subplots(len(LABELS), len(relaxed), sharex=True, sharey="row", squeeze=False)
    for column, run in enumerate(relaxed):
        grid[0, column].set_title(run.name)
        grid[-1, column].set_xlabel("step")
        for row, label in enumerate(LABELS):
            axes = grid[row, column]
            if column == 0:
                axes.set_ylabel(label)
            if label.startswith("u") and run.settings["mode"] == "strict":
                axes.text(0.5, 0.5, "not used in strict mode", transform=axes.transAxes, ha="center", color="0.4")
            else:
                _draw_layers(axes, run, row)
            axes.axhline(0.0, color="0.7", linewidth=0.8, zorder=0)
            style_axes(axes)
    handles, labels = grid[0, 0].get_legend_handles_labels()
    below.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    figure.savefig(path, dpi=130)


def _draw_curves(axes: Any, runs: Sequence[Run], error: str) -> None:
    """Draw the validation error of each deployed model, per epoch."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    for run, colour in zip(runs, COLOURS, strict=True):
        axes.plot(range(1, len(run.curve) + 1), run.curve, color=colour, linewidth=1.6, marker=".", label=run.name)
    axes.set_xlabel("epoch")
    axes.set_ylabel(error)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_yscale("log")
    for set_formatter in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        set_formatter(FuncFormatter(lambda value, _: f"{value:.3g}"))
    axes.legend(frameon=False)
    style_axes(axes)


def _draw_layers(axes: Any, run: Run, row: int) -> None:
    """Draw one line per layer, from the first (dark) to the last (light), and the step at which strict mode landed."""
    from matplotlib import colormaps

    steps = [step for step, _ in run.records]
    names = run.sites
    for number, name in enumerate(names):
        colour = colormaps["viridis"](0.92 * number / max(1, len(names) - 1))
        values = [recorded[row][number] for _, recorded in run.records]
        axes.plot(steps, values, color=colour, linewidth=1.4, label=name)
    landing = run.landing
    if not landing:
        return
    axes.axvline(landing, color="0.4", linewidth=0.9, linestyle="--")
    if row == 0:
        place: dict[str, Any] = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points"}
        text = f"step {landing}: every gamma has landed"
        axes.annotate(text, (landing, 1.0), xytext=(5, -10), fontsize=9, color="0.4", **place)
