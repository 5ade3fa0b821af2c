"""The outcome of a comparison, and how the terminal and the HTML report show it."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from markupsafe import Markup

from ..contract.upstreams import Metric
from ..errors import AceError
from ..output import printable
from ..report.charts import LINES_AT_MOST, Series, draw_lines
from ..report.page import Chart, render_template
from ..report.tables import TableData, format_number
from ..report.terminal import open_console, render_table
from ..report.trace import find_newest, shorten_path, to_json
from .plan import DESCRIPTION, Comparison, Store, TrialResult, find_arm
from .statistics import Difference, Row, compare_runs, summarise


@dataclass(frozen=True)
class ComparisonResult:
    """Outcome of a comparison, which `run_comparison` returns."""

    comparison: Comparison
    """The script, runs, seeds and metrics that were compared."""
    results: Sequence[TrialResult]
    """Metrics and curves of each finished trial (one run with one seed)."""
    failed: Mapping[str, str] = field(default_factory=dict)
    """Mapping from the name of each failed trial, such as "strict seed 2", to its error message."""
    folder: Path = Path()
    """Folder of the results, with a log per trial."""
    search: ComparisonResult | None = None
    """Outcome of the trials from which the points of the grid were picked; None without a grid."""

    @cached_property
    def rows(self) -> list[Row]:
        """One row per run: the value for each seed, mean, spread, time ratio and equivariance error."""
        return summarise(self.results, list(self.comparison.runs), self.comparison.metrics)

    @cached_property
    def differences(self) -> list[Difference]:
        """Difference between each other run and the first run, with a 95 % interval."""
        return compare_runs(self.rows, next(iter(self.comparison.runs)), self.comparison.metrics[0])

    @property
    def sentences(self) -> list[str]:
        """The conclusions in words: one sentence per run compared with the first run, with caveats on both results."""
        notes, found = {run: f"{run} {' and '.join(each)}" for run, each in self.notes.items()}, list[str]()
        for each in self.differences:
            limits = ", and ".join(notes[run] for run in (each.base, each.run) if run in notes)
            found.append(f"{each.sentence()}. But {limits}." if limits else f"{each.sentence()}.")
        named = {run for each in self.differences for run in (each.base, each.run)}
        return [*found, *(f"{note}." for run, note in notes.items() if run not in named)]

    @cached_property
    def notes(self) -> dict[str, list[str]]:
        """Caveats on each run's results: missing seeds, a strict run that did not land, or one that ended early."""
        found, results = dict[str, dict[str, list[str]]](), {(each.run, each.seed): each for each in self.results}
        for trial in self.comparison.trials:
            result = results.get((trial.run, trial.seed))
            for note in ["has no result"] if result is None else result.notes:
                found.setdefault(trial.run, {}).setdefault(note, []).append(str(trial.seed))
        return {run: [f"{note} (seed {', '.join(each[note])})" for note in each] for run, each in found.items()}

    def grid_table(self) -> TableData | None:
        """Return the table of the grid; None without a grid."""
        if (search := self.search) is None:
            return None
        name, values = search.comparison.metrics[0].name, {row.run: row.mean for row in search.rows}
        notes = {
            run: ["picked"] * (run in self.comparison.runs) + search.notes.get(run, [])
            for run in search.comparison.runs
        }
        rows = [(run, _format(values.get(run)), "; ".join(found)) for run, found in notes.items()]
        return TableData(["grid", name, ""], rows, numbers=[name])

    def traces(self) -> dict[str, Path]:
        """Return a mapping from trial names to trace folders, with one trial of each run: the first with a trace."""
        store, traces = Store(self.comparison, self.folder), dict[str, tuple[str, Path]]()
        for trial in self.comparison.trials:
            for attempt in store.trial_folder(trial).glob("work-*/ace-runs"):
                if trace := find_newest(attempt):
                    traces.setdefault(trial.run, (str(trial), trace))
        return dict(traces.values())

    def table(self, *, by_seed: bool = False) -> TableData:
        """Return the table, optionally with a column for each seed. ``print(result.table())`` prints the table."""
        first, *others = self.comparison.metrics
        rows, paper = self.rows, self.comparison.about.get("paper", {})
        changes = {difference.run: difference.format(difference.mean) for difference in self.differences}
        spreads = ["" if row.spread is None else f" ± {format_number(row.spread, 2)}" for row in rows]
        columns = [
            ("run", [row.run for row in rows]),
            ("seeds", [str(len(row.values)) for row in rows]),
            (first.name, [format_number(row.mean) + spread for row, spread in zip(rows, spreads, strict=True)]),
            ("change", [changes.get(row.run, "") for row in rows]),
            *((f"seed {n}", [_format(row.values.get(n)) for row in rows]) for n in self.comparison.seeds if by_seed),
            *((metric.name, [format_number(row.others[metric.name]) for row in rows]) for metric in others),
            ("time", ["" if row.time is None else f"× {row.time:.2f}" for row in rows]),
            ("equiv. error", [_format(row.equivariance_error, 2) for row in rows]),
            ("paper", [str(paper.get(find_arm(row.run), "")) for row in rows]),
            ("notes", ["; ".join(self.notes.get(row.run, ())) for row in rows]),
        ]
        headers, cells = zip(*((name, each) for name, each in columns if any(each) or name == "change"), strict=True)
        seeds = [header for header in headers if header.startswith("seed ")]
        numbers = [header for header in headers[1:] if header != "notes"]
        return TableData(headers, list(zip(*cells, strict=True)), numbers=numbers, optional=seeds)

    @property
    def caption(self) -> str:
        """Explanation of the table."""
        metric = self.comparison.metrics[0]
        better = "higher" if metric.higher else "lower"
        return f"{metric.name}: mean and standard deviation over seeds, {better} is better."

    def to_dict(self) -> dict[str, Any]:
        """Return the outcome as JSON-compatible data, as printed by ``ace-patch compare --json``.

        JSON has no nan and no infinity: None replaces them.
        """
        found = {
            "adapter": self.comparison.adapter,
            "command": list(self.comparison.words),
            "metrics": [{"name": m.name, "higher": m.higher} for m in self.comparison.metrics],
            "runs": [
                row.to_dict()
                | {"settings": dict(self.comparison.runs[row.run]), "options": self.comparison.options(row.run)}
                for row in self.rows
            ],
            "differences": [difference.to_dict() for difference in self.differences],
            "sentences": self.sentences,
            "notes": self.notes,
            "grid": self.search and self.search.to_dict(),
            "failed": dict(self.failed),
            "folder": str(self.folder),
            "label": self.comparison.label,
        }
        return {key: to_json(value) for key, value in found.items()}


def _format(value: float | None, digits: int = 4) -> str:
    return "" if value is None else format_number(value, digits)


def is_comparison(folder: Path) -> bool:
    """Return True if the folder holds results of a comparison."""
    return (folder / DESCRIPTION).is_file()


def read_comparison(folder: Path) -> ComparisonResult:
    """Read the results in a folder. Neither the script nor the adapter is needed."""
    path = folder / DESCRIPTION
    try:
        described = json.loads(path.read_text(encoding="utf-8"))
        metrics = tuple(Metric(each["name"], "", higher=each["higher"]) for each in described["metrics"])
        runs = {name: dict(settings) for name, settings in described["runs"].items()}
        if not (runs and metrics):
            raise ValueError("no runs or no metrics")
        words, seeds = tuple(described["command"]), tuple(described["seeds"])
        inputs = dict(described.get("inputs", {}))
        points = dict(described.get("points", {}))
        comparison = Comparison(described["adapter"], words, runs, seeds, metrics, inputs=inputs, points=points)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise AceError(f"{path} is invalid ({type(error).__name__}: {error}): run 'ace-patch compare' again") from None
    results = [(each, list(Store(each, folder).load().values())) for each in (comparison, comparison.search) if each]
    result, *search = [ComparisonResult(each, found, folder=folder) for each, found in results]
    return replace(result, search=search[0]) if search else result


def print_comparison(result: ComparisonResult) -> None:
    """Print the table and the sentences of a comparison."""
    console = open_console()
    if result.rows:
        console.print(render_table(result.table()))
        console.print(printable(result.caption), markup=False)
    if grid := result.grid_table():
        console.print(render_table(grid))
    console.print(*map(printable, result.sentences), sep="\n", markup=False)


def render_comparison(result: ComparisonResult) -> Markup:
    """Render a comparison as a section of the HTML report."""
    comparison = result.comparison
    properties = [
        ("adapter", comparison.adapter),
        ("command", shlex.join(comparison.words)),
        ("seeds", ", ".join(map(str, comparison.seeds))),
        *((f"run {n}", "; ".join(f"{key} = {v}" for key, v in s.items())) for n, s in comparison.runs.items()),
    ]
    return render_template(
        Path(__file__).parent / "templates" / "comparison.html",
        heading=f"{comparison.adapter}: {', '.join(comparison.runs)}",
        folder=shorten_path(result.folder),
        sentences=result.sentences,
        table=result.table(by_seed=True) if result.rows else None,
        caption=result.caption,
        grid=result.grid_table(),
        charts=_draw_charts(result),
        properties=properties,
    )


def _draw_charts(result: ComparisonResult) -> list[Chart]:
    """Draw a chart for each metric: the mean over seeds at each evaluation, up to the end of the shortest curve."""
    charts = []
    for metric in result.comparison.metrics:
        series = []
        for run in result.comparison.runs:
            curves = [trial.curves.get(metric.name, []) for trial in result.results if trial.run == run]
            values = zip(*([value for _, value in curve] for curve in curves if len(curve) > 1), strict=False)
            mean = [(float(n), sum(at) / len(at)) for n, at in enumerate(values, 1)]
            if any(math.isfinite(value) for _, value in mean):
                series.append(Series(run, mean, noisy=True))
        if series and len(series) <= LINES_AT_MOST:
            charts.append(Chart(metric.name, "mean over seeds", draw_lines(metric.name, series, unit="evaluation")))
    return charts
