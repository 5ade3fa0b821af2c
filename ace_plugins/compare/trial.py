"""Run trials on this machine: each a process in a separate folder, with metrics read from its output."""

from __future__ import annotations

import os
import queue
import re
import shutil
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from ..contract.upstreams import Metric
from ..errors import AceError
from ..report.trace import LINES, read_trace
from ..run.activation import SHIFT
from ..settings.sources import VARIABLES, option
from .experiment import compile_pattern
from .plan import LOG, Comparison, Store, Trial, TrialResult

_EPOCH = re.compile(r"epoch\D{0,3}(\d+)", re.IGNORECASE)
LAST_LINES = 8
"""Number of lines at the end of a log that an error message quotes."""
TICK = 0.5
"""Seconds between two checks of the running trials."""


class MetricReader:
    """Reads the metrics of one trial from the lines its script prints."""

    def __init__(self, metrics: Sequence[Metric]) -> None:
        self.metrics = tuple(metrics)
        self.values: dict[str, float] = {}
        """Mapping from each metric to its last printed value."""
        self.curves: dict[str, list[tuple[float, float]]] = {metric.name: [] for metric in metrics}
        """Mapping from each metric to its evaluations, each as (seconds since the start, value)."""
        self.epoch = 0
        """Last epoch number in the output, from which the progress is estimated."""
        self.seconds = 0.0
        """Time of the last line, in seconds since the start."""
        self.last_lines: deque[str] = deque(maxlen=LAST_LINES)
        self._patterns = [
            (m.name, compile_pattern(m.pattern, m.name), compile_pattern(m.curve or m.pattern, m.name)) for m in metrics
        ]

    def feed(self, line: str, seconds: float) -> None:
        """Read a line printed ``seconds`` after the start."""
        self.seconds = seconds
        if line.strip():
            self.last_lines.append(line.rstrip())
        if epoch := _EPOCH.search(line):
            self.epoch = int(epoch[1])
        for name, result, point in self._patterns:
            for match in result.finditer(line):
                self.values[name] = _parse_number(match[1], name, line)
            for match in point.finditer(line):
                self.curves[name].append((round(seconds, 3), _parse_number(match[1], name, line)))

    def find_missing(self) -> str:
        """Return an error message if the script did not print every metric, else an empty string."""
        last = f"the last line is {self.last_lines[-1]!r}" if self.last_lines else "it printed nothing"
        missing = [metric for metric in self.metrics if metric.name not in self.values]
        return f"no match for metric {missing[0].name!r} ({missing[0].pattern!r}): {last}" if missing else ""


def _parse_number(text: str, name: str, line: str) -> float:
    try:
        return float(text)
    except (TypeError, ValueError):
        raise AceError(f"metric {name!r}: expected a number, found {text!r} in {line.strip()!r}") from None


@dataclass(frozen=True)
class Task:
    """A trial to run, here or on another machine."""

    comparison: Comparison
    trial: Trial
    threads: int

    def command(self) -> list[str]:
        """Return the command line of ``ace-patch run`` with the run's settings."""
        options: list[str] = []
        for name, value in self.comparison.runs[self.trial.run].items():
            if isinstance(value, bool):
                options.append(option(name) if value else f"--no-{option(name)[2:]}")
            else:
                options += [option(name), str(value)]
        ace_patch = [sys.executable, "-m", "ace_plugins", "run", self.comparison.adapter, *options]
        return [*ace_patch, "--", *self.comparison.command(self.trial)]

    def environment(self, traces: Path, device: str | None) -> dict[str, str]:
        """Return the environment of this process, with the user's variables of ACE replaced by those of the trial."""
        kept = {name: value for name, value in os.environ.items() if name not in VARIABLES and name != SHIFT}
        kept |= {"OMP_NUM_THREADS": str(self.threads), "PYTHONUNBUFFERED": "1", "ACE_RUNS": str(traces)}
        shift = self.comparison.seed_shift(self.trial)
        if shift is not None:
            kept[SHIFT] = str(shift)
        if device is not None:
            kept["CUDA_VISIBLE_DEVICES"] = device
        return kept


def perform(
    task: Task,
    folder: Path,
    lay_out: Callable[[Path], None],
    *,
    on_start: Callable[[subprocess.Popen[str]], None] = lambda process: None,
    on_line: Callable[[MetricReader], None] = lambda reader: None,
    device: str | None = None,
) -> TrialResult:
    """Run a trial in ``folder`` until it ends. ``lay_out`` copies the script's files into a new working directory."""
    folder.mkdir(parents=True, exist_ok=True)
    # A process of an earlier attempt may still be writing, so each attempt gets a new folder.
    for old in folder.glob("work-*"):
        shutil.rmtree(old, ignore_errors=True)
    work = folder / f"work-{os.getpid()}-{time.time_ns():x}"
    lay_out(work)
    reader = MetricReader(task.comparison.metrics)
    began = time.monotonic()
    process = subprocess.Popen(
        task.command(),
        cwd=work / task.comparison.below,
        env=task.environment(work / "ace-runs", device),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        bufsize=1,
    )
    on_start(process)
    try:
        assert process.stdout is not None
        with process.stdout, (folder / LOG).open("w", encoding="utf-8") as log:
            for line in process.stdout:
                log.write(line)
                log.flush()
                reader.feed(line, time.monotonic() - began)
                on_line(reader)
        code = process.wait()
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()
    if code:
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        raise AceError("\n".join([f"{task.trial} ended with {how}; the end of {folder / LOG}:", *reader.last_lines]))
    if problem := reader.find_missing():
        raise AceError(f"{task.trial}: {problem}; its log is {folder / LOG}")
    curves = {name: [list(point) for point in points] for name, points in reader.curves.items() if points}
    seconds = round(time.monotonic() - began, 3)
    error = _read_last_error(work / "ace-runs")
    return TrialResult(task.trial.run, task.trial.seed, dict(reader.values), curves, seconds, error)


def _read_last_error(runs: Path) -> float | None:
    """Return the relative equivariance error that the trial measured last, if any."""
    traces = [read_trace(path.parent) for path in sorted(runs.glob(f"*/{LINES}"))]
    errors = [line["error"]["relative"] for trace in traces for line in trace if "error" in line]
    return errors[-1] if errors else None


@dataclass
class Event:
    """A change in a trial: it printed a line, ended, or failed."""

    trial: Trial
    reader: MetricReader | None = None
    result: TrialResult | None = None
    failed: str = ""
    """Error message; empty if the trial did not fail."""


def count_processors() -> int:
    """Return the number of processors this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def list_devices() -> tuple[str, ...]:
    """List the visible GPUs. Calls nvidia-smi instead of torch, because importing torch takes seconds."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return tuple(word.strip() for word in visible.split(",") if word.strip() not in ("", "-1"))
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(str(number) for number, line in enumerate(done.stdout.splitlines()) if line.startswith("GPU"))


def choose_jobs(given: int | None, trials: int) -> int:
    """Return the number of simultaneous trials: ``given``, or one per GPU, or one per two processors without GPUs."""
    return min(trials, given or len(list_devices()) or max(1, count_processors() // 2))


class LocalBackend:
    """Runs trials on this machine as child processes. One thread per simultaneous trial reads its output."""

    def __init__(self, jobs: int, devices: Sequence[str] = ()) -> None:
        self.jobs = jobs
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._devices: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        for number in range(jobs):
            self._devices.put(devices[number % len(devices)] if devices else None)
        self._processes: set[subprocess.Popen[str]] = set()
        self._stopped = False

    def run(self, store: Store, tasks: Sequence[Task]) -> Generator[Event]:
        """Run all tasks and yield their events. Closing the generator terminates the trials' processes."""
        with ThreadPoolExecutor(self.jobs) as pool:
            waiting = {pool.submit(self._work, store, task) for task in tasks}
            try:
                while waiting:
                    done, waiting = wait(waiting, timeout=TICK, return_when=FIRST_COMPLETED)
                    for future in done:
                        future.result()
                    while not self._events.empty():
                        yield self._events.get()
            finally:
                self._stopped = True
                for process in list(self._processes):
                    process.terminate()
                pool.shutdown(wait=False, cancel_futures=True)

    def _work(self, store: Store, task: Task) -> None:
        if self._stopped:
            return
        trial, device = task.trial, self._devices.get()
        try:
            result = perform(
                task,
                store.trial_folder(trial),
                store.comparison.contents.lay_out,
                on_start=self._register,
                on_line=lambda reader: self._events.put(Event(trial, reader)),
                device=device,
            )
            if not self._stopped:
                store.save(trial, result)
                self._events.put(Event(trial, result=result))
        except AceError as error:
            self._events.put(Event(trial, failed=str(error)))
        except OSError as error:
            self._events.put(Event(trial, failed=f"{trial}: {error.strerror or error}"))
        finally:
            self._devices.put(device)

    def _register(self, process: subprocess.Popen[str]) -> None:
        self._processes.add(process)
        if self._stopped:
            process.terminate()
