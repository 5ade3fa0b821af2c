"""The curves of all runs in one picture: every seed a thin line, their mean a thick one.

A comparison read back from its folder: what was asked, the results so far, and the traces of its runs.

A comparison as a section of the report's page.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from ..contract.upstreams import Metric
from ..errors import AceError
from ..report import page
from ..report.charts import LINES_AT_MOST, Series, line_chart, save
from ..report.runs import newest
from ..report.tables import MINUS, number, plural
from ..report.trace import relative
from .plan import OURS, Comparison, Contents, Trial
from .results import RESULT, Result, Store, curves_of, mean_curve
from .statistics import Answer, change_in_words

PALETTE = ("#4c4c4c", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
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
    for index, (run, found) in enumerate(curves.items()):
        colour = PALETTE[index % len(PALETTE)]
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


@dataclass(frozen=True)
class Found:
    """What a folder of results has."""

    folder: Path
    answer: Answer
    traces: dict[str, Path] = field(default_factory=dict)
    """Of each run the trace of its first seed that has one, by what people call it."""
    missing: list[str] = field(default_factory=list)
    """What a reader should know is not there."""
    directed: bool = True
    """It is known which way the metric counts."""


def is_comparison(folder: Path) -> bool:
    return (folder / OURS).is_file()


def read_comparison(folder: Path) -> Found:
    """The results in a folder, without the script or the adapter that they came from."""
    path = folder / OURS
    expected = "expected what 'ace-patch compare' writes"
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        runs = {str(name): dict(settings) for name, settings in told["runs"].items()}
        seeds = tuple(int(seed) for seed in told["seeds"])
        words = tuple(str(word) for word in told["command"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise AceError(f"{path} cannot be read ({type(error).__name__}: {error}): {expected}; compare again") from None
    if not runs:
        raise AceError(f"{path} names no runs: {expected}; compare again")
    missing: list[str] = []
    metrics = _metrics(told, folder, missing)
    comparison = Comparison(str(told.get("adapter") or ""), words, runs, seeds, metrics, Contents(folder), ".")
    store = Store(folder, comparison)
    finished = store.finished()
    open_ = len(comparison.trials) - len(finished)
    if open_:
        missing.append(f"{open_} of {len(comparison.trials)} runs have no result: they failed, or are still to come")
    traces: dict[str, Path] = {}
    for run in runs:
        for trial in (trial for trial in comparison.trials if trial.run == run):
            trace = _trace(store, trial)
            if trace is not None:
                traces[str(trial)] = trace
                break
    answer = Answer(comparison, list(finished.values()), folder=folder)
    directed = "metrics" in told
    if not directed:
        answer.differences = []  # better and worse could be the other way round
    return Found(folder, answer, traces, missing, directed)


def _trace(store: Store, trial: Trial) -> Path | None:
    """Of its last attempt."""
    attempts = sorted(store.place(trial).glob("work-*/ace-runs"), key=lambda path: path.stat().st_mtime)
    return next((found for attempt in reversed(attempts) if (found := newest(attempt))), None)


def _metrics(told: Mapping[str, Any], folder: Path, missing: list[str]) -> tuple[Metric, ...]:
    """As the folder says; of a folder that does not, those that the results have."""
    try:
        return tuple(Metric(str(each["name"]), "", higher=bool(each["higher"])) for each in told["metrics"])
    except (KeyError, TypeError):
        pass
    for path in sorted(folder.glob(f"*/*/{RESULT}")):
        try:
            names = list(json.loads(path.read_text(encoding="utf-8"))["metrics"])
        except (OSError, ValueError, KeyError, TypeError):
            continue
        missing.append(f"{OURS} does not say which way {names[0]} counts: call 'ace-patch compare' again, and it will")
        return tuple(Metric(str(name), "") for name in names)
    return (Metric("result", ""),)


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
