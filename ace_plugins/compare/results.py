"""Run a comparison and return its outcome, which ``ace-patch compare`` prints."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..contract.upstreams import Metric
from ..errors import AceError
from ..output import say
from ..report.runs import find_newest
from ..report.tables import TableData, format_number
from ..report.trace import shorten_path
from .experiment import Experiment, check_runs, parse_metric, parse_runs, parse_seeds
from .live import Progress
from .plan import DESCRIPTION, Comparison, Store, TrialResult, plan_comparison
from .statistics import Difference, Row, compare_runs, summarise
from .trial import LocalBackend, Task, choose_jobs, count_processors, list_devices

if TYPE_CHECKING:
    from .cluster import RayBackend

RUNS = "off,strict,resilient"


@dataclass(frozen=True)
class ComparisonResult:
    """Outcome of a comparison, as returned by `run_comparison`."""

    comparison: Comparison
    """The script, runs, seeds and metrics that were compared."""
    results: Sequence[TrialResult]
    """Metrics and curves of each finished trial (one run with one seed)."""
    failed: Mapping[str, str] = field(default_factory=dict)
    """Mapping from the name of each failed trial, such as "strict seed 2", to its error message."""
    folder: Path = Path()
    """Folder of the results, with a log per trial."""

    @cached_property
    def rows(self) -> list[Row]:
        """One row per run: the value for each seed, mean, spread, time ratio and equivariance error."""
        return summarise(self.results, list(self.comparison.runs), self.comparison.metrics)

    @cached_property
    def differences(self) -> list[Difference]:
        """Change of each run compared with the first run, with a bootstrap interval over seeds."""
        return compare_runs(self.rows, next(iter(self.comparison.runs)), self.comparison.metrics[0])

    @property
    def sentences(self) -> list[str]:
        """The conclusions in words, one sentence per run."""
        sentences = [difference.sentence() + "." for difference in self.differences]
        if self.failed:
            total = len(self.comparison.trials)
            sentences.append(f"{len(self.failed)} of {total} runs failed and are not in the table.")
        return sentences

    @property
    def missing(self) -> list[str]:
        """Notes on trials without a result."""
        total = len(self.comparison.trials)
        missing = total - len(self.results)
        return [f"{missing} of {total} runs have no result: they failed or have not finished"] if missing else []

    def traces(self) -> dict[str, Path]:
        """Return a mapping from trial names to trace folders, with one trial per run: the first that has a trace."""
        store, traces = Store(self.comparison, self.folder), {}
        for trial in reversed(self.comparison.trials):
            attempts = sorted(store.trial_folder(trial).glob("work-*/ace-runs"), key=lambda path: path.stat().st_mtime)
            found = [trace for attempt in attempts if (trace := find_newest(attempt))]
            if found:
                traces[trial.run] = (str(trial), found[-1])
        return dict(traces[run] for run in self.comparison.runs if run in traces)

    def table(self, *, by_seed: bool = False) -> TableData:
        """Return the table as text, optionally with a column per seed. ``print(result.table())`` prints it."""
        first, *others = self.comparison.metrics
        rows, paper = self.rows, self.comparison.about.get("paper", {})
        changes = {difference.run: difference.cell() for difference in self.differences}
        spreads = ["" if row.spread is None else f" ± {format_number(row.spread, 2)}" for row in rows]
        columns = [
            ("run", [row.run for row in rows]),
            ("seeds", [str(len(row.values)) for row in rows]),
            (first.name, [format_number(row.mean) + spread for row, spread in zip(rows, spreads, strict=True)]),
            ("change", [changes.get(row.run, "") for row in rows]),
        ]
        for seed in self.comparison.seeds if by_seed else ():
            columns.append((f"seed {seed}", [_format(row.values.get(seed)) for row in rows]))
        columns += [(metric.name, [format_number(row.others[metric.name]) for row in rows]) for metric in others]
        columns.append(("time", ["" if row.time is None else f"× {row.time:.2f}" for row in rows]))
        columns.append(("equiv. error", [_format(row.equivariance_error, 2) for row in rows]))
        columns.append(("paper", [str(paper.get(row.run, "")) for row in rows]))
        columns = [(name, cells) for name, cells in columns if any(cells) or name == "change"]
        headers = [name for name, _ in columns]
        cells = list(zip(*(cells for _, cells in columns), strict=True))
        return TableData(headers, cells, numbers=headers[1:], optional=[h for h in headers if h.startswith("seed ")])

    @property
    def caption(self) -> str:
        """Explanation of the table."""
        metric = self.comparison.metrics[0]
        better = "higher" if metric.higher else "lower"
        return f"{metric.name}: mean and standard deviation over seeds, {better} is better."

    def to_dict(self) -> dict[str, Any]:
        """Return the outcome as JSON-compatible data, as printed by ``ace-patch compare --json``."""
        return {
            "adapter": self.comparison.adapter,
            "command": list(self.comparison.words),
            "metrics": [{"name": m.name, "higher": m.higher} for m in self.comparison.metrics],
            "runs": [row.to_dict() | {"settings": dict(self.comparison.runs[row.run])} for row in self.rows],
            "differences": [difference.to_dict() for difference in self.differences],
            "sentences": self.sentences,
            "failed": dict(self.failed),
            "folder": str(self.folder),
            **({"label": self.comparison.label} if self.comparison.label else {}),
        }


def _format(value: float | None, digits: int = 4) -> str:
    return "" if value is None else format_number(value, digits)


def run_comparison(
    adapter: str,
    command: Sequence[str],
    *,
    runs: str | Mapping[str, Mapping[str, Any]] = RUNS,
    seeds: int | Sequence[int] = 3,
    metrics: Sequence[str | Metric] = (),
    jobs: int | None = None,
    threads: int | None = None,
    on: str = "here",
    out: str | os.PathLike[str] | None = None,
) -> ComparisonResult:
    """Train a script with several settings and seeds, and compare the results it prints.

    Each trial is a process in its own copy of the current folder (or of the script's checkout). Finished trials are
    reused when the function is called again. Progress is printed on stderr. ``ace-patch compare`` does the same::

        result = run_comparison(
            "schnet", ["train.py", "--epochs=20"], runs="off,strict", metrics=["test=test MAE {number}"]
        )
        for row in result.rows:
            print(row.run, row.mean, row.spread)
        print(*result.sentences, sep="\\n")

    Args:
        adapter: Name of an installed adapter.
        command: The script and its arguments. ``{seed}`` in an argument is replaced by the seed.
        runs: Names of modes and presets separated by commas, with settings after a colon
            (``"off,strict,mine:horizon=0.1,rho=2x"``), or a mapping from names to settings. The first is the baseline.
        seeds: Number of seeds (3 means the seeds 1, 2 and 3), or a list of seeds.
        metrics: Patterns of the printed results, as ``name=regex`` with ``{number}`` or another group, or `Metric`
            objects. The last match is the result. The first metric is compared. Default: the adapter's metrics.
        jobs: Number of simultaneous trials. Default: one per GPU, or one per two processors.
        threads: Threads per trial. Default: an equal share of the processors.
        on: ``"here"``, ``"ray"`` for a Ray cluster on this machine, or the address of a Ray cluster.
        out: Folder of the results. Default: a folder in ``.ace/compare`` that depends on the script's content.

    Returns:
        The outcome: rows of the table, differences between runs, and conclusions as sentences. Failed trials do not
        raise an exception; they are in `ComparisonResult.failed`.

    Raises:
        AceError: If an argument is invalid, the script does not exist, or the disk or the Ray cluster is not usable.
    """
    experiment = Experiment(
        adapter,
        tuple(command),
        parse_runs(runs) if isinstance(runs, str) else check_runs(runs),
        parse_seeds(str(seeds) if isinstance(seeds, int) else ",".join(map(str, seeds)) + ","),
        tuple(parse_metric(metric) if isinstance(metric, str) else metric for metric in metrics),
    )
    return execute(plan_comparison(experiment), jobs=jobs, threads=threads, on=on, out=out)


def execute(
    comparison: Comparison,
    *,
    jobs: int | None = None,
    threads: int | None = None,
    on: str = "here",
    out: str | os.PathLike[str] | None = None,
) -> ComparisonResult:
    """Run the trials of a comparison that have no result yet, and return its outcome."""
    store = Store(comparison, out)
    jobs = choose_jobs(jobs, len(comparison.trials))
    finished = store.load()
    missing = [trial for trial in comparison.trials if trial not in finished]
    first_threads = store.describe(threads or max(1, count_processors() // jobs))
    tasks = [Task(comparison, trial, threads or first_threads) for trial in missing]
    if finished:
        total = len(comparison.trials)
        say(f"{len(finished)} of {total} runs were finished before, in {shorten_path(store.folder)}", anyway=True)
    before = comparison.contents.data_state()
    progress = Progress(comparison, finished, jobs, live=sys.stderr.isatty())
    _run_tasks(store, tasks, progress, on)
    if comparison.contents.data_state() != before:
        say(f"a run changed data in {comparison.contents.root}, which all runs share: check it", anyway=True)
    results = list(progress.done.values())
    failed = {str(trial): text for trial, text in progress.failed.items()}
    return ComparisonResult(comparison, results, failed, store.folder)


def _run_tasks(store: Store, tasks: Sequence[Task], progress: Progress, on: str) -> None:
    backend: LocalBackend | RayBackend = LocalBackend(progress.jobs, list_devices())
    if on != "here":
        from .cluster import RayBackend

        backend = RayBackend(on, progress.jobs)
    events = backend.run(store, tasks)
    before = None
    if threading.current_thread() is threading.main_thread():
        before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with progress, redirect_stdout(sys.stderr):  # Ray prints on stdout, which is reserved for the result
            for event in events:
                progress.update(event)
    except KeyboardInterrupt:
        events.close()
        done, total = len(store.load()), len(store.comparison.trials)
        say(f"stopped; {done} of {total} runs are finished: run the same command again to continue", anyway=True)
        raise
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)


def is_comparison(folder: Path) -> bool:
    """Return True if the folder holds results of a comparison."""
    return (folder / DESCRIPTION).is_file()


def read_comparison(folder: Path) -> ComparisonResult:
    """Read the results in a folder. Neither the script nor the adapter is needed.

    Raises:
        AceError: If the folder's description is missing or invalid.
    """
    path = folder / DESCRIPTION
    try:
        described = json.loads(path.read_text(encoding="utf-8"))
        comparison = Comparison(
            str(described.get("adapter") or ""),
            tuple(str(word) for word in described["command"]),
            {str(name): dict(settings) for name, settings in described["runs"].items()},
            tuple(int(seed) for seed in described["seeds"]),
            tuple(Metric(str(each["name"]), "", higher=bool(each["higher"])) for each in described["metrics"]),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise AceError(f"{path} is invalid ({type(error).__name__}: {error}): run 'ace-patch compare' again") from None
    if not (comparison.runs and comparison.metrics):
        raise AceError(f"{path} is invalid (no runs or no metrics): run 'ace-patch compare' again")
    return ComparisonResult(comparison, list(Store(comparison, folder).load().values()), folder=folder)
