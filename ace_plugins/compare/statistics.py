"""Statistics of a comparison: mean and spread of each run, and its difference to the first run for each seed."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ..contract.upstreams import Metric
from ..report.tables import MINUS
from .plan import TrialResult


@dataclass(frozen=True)
class Row:
    """One run, summarised over its seeds."""

    run: str
    values: dict[int, float]
    """Value of the first metric for each seed; the keys are seeds."""
    others: dict[str, float]
    """Mean over seeds of each other metric; the keys are names of metrics."""
    time: float | None
    """Time between two evaluations, divided by that of the first run; None if it is unknown."""
    equivariance_error: float | None
    """Relative equivariance error, as a mean over seeds; None if it was not measured."""

    @property
    def mean(self) -> float:
        return _mean(self.values.values())

    @property
    def spread(self) -> float | None:
        """Standard deviation over seeds; None for a single seed, or if a value is not finite."""
        spread = len(self.values) > 1 and all(map(math.isfinite, self.values.values()))
        return statistics.stdev(self.values.values()) if spread else None

    def to_dict(self) -> dict[str, Any]:
        values = {str(seed): value for seed, value in self.values.items()}
        return vars(self) | {"values": values, "mean": self.mean, "spread": self.spread}


@dataclass(frozen=True)
class Difference:
    """Relative change of the first metric from the first run to another run, over the seeds that both have."""

    run: str
    base: str
    changes: tuple[float, ...]
    """Relative change for each seed. Negative means better, also for metrics where higher is better."""
    low: float | None
    """Lower end of the bootstrap interval of the mean change; None for a single seed."""
    high: float | None
    higher: bool = False
    """True if higher values of the metric are better."""

    @property
    def mean(self) -> float:
        return statistics.fmean(self.changes)

    @property
    def better(self) -> int:
        """Number of seeds for which the run is better than the first run."""
        return sum(change < 0 for change in self.changes)

    def to_dict(self) -> dict[str, Any]:
        found = {"run": self.run, "to": self.base, "changes": list(self.changes), "low": self.low, "high": self.high}
        return found | {"mean": self.mean, "better": self.better}

    def sentence(self) -> str:
        """Describe the difference without claiming more than the seeds show."""
        count, finite = len(self.changes), sum(map(math.isfinite, self.changes))
        if finite < count:
            why = f"the results of {count - finite} of {count} seeds are not finite, or 0 for {self.base}"
            return f"{self.run}: no conclusion, because {why}"
        size = self.format(self.mean, sign=False)
        if self.low is None or self.high is None:
            how = f"{'better' if self.mean < 0 else 'worse'} by {size} than" if self.mean else "as good as"
            return f"{self.run} is {how} {self.base} in one seed, and one seed proves nothing"
        if not any(self.changes):
            return f"{self.run} and {self.base} are the same in {count} of {count} seeds"
        if (self.high < 0 and self.better == count) or (self.low > 0 and not self.better):
            least, most = (self.format(end, sign=False) for end in sorted((self.low, self.high), key=abs))
            how = f"{'better' if self.high < 0 else 'worse'} than {self.base} in {count} of {count} seeds"
            return f"{self.run} is {how}, by {size} ({least.removesuffix(' %')} to {most})"
        ends = [self.format(end) for end in (self.low, self.high)]
        return (
            f"no clear difference between {self.run} and {self.base}: better in {self.better} of {count} seeds, "
            f"mean change {self.format(self.mean)} ({' to '.join(reversed(ends) if self.higher else ends)})"
        )

    def format(self, change: float, *, sign: bool = True) -> str:
        """Format a change in percent. Its sign is that of the metric: plus means a higher value."""
        size, value = abs(change), -change if self.higher else change
        text = f"{100 * size:.1f} %" if size < 0.0995 else f"{100 * size:.0f} %"
        return f"{MINUS if value < 0 else '+'}{text}" if sign else text


def summarise(results: Sequence[TrialResult], runs: Sequence[str], metrics: Sequence[Metric]) -> list[Row]:
    """Return a row for each run with at least one finished seed."""
    first, *others = metrics
    by_run = {run: sorted((r for r in results if r.run == run), key=lambda result: result.seed) for run in runs}
    times = {run: _over(statistics.median, (r.seconds_per_evaluation for r in found)) for run, found in by_run.items()}
    base = times[runs[0]]
    return [
        Row(
            run,
            {result.seed: result.metrics[first.name] for result in found},
            {metric.name: _mean([result.metrics[metric.name] for result in found]) for metric in others},
            time / base if (time := times[run]) and base else None,
            _over(statistics.fmean, (result.error for result in found)),
        )
        for run, found in by_run.items()
        if found
    ]


def _mean(values: Collection[float]) -> float:
    return sum(values) / len(values)  # statistics.fmean raises an error for inf and -inf


def _over(average: Callable[[list[float]], float], values: Iterable[float | None]) -> float | None:
    return average(known) if (known := [value for value in values if value is not None]) else None


def compare_runs(rows: Sequence[Row], base: str, metric: Metric) -> list[Difference]:
    """Compare every other run with the run ``base``, over the seeds that both have."""
    before = next((row.values for row in rows if row.run == base), {})
    sign, differences = -1.0 if metric.higher else 1.0, []
    for row in rows:
        pairs = [(value, before[seed]) for seed, value in row.values.items() if seed in before]
        changes = [sign * (new - old) / abs(old) if old else math.nan for new, old in pairs]
        if changes and row.run != base:
            enough = len(changes) > 1 and all(map(math.isfinite, changes))
            low, high = bootstrap_interval(changes) if enough else (None, None)
            differences.append(Difference(row.run, base, tuple(changes), low, high, metric.higher))
    return differences


def bootstrap_interval(changes: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of the mean change, by resampling seeds. The result is reproducible."""
    generator = random.Random(0)
    means = sorted(statistics.fmean(generator.choices(changes, k=len(changes))) for _ in range(10_000))
    return means[250], means[-251]
