"""A comparison read back from its folder: what was asked, the results so far, and the traces of its runs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..contract.upstreams import Metric
from ..errors import AceError
from ..report.runs import newest
from .answer import Answer
from .plan import Comparison, Trial
from .results import RESULT, Store
from .workspace import OURS, Contents


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
