"""The result folder of a comparison: logs and results of its trials."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from ..output import publish
from .plan import DESCRIPTION, Comparison, Trial

FOLDER = Path(".ace/compare")
RESULT, LOG = "result.json", "log.txt"


@dataclass(frozen=True)
class TrialResult:
    """Outcome of a trial that ended successfully."""

    run: str
    seed: int
    metrics: dict[str, float]
    curves: dict[str, list[list[float]]] = field(default_factory=dict)
    """Mapping from each metric to its evaluations, each as [seconds since the start, value]."""
    seconds: float = 0.0
    """Duration of the trial in seconds."""
    error: float | None = None
    """Last measured relative equivariance error of the deployed model."""

    @property
    def seconds_per_evaluation(self) -> float | None:
        """Median number of seconds between two evaluations, or None with fewer than three evaluations."""
        times = [point[0] for point in max(self.curves.values(), key=len, default=[])]
        gaps = sorted(after - before for before, after in pairwise(times))
        return gaps[len(gaps) // 2] if len(gaps) > 1 else None


class Store:
    """Reads and writes the result folder of one comparison."""

    def __init__(self, comparison: Comparison, folder: str | os.PathLike[str] | None = None) -> None:
        self.comparison = comparison
        self.folder = Path(folder or FOLDER / f"{comparison.adapter}-{comparison.fingerprint()}").absolute()

    def trial_folder(self, trial: Trial) -> Path:
        return self.folder / f"{trial.run}-{self.comparison.settings_key(trial)}" / f"seed-{trial.seed}"

    def load(self) -> dict[Trial, TrialResult]:
        """Return the results of all finished trials."""
        loaded = {trial: self._load(trial) for trial in self.comparison.trials}
        return {trial: result for trial, result in loaded.items() if result is not None}

    def _load(self, trial: Trial) -> TrialResult | None:
        try:
            result = TrialResult(**json.loads((self.trial_folder(trial) / RESULT).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None
        return result if {metric.name for metric in self.comparison.metrics} <= result.metrics.keys() else None

    def save(self, trial: Trial, result: TrialResult) -> None:
        publish(self.trial_folder(trial) / RESULT, _encode(vars(result)))

    def describe(self, threads: int) -> int:
        """Write the description of the comparison.

        Returns the number of threads per trial. It stays that of the first call, since it affects floating-point sums.
        """
        path = self.folder / DESCRIPTION
        try:
            described: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            described = {"threads": threads}
        described |= {
            "adapter": self.comparison.adapter,
            "command": list(self.comparison.words),
            "runs": {name: dict(settings) for name, settings in self.comparison.runs.items()},
            "seeds": list(self.comparison.seeds),
            "metrics": [{"name": metric.name, "higher": metric.higher} for metric in self.comparison.metrics],
        }
        self.folder.mkdir(parents=True, exist_ok=True)
        publish(path, _encode(described))
        return int(described["threads"])


def _encode(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, indent=1) + "\n").encode()
