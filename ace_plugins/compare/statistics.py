"""What the seeds show, and no more: means and spreads, differences seed by seed, and a sentence.

The answer to "does it pay, here?": a table, sentences, and the same for machines.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..contract.upstreams import Metric
from .plan import Comparison
from .results import Result

if TYPE_CHECKING:
    from rich.table import Table


RESAMPLES = 10_000
COVERED = 0.95


@dataclass(frozen=True)
class Row:
    """One run over its seeds."""

    run: str
    values: dict[int, float]
    """Of the metric that counts, by seed."""
    others: dict[str, float]
    """The mean of every other metric."""
    seconds: float | None
    """Of an evaluation's length of training, as a ratio to the first run's; None where there is nothing to divide."""
    error: float | None
    """The mean relative equivariance error, where it was measured."""

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values.values())

    @property
    def spread(self) -> float | None:
        """The standard deviation over seeds; one seed has none."""
        return statistics.stdev(self.values.values()) if len(self.values) > 1 else None


@dataclass(frozen=True)
class Difference:
    """A run beside the first one, on the seeds that both have."""

    run: str
    base: str
    changes: tuple[float, ...]
    """Relative, seed by seed: below 0 is better, whichever way the metric counts."""
    low: float | None
    high: float | None
    """Of the mean change, by bootstrap over seeds; None for a single seed."""
    proportional: bool = True
    """Whether changes are shares of the first run's value; where that is 0 they are plain differences."""
    higher: bool = False
    """Higher is better, of the metric itself."""

    @property
    def mean(self) -> float:
        return statistics.fmean(self.changes)

    @property
    def better(self) -> int:
        return sum(change < 0 for change in self.changes)

    def sentence(self) -> str:
        """One that does not claim more than the seeds show."""
        count = len(self.changes)
        if not all(map(math.isfinite, self.changes)):
            bad = sum(not math.isfinite(change) for change in self.changes)
            return f"{self.run}: in {bad} of {count} seeds a result is not a finite number, so nothing can be said"
        size = self._told(abs(self.mean))
        if count == 1:
            how = f"{'better' if self.mean < 0 else 'worse'} by {size} than" if self.mean else "as good as"
            return f"{self.run} is {how} {self.base} in one seed, and one seed proves nothing"
        if not any(self.changes):
            return f"{self.run} and {self.base} are the same in {count} of {count} seeds"
        assert self.low is not None
        assert self.high is not None
        ends = sorted((abs(self.low), abs(self.high)))
        within = f"({self._told(ends[0], unit=False)} to {self._told(ends[1])})"
        if self.high < 0 and self.better == count:
            return f"{self.run} is better than {self.base} in {count} of {count} seeds, by {size} {within}"
        if self.low > 0 and not self.better:
            return f"{self.run} is worse than {self.base} in {count} of {count} seeds, by {size} {within}"
        low, high = sorted(map(self.of_metric, (self.low, self.high)))
        signed = f"{self._signed(self.of_metric(self.mean))} ({self._signed(low)} to {self._signed(high)})"
        return (
            f"{self.run} and {self.base} cannot be told apart: better in {self.better} of {count} seeds, "
            f"mean change {signed}"
        )

    def of_metric(self, change: float) -> float:
        """The change as the metric itself shows it."""
        return -change if self.higher else change

    def _told(self, value: float, *, unit: bool = True) -> str:
        if not self.proportional:
            return f"{value:.3g}"
        text = f"{100 * value:.1f}" if value < 0.0995 else f"{100 * value:.0f}"
        return f"{text} %" if unit else text

    def _signed(self, value: float) -> str:
        return ("-" if value < 0 else "+") + self._told(abs(value))


def rows(results: Sequence[Result], runs: Sequence[str], metrics: Sequence[Metric]) -> list[Row]:
    """One for each run that has finished a seed."""
    first, *more = metrics
    found = []
    pace = {run: _pace([r for r in results if r.run == run]) for run in runs}
    for run in runs:
        of_run = [result for result in results if result.run == run]
        if not of_run:
            continue
        others = {m.name: statistics.fmean(result.metrics[m.name] for result in of_run) for m in more}
        errors = [result.error for result in of_run if result.error is not None]
        base, own = pace[runs[0]], pace[run]
        ratio = own / base if own and base else None
        values = {result.seed: result.metrics[first.name] for result in sorted(of_run, key=lambda r: r.seed)}
        found.append(Row(run, values, others, ratio, statistics.fmean(errors) if errors else None))
    return found


def _pace(results: Sequence[Result]) -> float | None:
    gaps = [gap for result in results if (gap := result.seconds_per_evaluation)]
    return statistics.median(gaps) if gaps else None


def differences(found: Sequence[Row], runs: Sequence[str], metric: Metric) -> list[Difference]:
    """Every run beside the first, where they have seeds in common."""
    by_name: Mapping[str, Row] = {row.run: row for row in found}
    base = by_name.get(runs[0])
    if base is None:
        return []
    made = []
    for row in found:
        shared = [seed for seed in row.values if seed in base.values] if row is not base else []
        if not shared:
            continue
        pairs = [(row.values[seed], base.values[seed]) for seed in shared]
        sign = -1.0 if metric.higher else 1.0
        proportional = all(other for _, other in pairs)
        changes = [sign * (own - other) / (abs(other) if proportional else 1.0) for own, other in pairs]
        low, high = interval(changes) if len(changes) > 1 and all(map(math.isfinite, changes)) else (None, None)
        made.append(Difference(row.run, base.run, tuple(changes), low, high, proportional, metric.higher))
    return made


def interval(changes: Sequence[float]) -> tuple[float, float]:
    """Where the mean lies in most of many draws with replacement. The same draws every time."""
    generator = random.Random(0)
    means = sorted(statistics.fmean(generator.choices(changes, k=len(changes))) for _ in range(RESAMPLES))
    outside = round((1 - COVERED) / 2 * RESAMPLES)
    return means[outside], means[-1 - outside]


class Answer:
    """What the results so far say."""

    def __init__(
        self,
        comparison: Comparison,
        results: Sequence[Result],
        failed: Mapping[str, str] | None = None,
        *,
        folder: Path = Path(),
        picture: Path | None = None,
    ) -> None:
        self.folder = folder
        """Where the results are."""
        self.picture = picture
        self.comparison = comparison
        self.results = list(results)
        self.failed = dict(failed or {})
        runs = list(comparison.runs)
        self.rows: list[Row] = rows(results, runs, comparison.metrics)
        self.differences: list[Difference] = differences(self.rows, runs, comparison.metrics[0])

    def sentences(self) -> list[str]:
        told = [difference.sentence() + "." for difference in self.differences]
        if self.failed:
            told.append(f"{len(self.failed)} of {len(self.comparison.trials)} runs failed and are not in the table.")
        return told

    def table(self) -> Table:
        from rich import box
        from rich.table import Table

        first, *others = self.comparison.metrics
        made = Table(box=box.SIMPLE_HEAD, caption_justify="left")
        better = "higher" if first.higher else "lower"
        made.caption = f"{first.name}: mean and standard deviation over seeds, {better} is better."
        made.add_column("run", no_wrap=True)
        made.add_column("seeds", justify="right")
        made.add_column(first.name, justify="right")
        for metric in others:
            made.add_column(metric.name, justify="right")
        made.add_column("change", justify="right")
        timed = any(row.seconds for row in self.rows)
        measured = any(row.error is not None for row in self.rows)
        if timed:
            made.add_column("time", justify="right")
        if measured:
            made.add_column("equiv.\nerror", justify="right")
        paper = self.comparison.about.get("paper", {})
        if paper:
            made.add_column("paper", justify="right")
        changes = {difference.run: difference for difference in self.differences}
        for row in self.rows:
            spread = "" if row.spread is None else f" ± {row.spread:.2g}"
            cells = [row.run, str(len(row.values)), f"{row.mean:.4g}{spread}"]
            cells += [f"{row.others[metric.name]:.4g}" for metric in others]
            cells.append(change_in_words(changes[row.run]) if row.run in changes else "")
            if timed:
                cells.append("" if row.seconds is None else f"x {row.seconds:.2f}")
            if measured:
                cells.append("" if row.error is None else f"{row.error:.2g}")
            if paper:
                cells.append(str(paper.get(row.run, "")))
            made.add_row(*cells)
        return made

    def to_dict(self) -> dict[str, Any]:
        return {
            "adapter": self.comparison.adapter,
            "command": list(self.comparison.words),
            "metrics": [{"name": m.name, "higher": m.higher} for m in self.comparison.metrics],
            "runs": [
                {
                    "run": row.run,
                    "settings": dict(self.comparison.runs[row.run]),
                    "values": {str(seed): value for seed, value in row.values.items()},
                    "mean": row.mean,
                    "spread": row.spread,
                    "others": row.others,
                    "time": row.seconds,
                    "equivariance_error": row.error,
                }
                for row in self.rows
            ],
            "differences": [
                {
                    "run": each.run,
                    "to": each.base,
                    "changes": list(each.changes),
                    "mean": each.mean,
                    "low": each.low,
                    "high": each.high,
                    "better": each.better,
                }
                for each in self.differences
            ],
            "sentences": self.sentences(),
            "failed": self.failed,
            "folder": str(self.folder),
            "picture": None if self.picture is None else str(self.picture),
        }


def change_in_words(difference: Difference) -> str:
    mean = difference.of_metric(difference.mean)
    return f"{100 * mean:+.1f} %" if difference.proportional else f"{mean:+.3g}"
