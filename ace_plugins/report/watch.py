"""A run for the terminal: a table of layers with a line of each, and the verdicts in words.

A run under way, watched from another shell: the trace is followed as it grows.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.markup import escape

from .charts import columns, spans
from .runs import Run, newest, opened
from .tables import console, duration, number, shown, table_of
from .trace import relative
from .verdicts import Outcome, outcome

if TYPE_CHECKING:
    from rich.console import Console, Group
    from rich.table import Table


BARS = "▁▂▃▄▅▆▇█"
WIDE = 24
"""Letters of a line."""


def sparkline(steps: Sequence[int], values: Sequence[float], wide: int = WIDE) -> str:
    """A series in one line of text, from its lowest to its highest; x where it is not finite."""
    if not values:
        return ""
    wide = min(wide, len(values))
    means = columns(spans(steps, wide), values, wide)
    finite = [mean for mean in means if math.isfinite(mean)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    return "".join(_bar(mean, low, high) for mean in means)


def _bar(value: float, low: float, high: float) -> str:
    if not math.isfinite(value):
        return "x"
    return BARS[round((value - low) / (high - low) * (len(BARS) - 1))] if high > low else BARS[0]


def state(run: Run) -> str:
    """Where it is, in one line."""
    told = [f"{run.length:,} steps"]
    if run.lasted:
        told += [duration(run.lasted), f"{number(run.length / run.lasted, 3)} steps/s"]
    if run.end is not None:
        told.append("finished")
    return ", ".join(told)


def print_report(run: Run) -> None:
    """To stdout."""
    out = console()
    found = outcome(run)
    out.print(f"[bold]{escape(run.title)}[/]: {escape(state(run))}")
    out.print(escape(str(run.folder)))
    for text in run.missing:
        out.print(f"[yellow]note[/]: {escape(text)}")
    if found.layers:
        out.print(_layers(run, found), soft_wrap=False)
    for word, text in found.meanings.items():
        out.print(f"{escape(word)}: {escape(text)}")
    for what, points, more in (("loss", run.loss, ""), ("equivariance error", run.errors, run.group)):
        if points:
            steps, values = [step for step, _ in points], [value for _, value in points]
            under = f" (relative, under {escape(more)})" if more else ""
            out.print(f"{what}{under}: {number(values[0], 3)} {sparkline(steps, values)} {number(values[-1], 3)}")
    for step, text in run.events:
        out.print(f"step {step:,}: {escape(text)}")
    changed = ", ".join(f"{key} {value}" for key, value in run.changed().items())
    if changed:
        out.print(f"settings: {escape(changed)}")
    if found.whole:
        out.print(escape(found.whole))


def _layers(run: Run, found: Outcome) -> Table:
    more = shown(run.mode)[1:]
    table = table_of("site", "gamma", "over time", *more, "verdict", numbers=("gamma", *more))
    for layer, gamma in zip(found.layers, run.values["gamma"], strict=True):
        table.add_row(
            escape(layer.name),
            number(layer.gamma),
            sparkline(run.steps, gamma, 16),
            *(number({"lambda": layer.lambda_, "u": layer.u}[name]) for name in more),
            escape(layer.verdict),
        )
    return table


SECONDS = 1.0
"""Between two looks at the trace."""
RECENT = 30
"""Lines that the pace is taken from."""
QUIET = 60.0
"""Seconds without a line after which people are told so."""
BAR = 16
LOOK_AGAIN = 5
"""Looks between two at whether run.json has come, or a newer run."""


class Watch:
    """What is known of the run, brought up to date by every look."""

    def __init__(self, folder: Path, *, runs: Path | None = None, clock: Callable[[], float] = time.time) -> None:
        """``runs``: the folder in which a newer run takes the place of this one."""
        self.runs = runs
        self._clock = clock
        self._looks = 0
        self._open(folder)

    def _open(self, folder: Path) -> None:
        self.folder = folder
        self.run, self._follower = opened(folder)
        try:
            self._heard = self._follower.path.stat().st_mtime
        except OSError:
            self._heard = self._clock()

    def look(self) -> None:
        """Read what is new; go over to a newer run if there is one."""
        self._looks += 1
        if self.runs is not None and self._looks % LOOK_AGAIN == 0:
            found = newest(self.runs)
            if found is not None and found.name != self.folder.name:
                self._open(found)
        if not self.run.steps:  # its names and settings may have come only now
            self._open(self.folder)
            return
        lines = self._follower.poll()
        if lines:
            self.run.add(lines)
            self._heard = self._clock()

    def pace(self) -> float:
        """Steps a second of late; NaN if that is not known."""
        run = self.run
        first = max(0, len(run.steps) - RECENT)
        if len(run.steps) < 2:
            return math.nan
        seconds = run.seconds[-1] - run.seconds[first]
        return (run.steps[-1] - run.steps[first]) / seconds if seconds > 0 else math.nan

    def silence(self) -> float:
        """Seconds since the last line was written."""
        return self._clock() - self._heard

    def drawn(self, rows: int | None = None) -> Group:
        """The state, for rich. Of more layers than ``rows``, those with the largest |gamma|."""
        from rich.console import Group
        from rich.text import Text

        run = self.run
        parts: list[Text | Table] = [Text.from_markup(f"[bold]{escape(run.title)}[/]  {escape(relative(run.folder))}")]
        parts.append(Text.from_markup(self._state()))
        if run.loss:
            steps, values = [step for step, _ in run.loss], [value for _, value in run.loss]
            parts.append(Text(f"loss {number(values[-1])}  {sparkline(steps, values, 40)}"))
        if run.errors:
            parts.append(Text(f"equivariance error {number(run.errors[-1][1], 3)} at step {run.errors[-1][0]:,}"))
        if run.steps:
            parts.append(self._table(rows))
            left = len(run.sites) - len(self._shown(rows))
            if left:
                parts.append(Text(f"and {left} layers with a smaller |gamma|"))
        return Group(*parts)

    def line(self) -> str:
        """The state in one line of markup."""
        run = self.run
        told = [f"{escape(run.name)}: {self._state()}"]
        if run.loss:
            told.append(f"loss {number(run.loss[-1][1])}")
        gamma = [abs(value) for value in run.now("gamma") if math.isfinite(value)]
        if gamma:
            told.append(f"|gamma| up to {number(max(gamma))}")
        return ", ".join(told)

    def _state(self) -> str:
        run = self.run
        if not run.steps:
            return "waiting for the first line of the trace"
        pace = self.pace()
        told = [f"step {run.steps[-1]:,}", duration(run.lasted)]
        if math.isfinite(pace):
            told.append(f"{number(pace, 3)} steps/s")
        if run.end is not None:
            told.append("[green]finished[/]")
        elif self.silence() > QUIET:
            told.append(f"[yellow]no news for {duration(self.silence())}[/]")
        return ", ".join(told)

    def _shown(self, rows: int | None) -> list[int]:
        gamma = self.run.now("gamma")
        every = range(len(gamma))
        if rows is None or len(gamma) <= rows:
            return list(every)
        # What is not finite comes first: that is news.
        order = sorted(every, key=lambda n: -abs(gamma[n]) if math.isfinite(gamma[n]) else -math.inf)
        return sorted(order[:rows])

    def _table(self, rows: int | None) -> Table:
        from rich import box
        from rich.table import Table

        run = self.run
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column("site", no_wrap=True)
        table.add_column("gamma", justify="right", no_wrap=True)
        table.add_column("", no_wrap=True)
        table.add_column("lambda", justify="right", no_wrap=True)
        table.add_column("u", justify="right", no_wrap=True)
        gamma, lambda_, u = (run.now(name) for name in ("gamma", "lambda", "u"))
        whole = max((abs(value) for value in run.first("gamma") + gamma if math.isfinite(value)), default=1.0) or 1.0
        for n in self._shown(rows):
            table.add_row(
                escape(run.sites[n]), number(gamma[n]), bar(gamma[n], whole), number(lambda_[n]), number(u[n])
            )
        return table


def bar(value: float, whole: float) -> str:
    """|value| beside ``whole``, in letters; - for a value below 0."""
    if not math.isfinite(value):
        return ""
    filled = min(BAR, math.ceil(BAR * abs(value) / whole))
    return ("━" * filled).ljust(BAR) + ("-" if value < 0 else " ")


def follow(watch: Watch, *, seconds: float = SECONDS, until: Callable[[], bool] = lambda: False) -> None:
    """Show the run until Ctrl-C, or until ``until`` says so."""
    from rich.console import Console
    from rich.live import Live

    console = Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        _tell(watch, console, seconds, until)
        return
    with Live(console=console, auto_refresh=False, screen=False) as live:
        while not until():
            live.update(watch.drawn(max(3, console.height - 9)), refresh=True)
            time.sleep(seconds)
            watch.look()


def _tell(watch: Watch, console: Console, seconds: float, until: Callable[[], bool]) -> None:
    """A line for every few steps, for logs and pipes."""
    told = None
    while not until():
        line = watch.line()
        if line != told:
            console.print(line)
            told = line
        time.sleep(seconds)
        watch.look()


def print_once(run: Watch) -> None:
    """The state now, to stdout."""
    from rich.console import Console

    Console(highlight=False).print(run.drawn())
