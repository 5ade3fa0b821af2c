"""What people see while trials run: a table that fills in a terminal, lines where there is none. On stderr."""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from ..output import say
from ..report.tables import duration
from .local import Event
from .metrics import Reading
from .plan import Comparison, Trial
from .results import Result

if TYPE_CHECKING:
    from rich.console import Group


class Progress:
    """How far each trial is, and when all will be done."""

    def __init__(self, comparison: Comparison, finished: dict[Trial, Result], jobs: int) -> None:
        self.comparison = comparison
        self.done: dict[Trial, Result] = dict(finished)
        self.reused: Collection[Trial] = frozenset(finished)
        self.failed: dict[Trial, str] = {}
        self.under_way: dict[Trial, Reading] = {}
        self.jobs = jobs
        self.began = time.monotonic()

    def hear(self, event: Event) -> None:
        if event.trial is None:
            return
        if event.reading is not None and event.trial not in self.done and event.trial not in self.failed:
            self.under_way[event.trial] = event.reading
        if event.result is not None:
            self.done[event.trial] = event.result
            self.under_way.pop(event.trial, None)
        if event.failed:
            self.failed[event.trial] = event.failed
            self.under_way.pop(event.trial, None)

    def share(self, trial: Trial) -> float | None:
        """Of a trial that is under way; None while nothing tells."""
        reading, epochs = self.under_way.get(trial), self.comparison.epochs
        return min(1.0, reading.epoch / epochs) if reading and reading.epoch and epochs else None

    def left(self) -> float | None:
        """Seconds until all are done, as far as one can tell: after the first epoch, or the first trial."""
        lengths = [result.seconds for result in self.done.values()]
        lengths += [r.seconds / s for trial, r in self.under_way.items() if (s := self.share(trial)) and s > 0]
        if not lengths:
            return None
        each = sum(lengths) / len(lengths)
        ended = len(self.done) + len(self.failed)
        open_ = len(self.comparison.trials) - ended - sum(self.share(trial) or 0.0 for trial in self.under_way)
        return max(0.0, open_) * each / max(1, min(self.jobs, len(self.comparison.trials) - ended or 1))


class Lines(Progress):
    """For logs and pipes: a line when a trial ends."""

    def __enter__(self) -> Lines:
        for trial in self.reused:
            say(f"{trial}: finished before, {self._value(self.done[trial])}", anyway=True)
        return self

    def __exit__(self, *error: Any) -> None:
        pass

    def hear(self, event: Event) -> None:
        super().hear(event)
        if event.trial is None or event.reading is not None:
            return
        ended = f"{len(self.done) + len(self.failed)} of {len(self.comparison.trials)}"
        left = self.left()
        until = "" if not left else f"; about {duration(left)} to go"
        told = event.failed or f"{event.trial}: {self._value(self.done[event.trial])}"
        say(f"{told} ({ended}{until})", anyway=True)

    def _value(self, result: Result) -> str:
        name = self.comparison.metrics[0].name
        return f"{name} {result.metrics[name]:.4g} after {duration(result.seconds)}"


class Screen(Progress):
    """For terminals: runs by seeds, each cell its result or how far it is, and a bar."""

    def __enter__(self) -> Screen:
        from rich.console import Console
        from rich.live import Live

        self._live = Live(self._drawn(), console=Console(stderr=True), refresh_per_second=4, transient=True)
        self._live.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._live.update(self._drawn())
        self._live.__exit__(*error)

    def hear(self, event: Event) -> None:
        super().hear(event)
        self._live.update(self._drawn())

    def _drawn(self) -> Group:
        from rich import box
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        made = Table(box=box.SIMPLE_HEAD)
        made.add_column(self.comparison.metrics[0].name, no_wrap=True)
        for seed in self.comparison.seeds:
            made.add_column(f"seed {seed}", justify="right")
        for run in self.comparison.runs:
            made.add_row(run, *(self._cell(Trial(run, seed)) for seed in self.comparison.seeds))
        ended, total = len(self.done) + len(self.failed), len(self.comparison.trials)
        share = ended + sum(self.share(trial) or 0.0 for trial in self.under_way)
        left = self.left()
        until = "" if left is None else f", about {duration(left)} to go"
        told = f"{ended} of {total} runs, {duration(time.monotonic() - self.began)}{until}"
        below = Table.grid(padding=(0, 1))
        below.add_row(ProgressBar(total=total, completed=share, width=40), told)
        return Group(made, below)

    def _cell(self, trial: Trial) -> str:
        name = self.comparison.metrics[0].name
        if trial in self.done:
            value = f"{self.done[trial].metrics[name]:.4g}"
            return f"[dim]{value}[/dim]" if trial in self.reused else f"[bold]{value}[/bold]"
        if trial in self.failed:
            return "[red]failed[/red]"
        reading = self.under_way.get(trial)
        if reading is None:
            return ""
        share = self.share(trial)
        so_far = f"{reading.values[name]:.4g} " if name in reading.values else ""
        return so_far + ("..." if share is None else f"{100 * share:.0f} %")
