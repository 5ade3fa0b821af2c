"""Formats numbers, series and tables as plain text, for the terminal and the HTML page."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from .trace import SavedRun
from .verdicts import RunOutcome

BARS = "▁▂▃▄▅▆▇█"
MINUS = "\N{MINUS SIGN}"


def format_number(value: float, digits: int = 4) -> str:
    """Format a number to the given number of significant digits, with a typographic minus sign."""
    if not math.isfinite(value):
        return "not finite"
    text = f"{value:.{digits}g}"
    if "e" in text:
        mantissa, _, exponent = text.partition("e")
        text = f"{mantissa}e{int(exponent)}"
    elif abs(value) >= 1000:
        text = f"{float(text):,.0f}"
    return "0" if text in ("0", "-0") else text.replace("-", MINUS)


def format_duration(seconds: float) -> str:
    """Format a duration in seconds, minutes or hours: ``42 s``, ``7 min`` or ``2.5 h``."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def find_axis_start(first: float, last: float) -> float:
    """Return the step at which the axis starts: 0, or the first step of a run that resumed from a checkpoint."""
    return 0.0 if first <= 0.05 * last else first


def average_spans(steps: Sequence[int], values: Sequence[float], count: int) -> list[float]:
    """Return the means of the values in ``count`` equal spans of the run.

    A span that contains a value that is not finite has no finite mean. An empty span repeats the mean before it."""
    last = max(steps, default=0)
    low = find_axis_start(min(steps, default=0), last)
    size = max(1.0, last - low) / count
    spans: list[list[float]] = [[] for _ in range(count)]
    for step, value in zip(steps, values, strict=True):
        spans[min(count - 1, max(0, math.ceil((step - low) / size) - 1))].append(value)
    means, mean = [], values[0] if values else math.nan
    for span in spans:
        mean = sum(span) / len(span) if span else mean
        means.append(mean)
    return means


def sparkline(steps: Sequence[int], values: Sequence[float], width: int = 24) -> str:
    """Return a series as one line of text, scaled from its lowest to its highest value; x marks non-finite values."""
    if not values:
        return ""
    means = average_spans(steps, values, min(width, len(values)))
    finite = [mean for mean in means if math.isfinite(mean)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((mean - low) * scale)] if math.isfinite(mean) else "x" for mean in means)


@dataclass(frozen=True)
class TableData:
    """A table before it is rendered."""

    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    numbers: Collection[str] = ()  # headers of columns with numbers, which are aligned on the right
    optional: Collection[str] = ()  # headers of columns that narrow screens leave out

    @property
    def widths(self) -> list[int]:
        """Number of characters of the longest cell of each column."""
        return [max(map(len, column)) for column in zip(self.headers, *self.rows, strict=True)]

    def fit(self, width: int) -> TableData:
        """Return the table without its optional columns, if it is wider than so many characters with its frame."""
        if sum(self.widths) + 3 * len(self.headers) + 1 <= width:
            return self
        kept = [number for number, header in enumerate(self.headers) if header not in self.optional]
        rows = [[row[number] for number in kept] for row in (self.headers, *self.rows)]
        return TableData(rows[0], rows[1:], self.numbers)

    def __str__(self) -> str:
        widths = self.widths
        lines = []
        for row in (self.headers, *self.rows):
            cells = zip(row, widths, self.headers, strict=True)
            padded = [cell.rjust(width) if head in self.numbers else cell.ljust(width) for cell, width, head in cells]
            lines.append("  ".join(padded).rstrip())
        return "\n".join(lines)


def build_site_table(outcome: RunOutcome, run: SavedRun | None = None) -> TableData:
    """Return the table of sites. It has the columns that the mode uses, and gamma over time for a saved run."""
    sites = outcome.sites
    columns = {"site": [site.name for site in sites], "gamma": [format_number(site.gamma) for site in sites]}
    if run is not None:
        steps, values = run.per_site("gamma")
        columns["over time"] = [sparkline(steps, gamma, 16) for gamma in values]
    if outcome.mode == "auto":
        columns["benefit"] = [_format_percent(site.benefit) if math.isfinite(site.benefit) else "" for site in sites]
        columns["p"] = [f"{site.p:.1g}" if math.isfinite(site.p) else "" for site in sites]
    else:
        columns["lambda"] = [format_number(site.lambda_) for site in sites]
    if outcome.mode in ("resilient", "bounded"):
        columns["u"] = [format_number(site.u) for site in sites]
    if any(site.verdict for site in sites):
        columns["verdict"] = [site.verdict for site in sites]
    rows = list(zip(*columns.values(), strict=True))
    return TableData(list(columns), rows, ("gamma", "benefit", "p", "lambda", "u"), optional=["over time"])


def build_left_table(rows: Sequence[tuple[str, float, float, float, str]]) -> TableData:
    """Return the table of subgroups with name, error, both ends of its interval, and verdict."""
    cells = [[name, f"{error:.2f}", f"{low:.2f} to {high:.2f}", verdict] for name, error, low, high, verdict in rows]
    return TableData(["subgroup", "error", "95 %", "verdict"], cells, numbers=["error"], optional=["95 %"])


def _format_percent(share: float) -> str:
    return f"{round(100 * share, 1) + 0.0:.1f} %".replace("-", MINUS)  # adding 0.0 turns -0.0 into 0
