"""Show the progress of a comparison on stderr: a live table in a terminal, one line per finished trial elsewhere."""

from __future__ import annotations

from collections.abc import Mapping

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from ..output import say
from ..report.tables import format_duration
from .plan import Comparison, Trial, TrialResult
from .trial import Event, MetricReader


class Progress:
    """State of all trials. Shows a live table if ``live``, else prints a line when a trial ends."""

    def __init__(
        self, comparison: Comparison, finished: Mapping[Trial, TrialResult], jobs: int, *, live: bool = False
    ) -> None:
        self.comparison = comparison
        self.reused = dict(finished)
        self.done = dict(finished)
        self.failed: dict[Trial, str] = {}
        self.running: dict[Trial, MetricReader] = {}
        self.jobs = jobs
        self.metric = comparison.metrics[0].name
        self._live = Live(console=Console(stderr=True), refresh_per_second=4, transient=True) if live else None

    def __enter__(self) -> Progress:
        if self._live is not None:
            self._live.update(self.draw())
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.stop()

    def update(self, event: Event) -> None:
        """Record an event and show it."""
        self.running.pop(event.trial, None)
        if event.reader is not None:
            self.running[event.trial] = event.reader
        elif event.result is not None:
            self.done[event.trial] = event.result
        else:
            self.failed[event.trial] = event.failed
        if self._live is not None:
            self._live.update(self.draw())
        elif event.reader is None:
            text = event.failed
            if event.result is not None:
                value, time = event.result.metrics[self.metric], format_duration(event.result.seconds)
                text = f"{event.trial}: {self.metric} {value:.4g} after {time}"
            say(f"{text} ({self.summary()})", anyway=True)

    @property
    def ended(self) -> int:
        return len(self.done) + len(self.failed)

    def share(self, trial: Trial) -> float:
        """Return the finished share of a running trial, from 0 to 1; 0 while it is unknown."""
        epochs = self.comparison.script.epochs
        return min(1.0, self.running[trial].epoch / epochs) if epochs else 0.0

    def seconds_left(self) -> float | None:
        """Estimate the seconds until all trials have ended. Returns None before the first epoch."""
        lengths = [result.seconds for result in self.done.values()]
        lengths += [reader.seconds / share for trial, reader in self.running.items() if (share := self.share(trial))]
        left = len(self.comparison.trials) - self.ended
        open_ = max(0.0, left - sum(map(self.share, self.running)))
        return open_ * sum(lengths) / len(lengths) / max(1, min(self.jobs, left)) if lengths else None

    def summary(self) -> str:
        left = self.seconds_left()
        until = f"; about {format_duration(left)} to go" if left else ""
        return f"{self.ended} of {len(self.comparison.trials)} runs{until}"

    def draw(self) -> Group:
        """Return a progress bar and a table of results or progress, with a row per run and a column per seed."""
        table = Table(box=box.SIMPLE_HEAD)
        table.add_column(self.metric, no_wrap=True)
        for seed in self.comparison.seeds:
            table.add_column(f"seed {seed}", justify="right")
        for run in self.comparison.runs:
            table.add_row(run, *(self._cell(Trial(run, seed)) for seed in self.comparison.seeds))
        done = self.ended + sum(map(self.share, self.running))
        bar = Table.grid(padding=(0, 1))
        bar.add_row(ProgressBar(total=len(self.comparison.trials), completed=done, width=40), self.summary())
        return Group(table, bar)

    def _cell(self, trial: Trial) -> str:
        if trial in self.done:
            style = "dim" if trial in self.reused else "bold"
            return f"[{style}]{self.done[trial].metrics[self.metric]:.4g}[/]"
        if trial in self.failed:
            return "[red]failed[/red]"
        if trial not in self.running:
            return ""
        values, share = self.running[trial].values, self.share(trial)
        so_far = f"{values[self.metric]:.4g} " if self.metric in values else ""
        return so_far + (f"{100 * share:.0f} %" if share else "...")
