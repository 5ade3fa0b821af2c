"""Helpers for the demo commands of adapters: threads, progress, results and pictures."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table


@contextmanager
def one_thread() -> Iterator[None]:
    """Limit torch to one CPU thread inside the block.

    Small models are not faster with more threads, and with one thread sums have the same order on every machine.

    Yields:
        None.
    """
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def progress_lines(total: int) -> Iterator[Callable[[str], None]]:
    """Report progress on stderr: as a bar if stderr is a terminal, otherwise as one line per step.

    Args:
        total: Number of steps that will be reported.

    Yields:
        A function to call with one line of text after each step.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda line: click.echo(line, err=True)
        return
    columns = (BarColumn(bar_width=24), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("", total=total)
        yield lambda line: bar.update(task, advance=1, description=line)


def print_results(table: Table, conclusions: Sequence[str], picture: Path) -> None:
    """Print a demo's results: the table, one paragraph per conclusion and the path of the picture.

    Args:
        table: Results of the runs.
        conclusions: Paragraphs of plain text, without rich markup.
        picture: File that the demo has drawn.
    """
    console = Console()
    console.print(table)
    for sentence in conclusions:
        console.print(f"\n{sentence}", highlight=False, markup=False)
    click.echo(f"\nPicture: {picture}")


def style_axes(axes: Any) -> None:
    """Give matplotlib axes a light grid, behind the data, and no frame at the top and on the right.

    Args:
        axes: The matplotlib ``Axes`` to change.
    """
    axes.grid(True, color="0.92")
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
