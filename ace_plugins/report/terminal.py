"""Prints runs to the terminal with rich: the summary at the end of a run, saved runs, and the live view of a run."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich import markup
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

from ..output import printable
from .record import Record
from .tables import TableData, build_site_table, format_duration, format_number, sparkline
from .trace import LINES, SavedRun, describe_progress, read_run, shorten_path, to_number
from .verdicts import RunOutcome, judge_saved

WIDTH = 500  # characters per line without a terminal: no name is broken, so a search finds every name
SECONDS = 1.0  # default time between two updates of the live view
QUIET = 60.0  # after this many seconds without a new line of the trace, the live view shows a note


def escape(text: str) -> str:
    """Escape rich markup and control characters in text that comes from files."""
    return markup.escape(printable(text))


def open_console(stderr: bool = False) -> Console:
    """Return a console that never breaks lines of text, so that they can be searched; tables fit the terminal."""
    console = Console(stderr=stderr, highlight=False, soft_wrap=True)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = WIDTH
    return console


def make_table(*columns: str, numbers: Sequence[str] = ()) -> Table:
    """Return an empty table. In a narrow terminal its cells wrap, except those of the first column, which has names."""
    table = Table(header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold", no_wrap=not table.columns)
        table.columns[-1].justify = "right" if column in numbers else "left"
    return table


def render_table(data: TableData) -> Table:
    """Return the table for the terminal, without its optional columns if the terminal is narrow."""
    data = data.fit(open_console().width)
    table = make_table(*data.headers, numbers=list(data.numbers))
    for row in data.rows:
        table.add_row(*map(escape, row))
    return table


def print_summary(record: Record) -> None:
    outcome = record.judge()
    landed_at = record.landed_at if record.duals.landed else None
    steps = describe_progress(record.steps, record.budget.total, landed_at)
    steps += ", interrupted" if record.interrupted else ""
    where = "" if record.folder is None else f", trace in {shorten_path(record.folder)}"
    parts = [f"ACE {outcome.mode}, {steps}{escape(where)}"]
    if errors := record.errors:
        listed = ", ".join(f"{format_number(to_number(e['relative']), 3)} at step {e['step']:,}" for e in errors)
        parts.append(f"equivariance error under {escape(errors[0]['group'])}, with branches, relative: {listed}")
    _print(open_console(stderr=True), [*parts, *_describe_outcome(outcome)])


def print_report(run: SavedRun) -> None:
    _print(open_console(), draw_run(run))


def watch_run(folder: Path, *, seconds: float = SECONDS) -> None:
    """Show a run in the terminal while it trains, until Ctrl-C. Lines that do not fit the terminal are cut off."""
    with Live(auto_refresh=False) as live:
        while True:
            run = read_run(folder)
            parts = draw_run(run)
            silence = time.time() - (folder / LINES).stat().st_mtime if run.lines else 0.0
            if run.end is None and silence > QUIET:
                parts.insert(2, f"[yellow]no new line in the trace for {format_duration(silence)}[/]")
            live.update(Group(*parts), refresh=True)
            time.sleep(seconds)


def draw_run(run: SavedRun) -> list[str | Table]:
    """Return the lines (rich markup) and the table that describe a run."""
    outcome = judge_saved(run)
    progress = [run.progress]
    if run.duration:
        progress += [format_duration(run.duration), f"{format_number(run.rate, 3)} steps/s"]
    if run.left is not None:
        progress.append(f"{format_duration(run.left)} left")
    progress += [run.state] if run.end is not None else []
    parts: list[str | Table] = [f"[bold]{escape(run.title)}[/]: {', '.join(progress)}", escape(str(run.folder))]
    parts += [f"[yellow]note[/]: {escape(note)}" for note in run.missing]
    for name, points, group in (("loss", run.curve("loss"), ""), ("equivariance error", run.curve("error"), run.group)):
        if points:
            steps, values = zip(*points, strict=True)
            under = f" (relative, under {escape(group)})" if group else ""
            first, last = format_number(values[0], 3), format_number(values[-1], 3)
            parts.append(f"{name}{under}: {f'{first} {sparkline(steps, values)} {last}' if len(points) > 1 else last}")
    parts += [f"step {step:,}: {escape(event)}" for step, event in run.events]
    if run.changed:
        parts.append(f"settings: {escape(', '.join(f'{key} {value}' for key, value in run.changed.items()))}")
    left = [escape(run.symmetry["sentence"])] if run.symmetry else []
    return [*parts, *_describe_outcome(outcome, run), *left]


def _describe_outcome(outcome: RunOutcome, run: SavedRun | None = None) -> list[str | Table]:
    table = [render_table(build_site_table(outcome, run))] if outcome.sites else []
    meanings = [escape(f"{verdict}: {meaning}") for verdict, meaning in outcome.meanings.items()]
    return [*table, *meanings, *([escape(outcome.advice)] if outcome.advice else [])]


def _print(out: Console, parts: Iterable[str | Table]) -> None:
    for part in parts:
        out.print(part, soft_wrap=isinstance(part, str))
