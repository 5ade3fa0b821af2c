"""A comparison as a section of the report's page."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from html import escape
from typing import Any

from ..report import page
from ..report.lines import LINES_AT_MOST, Series, line_chart
from ..report.trace import relative
from ..report.words import MINUS, number
from .answer import Answer, change_in_words
from .reading import Found
from .results import curves_of, mean_curve


def comparison_section(found: Found) -> str:
    answer = found.answer
    comparison = answer.comparison
    parts = [
        page.bullets(found.missing, "missing"),
        *(page.paragraph(sentence, "whole") for sentence in answer.sentences()),
        _table(answer, found.directed) if answer.rows else page.paragraph("No run has finished yet."),
        page.charts(_curves(answer)),
        page.subheading("What was compared"),
        page.about(
            [
                ("adapter", comparison.adapter, False),
                ("command", shlex.join(comparison.words), True),
                ("seeds", ", ".join(map(str, comparison.seeds)), False),
                *((f"run {name}", _settings(settings), False) for name, settings in comparison.runs.items()),
            ]
        ),
    ]
    heading = f"{comparison.adapter}: {', '.join(comparison.runs)}"
    return page.section(heading, relative(found.folder), parts, alone=True)


def _settings(settings: Mapping[str, Any]) -> str:
    return "; ".join(f"{key} = {value}" for key, value in settings.items())


def _table(answer: Answer, directed: bool) -> str:
    first, *others = answer.comparison.metrics
    seeds = [f" seed {seed}" for seed in answer.comparison.seeds]
    timed = any(row.seconds for row in answer.rows)
    measured = any(row.error is not None for row in answer.rows)
    changes = {difference.run: difference for difference in answer.differences}
    columns = ["run", first.name, "change", *seeds, *(metric.name for metric in others)]
    columns += ["time"] * timed + ["equivariance error"] * measured
    rows = []
    for row in answer.rows:
        spread = "" if row.spread is None else f" ± {number(row.spread, 2)}"
        cells = [
            row.run,
            f"{number(row.mean)}{spread}",
            change_in_words(changes[row.run]).replace("-", MINUS) if row.run in changes else "",
        ]
        cells += [number(row.values[seed]) if seed in row.values else "" for seed in answer.comparison.seeds]
        cells += [number(row.others[metric.name]) for metric in others]
        if timed:
            cells.append("" if row.seconds is None else f"× {row.seconds:.2f}")
        if measured:
            cells.append("" if row.error is None else number(row.error, 2))
        rows.append([escape(cell) for cell in cells])
    better = f", {'higher' if first.higher else 'lower'} is better" if directed else ""
    told = f"{first.name}: mean and standard deviation over seeds, the change seed by seed{better}."
    return page.table(columns, rows, numbers=columns[1:]) + page.paragraph(told, "under")


def _curves(answer: Answer) -> list[str]:
    """Every metric's mean over seeds, evaluation by evaluation."""
    made = []
    for metric in answer.comparison.metrics:
        series = []
        for run in answer.comparison.runs:
            curves = curves_of(answer.results, run, metric.name)
            if curves:
                points = [(float(number), mean) for number, mean in enumerate(mean_curve(curves), 1)]
                series.append(Series(run, points, noisy=True))
        drawable = [each for each in series if any(math.isfinite(value) for _, value in each.points)]
        if drawable and len(drawable) <= LINES_AT_MOST:
            chart = line_chart(metric.name, drawable, across="evaluation")
            made.append(page.figure(metric.name, "mean over seeds", chart))
    return made
