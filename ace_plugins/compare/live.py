"""Progress of a comparison on stderr: a live table in a terminal, one line per finished trial elsewhere."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..output import say
from ..report.tables import duration
from .plan import Comparison, Trial
from .store import TrialResult
from .trial import Event, MetricReader

if TYPE_CHECKING:
    from rich.console import Group


class Progress:
    """State of all trials, and the estimated time left."""

    def __init__(self, comparison: Comparison, finished: Mapping[Trial, TrialResult], jobs: int) -> None:
        self.comparison = comparison
        self.reused = dict(finished)
        self.done = dict(finished)
        self.failed: dict[Trial, str] = {}
        self.running: dict[Trial, MetricReader] = {}
        self.jobs = jobs
        self.began = time.monotonic()
        self.metric = comparison.metrics[0].name

    @property
    def ended(self) -> int:
        return len(self.done) + len(self.failed)

    def update(self, event: Event) -> None:
        if event.trial is None:
            return
        if event.reader is not None:
            self.running[event.trial] = event.reader
            return
        self.running.pop(event.trial, None)
        if event.result is not None:
            self.done[event.trial] = event.result
        else:
            self.failed[event.trial] = event.failed

    def share(self, trial: Trial) -> float:
        """Return the finished share of a running trial, 0 while it is unknown."""
        reader, script = self.running.get(trial), self.comparison.script
        return min(1.0, reader.epoch / script.epochs) if reader and script and script.epochs else 0.0

    def seconds_left(self) -> float | None:
        """Estimate the seconds until all trials have ended, or None before the first epoch."""
        lengths = [result.seconds for result in self.done.values()]
        lengths += [reader.seconds / share for trial, reader in self.running.items() if (share := self.share(trial))]
        if not lengths:
            return None
        left = len(self.comparison.trials) - self.ended
        open_ = max(0.0, left - sum(map(self.share, self.running)))
        return open_ * sum(lengths) / len(lengths) / max(1, min(self.jobs, left))


class Lines(Progress):
    """Prints a line when a trial ends."""

    def __enter__(self) -> Lines:
        for trial, result in self.reused.items():
            say(f"{trial}: finished before, {self._describe(result)}", anyway=True)
        return self

    def __exit__(self, *error: Any) -> None:
        pass

    def update(self, event: Event) -> None:
        super().update(event)
        if event.trial is not None and event.reader is None:
            left = self.seconds_left()
            until = f"; about {duration(left)} to go" if left else ""
            text = event.failed or f"{event.trial}: {self._describe(self.done[event.trial])}"
            say(f"{text} ({self.ended} of {len(self.comparison.trials)}{until})", anyway=True)

    def _describe(self, result: TrialResult) -> str:
        return f"{self.metric} {result.metrics[self.metric]:.4g} after {duration(result.seconds)}"


class Screen(Progress):
    """Draws a table of runs by seeds, each cell a result or a share, and a progress bar."""

    def __enter__(self) -> Screen:
        from rich.console import Console
        from rich.live import Live

        self._live = Live(self.draw(), console=Console(stderr=True), refresh_per_second=4, transient=True)
        self._live.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._live.update(self.draw())
        self._live.__exit__(*error)

    def update(self, event: Event) -> None:
        super().update(event)
        self._live.update(self.draw())

    def draw(self) -> Group:
        from rich import box
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        table = Table(box=box.SIMPLE_HEAD)
        table.add_column(self.metric, no_wrap=True)
        for seed in self.comparison.seeds:
            table.add_column(f"seed {seed}", justify="right")
        for run in self.comparison.runs:
            table.add_row(run, *(self._cell(Trial(run, seed)) for seed in self.comparison.seeds))
        total, left = len(self.comparison.trials), self.seconds_left()
        until = "" if left is None else f", about {duration(left)} to go"
        text = f"{self.ended} of {total} runs, {duration(time.monotonic() - self.began)}{until}"
        bar = Table.grid(padding=(0, 1))
        bar.add_row(ProgressBar(total=total, completed=self.ended + sum(map(self.share, self.running)), width=40), text)
        return Group(table, bar)

    def _cell(self, trial: Trial) -> str:
        if trial in self.done:
            value = f"{self.done[trial].metrics[self.metric]:.4g}"
            return f"[dim]{value}[/dim]" if trial in self.reused else f"[bold]{value}[/bold]"
        if trial in self.failed:
            return "[red]failed[/red]"
        if trial not in self.running:
            return ""
        values, share = self.running[trial].values, self.share(trial)
        so_far = f"{values[self.metric]:.4g} " if self.metric in values else ""
        return so_far + (f"{100 * share:.0f} %" if share else "...")
