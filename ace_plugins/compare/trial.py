"""Runs trials on this machine: each is a process in a separate folder, and its output contains the metrics."""

from __future__ import annotations

import codecs
import io
import math
import os
import queue
import re
import select
import shutil
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path

from ..contract.upstreams import Metric
from ..errors import AceError
from ..report.trace import LINES, SavedRun, read_run
from ..report.verdicts import NEAR
from ..run.activation import LINKS, SHIFT
from ..settings.sources import VARIABLES, variable
from .experiment import compile_pattern
from .plan import LOG, Comparison, Store, Trial, TrialResult, now

_EPOCH = re.compile(r"epoch\D{0,3}(\d{1,9})(?!\d)", re.IGNORECASE)
LAST_LINES = 8  # number of lines at the end of a log that an error message quotes
TICK = 0.5  # seconds between two checks of the running trials
UNMATCHED = "no line matches"  # start of the message if a run that succeeded printed no result
ALL = 0.99  # smallest share of its budget after which a run counts as complete
PIPE = 2**20  # bytes to read at most after the end of a script: a pipe holds no more


class MetricReader:
    """Reads the metrics of one trial from the lines that its script prints."""

    def __init__(self, metrics: Sequence[Metric]) -> None:
        self.values: dict[str, float] = {}  # mapping from each metric to its last printed value
        self.curves: dict[str, list[list[float]]] = {metric.name: [] for metric in metrics}
        """Mapping from each metric to its evaluations, each as [seconds since the start, value]."""
        self.epoch = 0  # last epoch number in the output, from which the progress is estimated
        self.seconds = 0.0  # time of the last line, in seconds since the start
        self.began = time.monotonic()
        self.last_lines: deque[str] = deque(maxlen=LAST_LINES)
        self._patterns = [(m, compile_pattern(m, m.pattern), compile_pattern(m, m.curve or m.pattern)) for m in metrics]

    def feed(self, line: str, seconds: float) -> None:
        """Read a line that was printed ``seconds`` after the start."""
        self.seconds = seconds
        if line.strip():
            self.last_lines.append(line.rstrip())
        if epoch := _EPOCH.search(line):
            self.epoch = int(epoch[1])
        for metric, result, point in self._patterns:
            for value in _find_numbers(result, line):
                self.values[metric.name] = value
            self.curves[metric.name] += [[round(seconds, 3), value] for value in _find_numbers(point, line)]

    def result(self, trial: Trial, error: float | None, notes: Iterable[str]) -> TrialResult:
        curves = {name: points for name, points in self.curves.items() if points}
        seconds = round(time.monotonic() - self.began, 3)
        return TrialResult(trial.run, trial.seed, self.values, curves, seconds, error, now(), [*notes])


def _find_numbers(pattern: re.Pattern[str], line: str) -> Iterator[float]:
    """Yield the numbers that the pattern finds in a line, and leave out other text, such as "-", and overflows."""
    for match in pattern.finditer(line):
        with suppress(TypeError, ValueError):  # TypeError: the group is not part of the match
            value = float(match[1])
            if not (math.isinf(value) and match[1].strip()[-1].isdigit()):
                yield value


def _read_lines(process: subprocess.Popen[bytes]) -> Iterator[str]:
    """Yield the lines that a process prints, until it ends. Processes that it leaves behind may keep its pipe open."""
    assert process.stdout is not None
    decoder = io.IncrementalNewlineDecoder(codecs.getincrementaldecoder("utf-8")("replace"), translate=True)
    text, last = "", PIPE
    while last > 0:
        ended = process.poll() is not None
        ready, _, _ = select.select([process.stdout], [], [], 0 if ended else TICK)
        data = os.read(process.stdout.fileno(), 2**16) if ready else b""
        if not data and (ready or ended):
            break
        last -= len(data) if ended else 0
        *lines, text = (text + decoder.decode(data)).split("\n")
        yield from lines
    if text := text + decoder.decode(b"", final=True):
        yield text


@dataclass(frozen=True)
class Task:
    """A trial to run, on this or another machine."""

    comparison: Comparison
    trial: Trial
    threads: int

    def environment(self, traces: Path, device: str | None) -> dict[str, str]:
        """Return the environment variables of this process, with the settings of the run instead of the user's."""
        kept = {name: value for name, value in os.environ.items() if name not in VARIABLES and name != SHIFT}
        kept |= {"OMP_NUM_THREADS": str(self.threads), "PYTHONUNBUFFERED": "1", "ACE_RUNS": str(traces)}
        kept |= {variable(name): str(value) for name, value in self.comparison.runs[self.trial.run].items()}
        more = {SHIFT: self.comparison.seed_shift(self.trial), "CUDA_VISIBLE_DEVICES": device}
        return kept | {name: str(value) for name, value in more.items() if value is not None}


def perform(
    task: Task,
    folder: Path,
    lay_out: Callable[[Path], None],
    follow: Callable[[subprocess.Popen[bytes], MetricReader], bool] = lambda process, reader: False,
    device: str | None = None,
) -> TrialResult:
    """Run a trial in ``folder`` until it ends.

    ``lay_out`` copies the script's files into a new folder. ``follow`` is called at the start and after each line;
    if it then returns True, the trial is stopped, and its result has nan for each metric.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # A process of an earlier attempt may still be writing, so each attempt gets a new folder.
    for old in folder.glob("work-*"):
        shutil.rmtree(old, ignore_errors=True)
    work, log = folder / f"work-{os.getpid()}-{time.time_ns():x}", folder / LOG
    lay_out(work)
    reader = MetricReader(task.comparison.metrics)
    script = task.comparison.command(task.trial)
    process = subprocess.Popen(
        [sys.executable, "-m", "ace_plugins", "run", task.comparison.adapter, "--", *script],
        cwd=work / task.comparison.below,
        env=task.environment(work / "ace-runs", device) | {LINKS: os.path.realpath(work)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        bufsize=0,
    )
    try:
        follow(process, reader)
        with log.open("w", encoding="utf-8", buffering=1) as copy:
            for line in _read_lines(process):
                print(line, file=copy)
                reader.feed(line, time.monotonic() - reader.began)
                if follow(process, reader):
                    found = reader.curves[task.comparison.metrics[0].name][-1][1]
                    reader.values = dict.fromkeys(reader.curves, math.nan)
                    return reader.result(task.trial, None, [f"stopped early at {found:.4g}"])
        code = process.wait()
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()
        assert process.stdout is not None
        process.stdout.close()
    if code:
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        raise AceError("\n".join([f"ended with {how}; the end of {log}:", *reader.last_lines]))
    for metric in task.comparison.metrics:
        if metric.name not in reader.values:
            last = f"the last line of {log} is {reader.last_lines[-1]!r}" if reader.last_lines else f"{log} is empty"
            raise AceError(f"{UNMATCHED} {metric.pattern!r} of metric {metric.name!r}; {last}")
    runs = [read_run(path.parent) for path in sorted((work / "ace-runs").glob(f"*/{LINES}"))]
    errors = [value for run in runs for _, value in run.curve("error") if math.isfinite(value)]
    notes = dict.fromkeys(note for run in runs for note in list_notes(run))
    return reader.result(task.trial, errors[-1] if errors else None, notes)


def list_notes(run: SavedRun) -> Iterator[str]:
    """Yield the caveats on a run's result: strict mode did not land, or the run did not make all its steps."""
    if run.config.lands and run.lines and run.landed_at is None:
        largest = max(map(abs, run.last("gamma")), default=0.0)
        if run.config.paced or not largest <= NEAR:  # in the paper's loop gamma stays near 0 without landing
            yield "did not land"
    if run.budget and run.length < ALL * run.budget:
        yield f"made {run.length:,} of {run.budget:,} steps"
    elif run.state == "interrupted":
        yield "was interrupted"


@dataclass
class Event:
    """A change in a trial: it printed a line (``reader``), ended (``result``) or failed (``failed``, the message)."""

    trial: Trial
    reader: MetricReader | None = None
    result: TrialResult | None = None
    failed: str = ""


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


def run_here(
    store: Store, tasks: Sequence[Task], jobs: int, is_hopeless: Callable[[Trial, MetricReader], bool] | None = None
) -> Generator[Event]:
    """Run tasks on this machine, ``jobs`` at a time, and yield their events. Closing the generator stops the tasks."""
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    free: queue.SimpleQueue[str | None] = queue.SimpleQueue()  # devices, one for each simultaneous trial
    for device in islice(cycle(list_devices() or (None,)), jobs):
        free.put(device)
    processes: set[subprocess.Popen[bytes]] = set()
    stopped = threading.Event()
    contents = store.comparison.contents
    data = contents.data_state()

    def work(task: Task) -> None:
        if stopped.is_set():
            return
        trial, device = task.trial, free.get()

        def follow(process: subprocess.Popen[bytes], reader: MetricReader) -> bool:
            processes.add(process)
            if stopped.is_set():
                process.terminate()
            events.put(Event(trial, reader))
            return is_hopeless is not None and is_hopeless(trial, reader)

        try:
            contents.check_data(data)
            result = perform(task, store.trial_folder(trial), contents.lay_out, follow, device)
            contents.check_data(data)
            if not stopped.is_set():
                store.save(trial, result)
                events.put(Event(trial, result=result))
        except (AceError, OSError) as error:
            events.put(Event(trial, failed=str(error)))
        finally:
            free.put(device)

    with ThreadPoolExecutor(jobs) as pool:
        waiting = {pool.submit(work, task) for task in tasks}
        try:
            while waiting:
                done, waiting = wait(waiting, timeout=TICK, return_when=FIRST_COMPLETED)
                for future in done:
                    future.result()
                    contents.check_data(data)
                while not events.empty():
                    yield events.get()
        finally:
            stopped.set()
            for process in list(processes):
                process.terminate()
            pool.shutdown(wait=False, cancel_futures=True)
