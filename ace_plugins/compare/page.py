"""Show a comparison: in the terminal, and as a section of the HTML report."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from markupsafe import Markup

from ..report.charts import LINES_AT_MOST, Series, draw_lines
from ..report.page import Chart, render_template
from ..report.terminal import open_console, render_table
from ..report.trace import shorten_path
from .plan import TrialResult

if TYPE_CHECKING:
    from .results import ComparisonResult

Curve = Sequence[Sequence[float]]


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
