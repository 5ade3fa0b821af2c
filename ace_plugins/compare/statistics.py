"""Statistics of a comparison: mean and spread of each run, and its difference to the first run for each seed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ..contract.upstreams import Metric
from ..report.tables import MINUS
from ..statistics import t_interval
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
    mean: float
    """Mean change: the geometric mean of the ratios, minus 1."""
    low: float | None
    """Lower end of the 95 % interval of the mean change; None for a single seed."""
    high: float | None
    higher: bool = False
    """True if higher values of the metric are better."""

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
            bad = f"{count - finite} of {count} seeds"
            return f"{self.run}: no conclusion, because the results of {bad} are not finite numbers above 0"
        if not any(self.changes):
            return f"{self.run} and {self.base} have the same results in {count} of {count} seeds"
        size = self.format(self.mean, sign=False)
        how = f"{'better' if self.mean < 0 else 'worse'} than {self.base} by {size}"
        if self.low is None or self.high is None:
            seeds = "one seed" if count == 1 else f"{count} seeds with the same results"
            return f"{self.run} is {how} in {seeds}, which proves nothing"
        signed = not (self.high < 0 or self.low > 0)
        ends = sorted((self.low, self.high), key=lambda end: (-end if self.higher else end) if signed else abs(end))
        interval = " to ".join(self.format(end, sign=signed) for end in ends)
        seeds = f"(95 % interval {interval}; better in {self.better} of {count} seeds)"
        if signed:
            return f"{self.run} and {self.base} cannot be told apart: mean change {self.format(self.mean)} {seeds}"
        return f"{self.run} is {how} {seeds}"

    def format(self, change: float, *, sign: bool = True) -> str:
        """Format a change in percent. Its sign is that of the metric: plus means a higher value."""
        size, value = abs(change), -change if self.higher else change
        text = f"{100 * size:{'.1f' if size < 0.0995 else '.0f' if size < 100 else '.0e'}} %"
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
    sign, differences = -1 if metric.higher else 1, []
    for row in rows:
        pairs = [(value, before[seed]) for seed, value in row.values.items() if seed in before]
        if not pairs or row.run == base:
            continue
        logs = [_log_ratio(*pair) for pair in pairs]
        changes = [sign * math.expm1(min(log, MOST)) for log in [*logs, _mean(logs)]]
        low = high = None
        # Results that are the same for every seed are not independent: the script does not use its seed.
        if len(set(pairs)) > 1 and all(map(math.isfinite, logs)):
            low, high = sorted(sign * math.expm1(min(end, MOST)) for end in t_interval(logs))
        differences.append(Difference(row.run, base, tuple(changes[:-1]), changes[-1], low, high, metric.higher))
    return differences


def _log_ratio(new: float, old: float) -> float:
    """Return the logarithm of new / old, or nan unless both are finite and above 0."""
    return math.log(new) - math.log(old) if min(new, old) > 0 and max(new, old) < math.inf else math.nan


MOST = 700.0  # largest logarithm of a ratio; exp overflows at 710
