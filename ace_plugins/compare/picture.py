"""The curves of all runs in one picture: every seed a thin line, their mean a thick one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from ..report.picture import save
from ..report.words import plural
from .plan import Comparison
from .results import Result, curves_of, mean_curve

COLOURS = ("#4c4c4c", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""Told apart by everyone (Okabe and Ito), upstream in grey."""


def draw(comparison: Comparison, results: Sequence[Result], path: Path) -> bool:
    """Draw what there is. Says whether there was anything."""
    metric = comparison.metrics[0]
    curves = {run: curves_of(results, run, metric.name) for run in comparison.runs}
    if not any(curves.values()):
        return False
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator

    figure = Figure(figsize=(7, 4.2), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    values = [point[1] for found in curves.values() for curve in found for point in curve if math.isfinite(point[1])]
    for number, (run, found) in enumerate(curves.items()):
        colour = COLOURS[number % len(COLOURS)]
        for curve in found:
            axes.plot(range(1, len(curve) + 1), [value for _, value in curve], color=colour, alpha=0.35, linewidth=0.8)
        if found:
            mean = mean_curve(found)
            label = f"{run} ({plural(len(found), 'seed')})"
            axes.plot(range(1, len(mean) + 1), mean, color=colour, linewidth=2, label=label)
    if values and min(values) > 0 and max(values) > 5 * min(values):
        axes.set_yscale("log")
        plain = FuncFormatter(lambda value, _: f"{value:g}")
        axes.yaxis.set_major_formatter(plain)
        axes.yaxis.set_minor_locator(LogLocator(subs=(2, 5)))
        axes.yaxis.set_minor_formatter(plain)
        # A few evaluations that exploded, or the first ones, are not to flatten all others.
        ordered = sorted(values)
        axes.set_ylim(0.9 * ordered[0], 1.1 * ordered[min(len(ordered) - 1, int(0.98 * len(ordered)))])
    axes.set_xlabel("evaluation")
    axes.set_ylabel(metric.name)
    axes.set_title(f"{comparison.adapter}: {' '.join(comparison.words)}"[:80], fontsize=9)
    axes.grid(alpha=0.2)
    axes.legend(frameon=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    save(figure, path)
    return True
