"""Run a comparison and return its outcome, as ``ace-patch compare`` does."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from typing import TYPE_CHECKING, Any

from ..contract.upstreams import Metric
from ..output import say
from ..report.trace import shorten_path
from .experiment import Experiment, check_runs, parse_metric, parse_runs, parse_seeds
from .live import Progress
from .page import ComparisonResult
from .plan import Comparison, Store, plan_comparison
from .trial import LocalBackend, Task, choose_jobs, count_processors, list_devices

if TYPE_CHECKING:
    from .cluster import RayBackend

RUNS = "off,auto"


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
            "schnet", ["train.py", "--epochs=20"], runs="off,auto", metrics=["test=test MAE {number}"]
        )
        for row in result.rows:
            print(row.run, row.mean, row.spread)
        print(*result.sentences, sep="\\n")

    Args:
        adapter: Name of an installed adapter.
        command: The script and its arguments. ``{seed}`` in an argument is replaced by the seed.
        runs: Names of modes and presets separated by commas, with settings after a colon
            (``"off,auto,mine:mode=resilient,rho=2x"``), or a mapping from names to settings. The first is the baseline.
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
