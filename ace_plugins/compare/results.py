"""What a trial leaves on the disk: its log while it runs, and its result once it has ended well."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from ..output import publish
from .plan import OURS, Comparison, Trial

RESULT, LOG = "result.json", "log.txt"


@dataclass(frozen=True)
class Result:
    """A trial that has ended well."""

    run: str
    seed: int
    metrics: dict[str, float]
    curves: dict[str, list[list[float]]] = field(default_factory=dict)
    """(seconds, value) of every evaluation."""
    seconds: float = 0.0
    error: float | None = None
    """The relative equivariance error of the deployed model, the last that was measured."""

    @property
    def seconds_per_evaluation(self) -> float | None:
        """Between two evaluations, in the middle of all; None if there were fewer than three."""
        times = [point[0] for point in max(self.curves.values(), key=len, default=[])]
        gaps = sorted(after - before for before, after in pairwise(times))
        return gaps[len(gaps) // 2] if len(gaps) > 1 else None


def curves_of(results: Sequence[Result], run: str, metric: str) -> list[list[list[float]]]:
    """The curve of every seed of a run that has more than a point of it."""
    curves = [result.curves.get(metric, []) for result in results if result.run == run]
    return [curve for curve in curves if len(curve) > 1]


def mean_curve(curves: Sequence[Sequence[Sequence[float]]]) -> list[float]:
    """Their mean, evaluation by evaluation, as far as all of them go."""
    return [sum(curve[i][1] for curve in curves) / len(curves) for i in range(min(map(len, curves)))]


class Store:
    """The folder of one comparison."""

    def __init__(self, folder: Path, comparison: Comparison) -> None:
        self.folder = folder
        self.comparison = comparison

    def place(self, trial: Trial) -> Path:
        return self.folder / f"{trial.run}-{self.comparison.settings_key(trial)}" / f"seed-{trial.seed}"

    def finished(self) -> dict[Trial, Result]:
        """What need not be run again."""
        found = {trial: self._read(trial) for trial in self.comparison.trials}
        return {trial: result for trial, result in found.items() if result is not None}

    def _read(self, trial: Trial) -> Result | None:
        try:
            told = json.loads((self.place(trial) / RESULT).read_text(encoding="utf-8"))
            result = Result(**told)
        except (OSError, ValueError, TypeError):
            return None
        wanted = {metric.name for metric in self.comparison.metrics}
        return result if wanted <= result.metrics.keys() else None

    def keep(self, trial: Trial, result: Result) -> None:
        publish(self.place(trial) / RESULT, (json.dumps(vars(result), indent=1) + "\n").encode())

    def describe(self, threads: int) -> dict[str, Any]:
        """What was asked, for people; and the threads of a run, which decide the order of sums: the first call's."""
        path = self.folder / OURS
        try:
            told: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            told = {"threads": threads}
        comparison = self.comparison
        told |= {
            "adapter": comparison.adapter,
            "command": list(comparison.words),
            "runs": {name: dict(settings) for name, settings in comparison.runs.items()},
            "seeds": list(comparison.seeds),
            "metrics": [{"name": metric.name, "higher": metric.higher} for metric in comparison.metrics],
        }
        self.folder.mkdir(parents=True, exist_ok=True)
        publish(path, (json.dumps(told, indent=1) + "\n").encode())
        return told
