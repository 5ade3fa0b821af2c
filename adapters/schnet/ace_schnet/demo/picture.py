"""The demo's picture: the validation curves, and gamma, lambda and u of every layer, one column per mode."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .training import Run

COLOURS = ("#4c4c4c", "#0072b2", "#d55e00")
"""Of upstream, strict and resilient."""
ROWS = ("gamma", "lambda", "u")
MEANING = {
    "gamma": "gamma\n(weight of the branch)",
    "lambda": "lambda\n(price of equivariance)",
    "u": "u\n(slack that is learned)",
}


def draw(runs: Sequence[Run], title: str, error: str, path: Path) -> None:
    """``error`` says what the validation error is, and its unit. Without pyplot, so that no window system and no global
    state take part."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 10.5), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=13)
    parts: Any = figure.subfigures(2, 1, height_ratios=(1, 3))
    above, below = parts
    _curves(above.subplots(), runs, error)
    relaxed = [run for run in runs if run.settings]
    axes = below.subplots(len(ROWS), len(relaxed), sharex=True, sharey="row", squeeze=False)
    for column, run in enumerate(relaxed):
        axes[0, column].set_title(run.name)
        axes[-1, column].set_xlabel("step")
        for row, name in enumerate(ROWS):
            axis = axes[row, column]
            if column == 0:
                axis.set_ylabel(MEANING[name])
            if name == "u" and run.settings["mode"] == "strict":
                axis.text(0.5, 0.5, "not used in strict mode", transform=axis.transAxes, ha="center", color="0.4")
            else:
                _lines(axis, run, row)
                _landing(axis, run, told=row == 0)
            _dress(axis)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    below.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    figure.savefig(path, dpi=130)


def _curves(axis: Any, runs: Sequence[Run], error: str) -> None:
    """The validation error of what each run deploys, epoch by epoch."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    for run, colour in zip(runs, COLOURS, strict=True):
        axis.plot(range(1, len(run.curve) + 1), run.curve, color=colour, linewidth=1.6, marker=".", label=run.name)
    axis.set_xlabel("epoch")
    axis.set_ylabel(error)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.set_yscale("log")
    for ticks in (axis.yaxis.set_major_formatter, axis.yaxis.set_minor_formatter):
        ticks(FuncFormatter(lambda value, _: f"{value:.3g}"))
    axis.legend(frameon=False)
    _dress(axis, zero=False)


def _lines(axis: Any, run: Run, row: int) -> None:
    """One line a layer, coloured from the first (dark) to the last (light)."""
    from matplotlib import colormaps

    steps = [step for step, _ in run.records]
    sites = run.ace.sites
    for number, site in enumerate(sites):
        colour = colormaps["viridis"](0.92 * number / max(1, len(sites) - 1))
        values = [recorded[row][number] for _, recorded in run.records]
        axis.plot(steps, values, color=colour, linewidth=1.4, label=site.name)


def _landing(axis: Any, run: Run, told: bool) -> None:
    """Where strict mode set gamma to 0, if it did."""
    step = run.landing
    if not step:
        return
    axis.axvline(step, color="0.4", linewidth=0.9, linestyle="--")
    if told:
        place: dict[str, Any] = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points"}
        words = f"step {step}: every gamma has landed"
        axis.annotate(words, (step, 1.0), xytext=(5, -10), fontsize=9, color="0.4", **place)


def _dress(axis: Any, *, zero: bool = True) -> None:
    if zero:
        axis.axhline(0.0, color="0.7", linewidth=0.8, zorder=0)
    axis.grid(True, color="0.92")
    axis.set_axisbelow(True)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
