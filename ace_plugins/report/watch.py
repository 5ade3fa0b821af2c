"""Shows a run in progress from another shell, by following its trace."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.text import Text

from ..errors import AceError
from .charts import sparkline
from .runs import QUANTITIES, find_newest, open_run
from .tables import build_site_table, format_duration, format_number
from .terminal import render_table
from .trace import shorten_path
from .verdicts import SiteOutcome

SECONDS = 1.0  # default time between two reads of the trace
RECENT = 30  # number of last lines of the trace that the steps per second are computed from
QUIET = 60.0  # seconds without a new line after which the view shows how long there has been none
LOOKS = 5  # number of reads of the trace between two searches for a newer run
BAR = 16  # length of the longest bar, in characters


class RunWatcher:
    """The state of a run, updated by every `look` at its trace."""

    def __init__(self, folder: Path, *, runs: Path | None = None, clock: Callable[[], float] = time.time) -> None:
        """Open a run. If ``runs`` is given, a newer run in the folder ``runs`` replaces this run."""
        self.runs = runs
        self._clock = clock
        self._looks = 0
        self._open(folder)

    def _open(self, folder: Path) -> None:
        self.folder = folder
        self.run, self._reader = open_run(folder)
        try:
            self._heard = self._reader.path.stat().st_mtime
        except OSError:
            self._heard = self._clock()

    def look(self) -> None:
        """Read new lines, and switch to a newer run if there is one."""
        self._looks += 1
        if self.runs is not None and self._looks % LOOKS == 0:
            found = find_newest(self.runs)
            if found is not None and found.name != self.folder.name:
                with suppress(AceError):  # run.json is being written; the next look reads it
                    self._open(found)
        if lines := self._reader.read_new():
            self.run.add(lines)
            self._heard = self._clock()

    def draw(self, rows: int | None = None) -> Group:
        """Return the state for printing with rich. At most ``rows`` sites are shown: those with the largest |gamma|."""
        run = self.run
        parts = [
            Text.from_markup(f"[bold]{escape(run.title)}[/]  {escape(shorten_path(run.folder))}"),
            Text.from_markup(self._describe_state()),
        ]
        if run.loss:
            steps, values = zip(*run.loss, strict=True)
            parts.append(Text(f"loss {format_number(values[-1])}  {sparkline(steps, values, 40)}"))
        if run.errors:
            step, error = run.errors[-1]
            parts.append(Text(f"equivariance error {format_number(error, 3)} at step {step:,}"))
        if not run.steps:
            return Group(*parts)
        sites = [SiteOutcome(*values) for values in zip(run.sites, *map(run.last, QUANTITIES), strict=True)]
        starts = [gamma[0] for gamma in run.values["gamma"]]
        full = max((abs(v) for v in [*starts, *run.last("gamma")] if math.isfinite(v)), default=0.0) or 1.0
        shown = sites
        if rows is not None and len(sites) > rows:  # gammas that are not finite come first
            order = sorted(sites, key=lambda site: -abs(site.gamma) if math.isfinite(site.gamma) else -math.inf)
            shown = [site for site in sites if site in order[:rows]]
        table = render_table(build_site_table(shown, run.mode, [draw_bar(site.gamma, full) for site in shown], ""))
        table.box, table.pad_edge = box.SIMPLE_HEAD, False
        left = len(sites) - len(shown)
        return Group(*parts, table, *([Text(f"and {left} layers with a smaller |gamma|")] if left else []))

    def describe(self) -> str:
        """Return the state as one line of markup."""
        run = self.run
        parts = [f"{escape(run.name)}: {self._describe_state()}"]
        if run.loss:
            parts.append(f"loss {format_number(run.loss[-1][1])}")
        sizes = [abs(value) for value in run.last("gamma") if math.isfinite(value)]
        if sizes:
            parts.append(f"|gamma| up to {format_number(max(sizes))}")
        return ", ".join(parts)

    def _describe_state(self) -> str:
        run = self.run
        if not run.steps:
            return "waiting for the first line of the trace"
        parts = [f"step {run.steps[-1]:,}", format_duration(run.duration)]
        first, silence = max(0, len(run.steps) - RECENT), self._clock() - self._heard
        seconds = run.seconds[-1] - run.seconds[first]
        if seconds > 0:
            parts.append(f"{format_number((run.steps[-1] - run.steps[first]) / seconds, 3)} steps/s")
        if run.end is not None:
            parts.append("[green]finished[/]")
        elif silence > QUIET:
            parts.append(f"[yellow]no new line for {format_duration(silence)}[/]")
        return ", ".join(parts)


def draw_bar(value: float, full: float) -> str:
    """Return a bar whose length is |value| relative to ``full``; a "-" after the bar marks a negative value."""
    if not math.isfinite(value):
        return ""
    filled = min(BAR, math.ceil(BAR * abs(value) / full))
    return ("━" * filled).ljust(BAR) + ("-" if value < 0 else " ")


def follow(watcher: RunWatcher, *, seconds: float = SECONDS, until: Callable[[], bool] = lambda: False) -> None:
    """Show the run until Ctrl-C, or until ``until`` returns True. Without a terminal, print a line for each change."""
    console = Console(highlight=False, soft_wrap=True)
    if console.is_terminal:
        with Live(console=console, auto_refresh=False) as live:
            while not until():
                live.update(watcher.draw(max(3, console.height - 9)), refresh=True)
                time.sleep(seconds)
                watcher.look()
        return
    printed = ""
    while not until():
        line = watcher.describe()
        if line != printed:
            console.print(line)
            printed = line
        time.sleep(seconds)
        watcher.look()


def print_once(watcher: RunWatcher) -> None:
    """Print the state to stdout."""
    Console(highlight=False).print(watcher.draw())
