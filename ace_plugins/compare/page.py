"""Show a comparison: in the terminal, as a picture of its curves, and as a section of the HTML report."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from markupsafe import Markup

from ..report.charts import LINES_AT_MOST, Series, draw_lines, save_figure
from ..report.page import Chart, render_template
from ..report.tables import format_count
from ..report.terminal import open_console, render_table
from ..report.trace import shorten_path
from .plan import Comparison
from .store import TrialResult

if TYPE_CHECKING:
    from .results import ComparisonResult

PALETTE = ("#4c4c4c", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""Grey for the first run, then colours that colour-blind readers can distinguish (Okabe and Ito)."""

Curve = Sequence[Sequence[float]]


def draw_curves(comparison: Comparison, results: Sequence[TrialResult], path: Path) -> bool:
    """Draw a thin line for each seed and a thick one for each run's mean. Returns False if there are no curves."""
    metric = comparison.metrics[0]
    curves = {run: _select_curves(results, run, metric.name) for run in comparison.runs}
    values = sorted(value for run in curves.values() for curve in run for _, value in curve if math.isfinite(value))
    if not any(curves.values()):
        return False
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator

    figure = Figure(figsize=(7, 4.2), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for index, (run, seeds) in enumerate(curves.items()):
        colour = PALETTE[index % len(PALETTE)]
        for curve in seeds:
            axes.plot(range(1, len(curve) + 1), [value for _, value in curve], color=colour, alpha=0.35, linewidth=0.8)
        if seeds:
            mean, label = _mean_curve(seeds), f"{run} ({format_count(len(seeds), 'seed')})"
            axes.plot(range(1, len(mean) + 1), mean, color=colour, linewidth=2, label=label)
    if values and values[0] > 0 and values[-1] > 5 * values[0]:
        axes.set_yscale("log")
        plain = FuncFormatter(lambda value, _: f"{value:g}")
        axes.yaxis.set_major_formatter(plain)
        axes.yaxis.set_minor_locator(LogLocator(subs=(2, 5)))
        axes.yaxis.set_minor_formatter(plain)
        # The largest 2 % are cut off, so that a few diverged evaluations do not flatten the other curves.
        axes.set_ylim(0.9 * values[0], 1.1 * values[min(len(values) - 1, int(0.98 * len(values)))])
    axes.set(xlabel="evaluation", ylabel=metric.name)
    axes.set_title(f"{comparison.adapter}: {' '.join(comparison.words)}"[:80], fontsize=9)
    axes.grid(alpha=0.2)
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    save_figure(figure, path)
    return True


def _select_curves(results: Sequence[TrialResult], run: str, metric: str) -> list[Curve]:
    """Return a run's curves, one per seed, without curves of fewer than two points."""
    curves = [result.curves.get(metric, []) for result in results if result.run == run]
    return [curve for curve in curves if len(curve) > 1]


def _mean_curve(curves: Sequence[Curve]) -> list[float]:
    """Return the mean over seeds at each evaluation, up to the end of the shortest curve."""
    return [sum(point[1] for point in points) / len(curves) for points in zip(*curves, strict=False)]


def print_comparison(result: ComparisonResult) -> None:
    """Print the table and the sentences of a comparison."""
    console = open_console()
    if result.rows:
        console.print(render_table(result.table()))
        console.print(result.caption, markup=False)
    for sentence in result.sentences:
        console.print(sentence, markup=False)


def render_comparison(result: ComparisonResult) -> Markup:
    """Render a comparison as a section of the report's page."""
    comparison = result.comparison
    settings = [
        (f"run {name}", "; ".join(f"{key} = {value}" for key, value in settings.items()))
        for name, settings in comparison.runs.items()
    ]
    return render_template(
        Path(__file__).parent / "templates" / "comparison.html",
        heading=f"{comparison.adapter}: {', '.join(comparison.runs)}",
        folder=shorten_path(result.folder),
        missing=result.missing,
        sentences=result.sentences,
        table=result.table(by_seed=True) if result.rows else None,
        caption=result.caption,
        charts=_draw_charts(result),
        properties=[
            ("adapter", comparison.adapter),
            ("command", shlex.join(comparison.words)),
            ("seeds", ", ".join(map(str, comparison.seeds))),
            *settings,
        ],
    )


def _draw_charts(result: ComparisonResult) -> list[Chart]:
    """Draw one chart per metric, which shows the mean over seeds at each evaluation."""
    charts = []
    for metric in result.comparison.metrics:
        series = []
        for run in result.comparison.runs:
            curves = _select_curves(result.results, run, metric.name)
            if curves and any(map(math.isfinite, mean := _mean_curve(curves))):
                series.append(Series(run, [(float(n), value) for n, value in enumerate(mean, 1)], noisy=True))
        if series and len(series) <= LINES_AT_MOST:
            svg = draw_lines(metric.name, series, unit="evaluation")
            charts.append(Chart(metric.name, "mean over seeds", svg))
    return charts
