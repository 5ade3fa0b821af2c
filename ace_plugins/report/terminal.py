"""A run for the terminal: a table of layers with a line of each, and the verdicts in words."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.markup import escape

from .outcome import Outcome, outcome
from .run import Run
from .scales import columns, spans
from .tables import console, shown, table_of
from .words import duration, number

if TYPE_CHECKING:
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
