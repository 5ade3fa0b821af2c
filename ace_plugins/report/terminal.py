"""Prints runs to the terminal, with rich."""

from __future__ import annotations

import os
from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .charts import sparkline
from .record import Record
from .runs import SavedRun, to_number
from .tables import TableData, build_site_table, format_count, format_duration, format_number
from .trace import shorten_path
from .verdicts import RunOutcome, judge_saved

WIDTH = 500  # characters per line without a terminal, so that no name is broken and all can be searched for


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
    """Return a rich table with this data."""
    table = make_table(*data.headers, numbers=list(data.numbers))
    for row in data.rows:
        table.add_row(*map(escape, row))
    return table


def print_summary(record: Record) -> None:
    """Print the outcome of a run of this process to stderr."""
    out = open_console(stderr=True)
    outcome, errors = record.judge(), record.errors[:1] + record.errors[1:][-1:]
    steps = f"landed at step {record.steps:,}" if record.duals.landed else format_count(record.steps, "step")
    where = "" if record.folder is None else f", trace in {shorten_path(record.folder)}"
    out.print(f"ACE {outcome.mode}, {steps}{escape(where)}")
    _print_outcome(out, outcome)
    if errors:
        listed = ", ".join(f"{format_number(to_number(e['relative']), 3)} at step {e['step']:,}" for e in errors)
        out.print(f"equivariance error under {escape(errors[0]['group'])}, with branches, relative: {listed}")
    if outcome.advice:
        out.print(escape(outcome.advice))


def print_report(run: SavedRun) -> None:
    """Print a saved run to stdout."""
    out = open_console()
    outcome = judge_saved(run)
    progress = [f"{run.length:,} steps"]
    if run.duration:
        progress += [format_duration(run.duration), f"{format_number(run.length / run.duration, 3)} steps/s"]
    progress += ["finished"] if run.end is not None else []
    out.print(f"[bold]{escape(run.title)}[/]: {', '.join(progress)}")
    out.print(escape(str(run.folder)))
    for note in run.missing:
        out.print(f"[yellow]note[/]: {escape(note)}")
    _print_outcome(out, outcome, [sparkline(run.steps, gamma, 16) for gamma in run.values["gamma"]])
    for name, points, group in (("loss", run.loss, ""), ("equivariance error", run.errors, run.group)):
        if points:
            steps, values = zip(*points, strict=True)
            under = f" (relative, under {escape(group)})" if group else ""
            first, last = format_number(values[0], 3), format_number(values[-1], 3)
            out.print(f"{name}{under}: {first} {sparkline(steps, values)} {last}")
    for step, event in run.events:
        out.print(f"step {step:,}: {escape(event)}")
    if run.changed:
        out.print(f"settings: {escape(', '.join(f'{key} {value}' for key, value in run.changed.items()))}")
    if outcome.advice:
        out.print(escape(outcome.advice))


def _print_outcome(out: Console, outcome: RunOutcome, pictures: Sequence[str] = ()) -> None:
    if outcome.sites:
        out.print(render_table(build_site_table(outcome.sites, outcome.mode, pictures)), soft_wrap=False)
    for verdict, meaning in outcome.meanings.items():
        out.print(f"{escape(verdict)}: {escape(meaning)}")
