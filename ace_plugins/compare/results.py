"""Runs a comparison, shows its progress and returns its outcome."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing, nullcontext, redirect_stdout
from dataclasses import replace
from functools import partial
from typing import Any

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from ..contract.upstreams import Metric
from ..errors import AceError
from ..output import say
from ..report.tables import format_duration
from ..report.trace import shorten_path
from .cluster import run_on_ray
from .experiment import Experiment, parse_grid, parse_metric, parse_runs, parse_seeds
from .page import ComparisonResult
from .plan import Comparison, Store, Trial, TrialResult, find_arm, plan_comparison
from .trial import UNMATCHED, Event, MetricReader, Task, choose_jobs, count_processors, run_here

RUNS = "off,auto"
HOPELESS = 2.0  # a point of the grid is stopped half-way if its validation metric is worse by more than this factor
PERIOD = 180.0  # seconds between two lines about a running trial, if there is no terminal


def run_comparison(
    adapter: str,
    command: Sequence[str],
    *,
    runs: str | Mapping[str, Mapping[str, Any]] = RUNS,
    seeds: int | Sequence[int] = 5,
    metrics: Sequence[str | Metric] = (),
    grid: Mapping[str, Sequence[Any]] | None = None,
    jobs: int | None = None,
    threads: int | None = None,
    on: str = "here",
    out: str | os.PathLike[str] | None = None,
) -> ComparisonResult:
    """Train a script with several settings and seeds, and compare the results it prints.

    A trial is one run with one seed. Each trial is a process in a separate copy of the current folder, or of the
    script's checkout. Progress is printed on stderr. If the function is called again, it reuses finished trials::

        result = run_comparison("schnet", ["train.py", "--epochs=20"], metrics=["test=test MAE {number}"])
        print(result.table(), *result.sentences, sep="\\n")

    Args:
        adapter: Name of an installed adapter.
        command: The script and its arguments. ``{seed}`` in an argument is replaced by the seed.
        runs: Names of modes and presets separated by commas, with settings after a colon
            (``"off,auto,mine:mode=resilient,rho=2x"``), or a mapping from names to settings. The first is the baseline.
        seeds: Number of seeds (3 means the seeds 1, 2 and 3), or a list of seeds.
        metrics: Patterns of the printed results, as ``name=regex`` with ``{number}`` or another group, or `Metric`
            objects. The last match is the result. The first metric is compared. Default: the adapter's metrics.
        grid: Values of options of the script or settings of ACE, such as ``{"lr": [5e-4, 1e-3]}``. Each run gets the
            value that is best for the first seed. The first metric whose name starts with "validation" decides.
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
        parse_runs(runs),
        parse_seeds(str(seeds) if isinstance(seeds, int) else ",".join(map(str, seeds)) + ","),
        tuple(parse_metric(metric) if isinstance(metric, str) else metric for metric in metrics),
        grid=dict(parse_grid(f"{key}={','.join(map(str, values))}") for key, values in (grid or {}).items()),
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
    search, store = comparison.search, Store(comparison, out)
    with store.lock():
        jobs = choose_jobs(jobs, len((search or comparison).trials))
        first_threads, changed = store.describe(threads or max(1, count_processors() // jobs))
        run = partial(_run_trials, jobs=jobs, threads=threads or first_threads, on=on)
        if changed:
            other = f"results with other {' and other '.join(changed)} are kept but not reused"
            say(f"{shorten_path(store.folder)}: {other}", anyway=True)
        if search is None:
            return run(store)
        for line in comparison.describe_grid():
            say(line, anyway=True)
        found = run(Store(search, store.folder), is_search=True)
        best = find_best(found.results, search.metrics[0])
        if lost := {find_arm(name) for name in search.runs} - best.keys():
            name, tried = search.metrics[0].name, "; ".join(comparison.describe_grid())
            raise AceError(f"stopped: no run {min(lost)!r} of the grid has a finite {name}; check {tried}")
        runs = {best[name].run: search.runs[best[name].run] for name in comparison.runs}
        store = Store(replace(comparison, runs=runs, contents=found.comparison.contents), store.folder)
        store.describe(first_threads)
        return replace(run(store, known=found.results), search=found)


def _run_trials(
    store: Store, jobs: int, threads: int, on: str, *, known: Sequence[TrialResult] = (), is_search: bool = False
) -> ComparisonResult:
    """Run the trials that have no result yet, and return the outcome. Results that are ``known`` are not announced."""
    comparison, finished = store.comparison, store.load()
    total = f"{len(comparison.trials)} runs{' of the grid' if is_search else ''}"
    if reused := [result for result in finished.values() if result not in known]:
        say(f"{len(finished)} of {total} were finished before, in {shorten_path(store.folder)}", anyway=True)
    for run in comparison.runs:
        if results := [result for result in reused if result.run == run]:
            times, seeds = sorted({each.made for each in results}), ", ".join(str(each.seed) for each in results)
            say(f"reused: {run}, seeds {seeds}, made {' to '.join(dict.fromkeys([times[0], times[-1]]))}", anyway=True)
    if trials := [trial for trial in comparison.trials if trial not in finished]:
        store = Store(comparison := store.copy_code(), store.folder)
    tasks = [Task(comparison, trial, threads) for trial in trials]
    progress = Progress(comparison, finished, jobs, live=sys.stderr.isatty())
    stop = progress.is_hopeless if is_search else None
    events = run_here(store, tasks, jobs, stop) if on == "here" else run_on_ray(store, tasks, jobs, on)
    try:
        # Ray prints on stdout, which is reserved for the result.
        with closing(events), progress.display, redirect_stdout(sys.stderr):
            for event in events:
                if event.failed.startswith(UNMATCHED) and not progress.done:
                    raise AceError(f"stopped: {event.trial}: {event.failed}")
                progress.update(event)
    except KeyboardInterrupt:
        done = len(store.load())
        say(f"stopped; {done} of {total} are finished: run the same command again to continue", anyway=True)
        raise
    failed = {str(trial): text for trial, text in progress.failed.items()}
    return ComparisonResult(comparison, list(progress.done.values()), failed, store.folder)


def find_best(results: Iterable[TrialResult], metric: Metric) -> dict[str, TrialResult]:
    """Return for each run of a grid the result with the best finite value of a metric."""
    finite = [result for result in results if math.isfinite(result.metrics[metric.name])]
    best_last = sorted(finite, key=lambda result: result.metrics[metric.name], reverse=not metric.higher)
    return {find_arm(result.run): result for result in best_last}


class Progress:
    """Shows the progress of a comparison on stderr: a live table if ``live``, else lines. Failures always get a line.

    Without a live table, there is a line when a trial starts, every few minutes, and when it ends.
    """

    def __init__(self, comparison: Comparison, finished: Mapping[Trial, TrialResult], jobs: int, live: bool) -> None:
        self.comparison = comparison
        self.jobs = jobs
        self.done = dict(finished)
        self.failed: dict[Trial, str] = {}
        self.running: dict[Trial, MetricReader] = {}
        self.printed: dict[Trial, float] = {}  # times of the last lines about the running trials
        self.metric = comparison.metrics[0].name
        self.display = Live(self.draw(), console=Console(stderr=True), transient=True) if live else nullcontext()

    def update(self, event: Event) -> None:
        """Record an event and show it."""
        self.running.pop(event.trial, None)
        if event.reader is not None:
            self.running[event.trial] = event.reader
        elif event.result is not None:
            self.done[event.trial] = event.result
        else:
            self.failed[event.trial] = event.failed
        live = isinstance(self.display, Live)
        if isinstance(self.display, Live):
            self.display.update(self.draw())
        if event.failed:
            say(f"{event.trial} failed ({self.summary()}): {event.failed}", anyway=True)
        elif not live and (text := self._line(event)):
            say(f"{event.trial}: {text} ({self.summary()})", anyway=True)

    def _line(self, event: Event) -> str:
        """Return the text to print about an event that is not a failure; empty to print nothing."""
        if event.result is not None:
            notes = "".join(f", {note}" for note in event.result.notes)
            return f"{self._value(event.result.metrics)}after {format_duration(event.result.seconds)}{notes}"
        started, now = event.trial not in self.printed, time.monotonic()
        if event.reader is None or (not started and now - self.printed[event.trial] < PERIOD):
            return ""
        self.printed[event.trial] = now
        epoch = f"in epoch {event.reader.epoch}" if event.reader.epoch else ""
        return "started" if started else f"{self._value(event.reader.values)}{epoch}".strip() or "still running"

    def _value(self, metrics: Mapping[str, float]) -> str:
        return f"{self.metric} {metrics[self.metric]:.4g} " if math.isfinite(metrics.get(self.metric, math.nan)) else ""

    def is_hopeless(self, trial: Trial, reader: MetricReader) -> bool:
        """Return whether a half-finished trial of the grid is much worse than the best finished point of its run."""
        metric = self.comparison.metrics[0]
        best = find_best([*self.done.values()], metric).get(find_arm(trial.run))
        half = len(best.curves.get(metric.name, ())) // 2 if best else 0
        if best is None or not 2 <= half <= len(reader.curves[metric.name]):
            return False
        now, then = (curve[half - 1][1] for curve in (reader.curves[metric.name], best.curves[metric.name]))
        return then > 0 and (HOPELESS * now < then if metric.higher else now > HOPELESS * then)

    def share(self, trial: Trial) -> float:
        """Return the finished share of a running trial, from 0 to 1; 0 if it is unknown."""
        epochs = self.comparison.script.epochs
        return min(1.0, self.running[trial].epoch / epochs) if epochs else 0.0

    def seconds_left(self) -> float | None:
        """Estimate the seconds until all trials have ended. Returns None before the first epoch."""
        lengths = [result.seconds for result in self.done.values()]
        lengths += [reader.seconds / share for trial, reader in self.running.items() if (share := self.share(trial))]
        left = len(self.comparison.trials) - len(self.done) - len(self.failed)
        work = max(0.0, left - sum(map(self.share, self.running)))
        return work * sum(lengths) / len(lengths) / max(1, min(self.jobs, left)) if lengths else None

    def summary(self) -> str:
        left = self.seconds_left()
        until = f"; about {format_duration(left)} to go" if left else ""
        return f"{len(self.done) + len(self.failed)} of {len(self.comparison.trials)} runs{until}"

    def draw(self) -> Group:
        """Return a table of results or progress, with a row for each run and a column for each seed, and a bar."""
        table = Table(self.metric, box=box.SIMPLE_HEAD)
        for seed in self.comparison.seeds:
            table.add_column(f"seed {seed}", justify="right")
        for run in self.comparison.runs:
            table.add_row(run, *(self._cell(Trial(run, seed)) for seed in self.comparison.seeds))
        done = len(self.done) + len(self.failed) + sum(map(self.share, self.running))
        bar = Table.grid(padding=(0, 1))
        bar.add_row(ProgressBar(total=len(self.comparison.trials), completed=done, width=40), self.summary())
        return Group(table, bar)

    def _cell(self, trial: Trial) -> str:
        if trial in self.done:
            return f"[bold]{self.done[trial].metrics[self.metric]:.4g}[/]"
        if trial not in self.running:
            return "[red]failed[/]" if trial in self.failed else ""
        values, share = self.running[trial].values, self.share(trial)
        so_far = f"{values[self.metric]:.4g} " if self.metric in values else ""
        return so_far + (f"{100 * share:.0f} %" if share else "...")
