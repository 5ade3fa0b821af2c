"""One trial: a process of its own, in a folder of its own, read line by line."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..contract.upstreams import Metric
from ..errors import AceError
from ..run.request import SHIFT
from ..settings.sources import VARIABLES, option
from .metrics import Reading
from .plan import Comparison, Trial
from .results import LOG, Result

Told = Callable[[Reading], None]


@dataclass(frozen=True)
class Task:
    """All that a process needs to know to be this trial; it travels to other machines."""

    trial: Trial
    adapter: str
    command: tuple[str, ...]
    settings: Mapping[str, Any]
    metrics: tuple[Metric, ...]
    below: str
    shift: int | None
    threads: int

    @classmethod
    def of(cls, comparison: Comparison, trial: Trial, threads: int) -> Task:
        return cls(
            trial,
            comparison.adapter,
            tuple(comparison.command(trial)),
            comparison.runs[trial.run],
            comparison.metrics,
            comparison.below,
            comparison.shift(trial),
            threads,
        )

    def words(self) -> list[str]:
        """``ace-patch run`` with this run's settings and the script's own command."""
        return [sys.executable, "-m", "ace_plugins", "run", self.adapter, *_options(self.settings), "--", *self.command]

    def environment(self, traces: Path, device: str | None) -> dict[str, str]:
        """The user's own, without settings of ACE that would reach all runs, and with its share of the machine."""
        kept = {name: value for name, value in os.environ.items() if name not in VARIABLES and name != SHIFT}
        kept |= {"OMP_NUM_THREADS": str(self.threads), "PYTHONUNBUFFERED": "1", "ACE_RUNS": str(traces)}
        if self.shift is not None:
            kept[SHIFT] = str(self.shift)
        if device is not None:
            kept["CUDA_VISIBLE_DEVICES"] = device
        return kept


class Failed(AceError):
    """A trial that ended badly; the message has the end of its log."""


class Stopped(Exception):
    """A trial that was stopped with all others."""


class Stop:
    """The one way to stop all trials that are under way."""

    def __init__(self) -> None:
        self.asked = False
        self._processes: set[subprocess.Popen[str]] = set()

    def started(self, process: subprocess.Popen[str]) -> None:
        self._processes.add(process)
        if self.asked:
            process.terminate()

    def now(self) -> None:
        self.asked = True
        for process in list(self._processes):
            if process.poll() is None:
                process.terminate()


def perform(
    task: Task,
    place: Path,
    lay_out: Callable[[Path], None],
    tell: Told,
    *,
    device: str | None = None,
    stop: Stop | None = None,
) -> Result:
    """Run the trial to its end in ``place``, and say how it went. ``tell`` hears of every line."""
    place.mkdir(parents=True, exist_ok=True)
    # Of an attempt that was killed there may be a process left that still writes: it keeps its folder to itself.
    for old in place.glob("work-*"):
        shutil.rmtree(old, ignore_errors=True)
    work = place / f"work-{os.getpid()}-{time.time_ns():x}"
    lay_out(work)
    reading = Reading(task.metrics)
    began = time.monotonic()
    process = subprocess.Popen(
        task.words(),
        cwd=work / task.below,
        env=task.environment(work / "ace-runs", device),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        bufsize=1,
    )
    if stop is not None:
        stop.started(process)
    try:
        assert process.stdout is not None
        with process.stdout, (place / LOG).open("w", encoding="utf-8") as log:
            for line in process.stdout:
                log.write(line)
                log.flush()
                reading.feed(line, time.monotonic() - began)
                tell(reading)
        code = process.wait()
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()
    if stop is not None and stop.asked:
        raise Stopped
    if code:
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        raise Failed("\n".join([f"{task.trial} ended with {how}; the end of {place / LOG}:", *list(reading.end)[-8:]]))
    missing = reading.missing()
    if missing:
        raise Failed(f"{task.trial}: {missing}; its log is {place / LOG}")
    seconds = round(time.monotonic() - began, 3)
    error = _last_error(work / "ace-runs")
    curves = {name: [list(point) for point in points] for name, points in reading.curves.items() if points}
    return Result(task.trial.run, task.trial.seed, dict(reading.values), curves, seconds, error)


def _options(settings: Mapping[str, Any]) -> Sequence[str]:
    words: list[str] = []
    for name, value in settings.items():
        if isinstance(value, bool):
            words.append(option(name) if value else f"--no-{option(name)[2:]}")
        else:
            words += [option(name), str(value)]
    return words


def _last_error(traces: Path) -> float | None:
    """The relative equivariance error that the run measured last, if it measured any."""
    found = None
    for trace in sorted(traces.glob("*/trace.jsonl")):
        for line in trace.read_text(encoding="utf-8").splitlines():
            told = json.loads(line) if '"error"' in line else {}
            value = (told.get("error") or {}).get("relative")
            found = value if isinstance(value, (int, float)) else found
    return found
