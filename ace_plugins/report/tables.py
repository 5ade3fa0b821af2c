"""Formats numbers and builds tables as plain text, which other modules render in the terminal and the HTML page."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from .verdicts import SiteOutcome

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


def format_count(count: int, word: str) -> str:
    """Format a count with its word, in the plural if needed: ``1 step`` or ``1,200 steps``."""
    return f"{count:,} {word}{'' if count == 1 else 's'}"


@dataclass(frozen=True)
class TableData:
    """A table before it is rendered."""

    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    numbers: Collection[str] = ()  # headers of columns with numbers, which are aligned on the right
    optional: Collection[str] = ()  # headers of columns that narrow screens leave out

    def __str__(self) -> str:
        columns = list(zip(self.headers, *self.rows, strict=True))
        widths = [max(map(len, column)) for column in columns]
        lines = [
            "  ".join(
                cell.rjust(width) if header in self.numbers else cell.ljust(width)
                for cell, width, header in zip(row, widths, self.headers, strict=True)
            )
            for row in (self.headers, *self.rows)
        ]
        return "\n".join(line.rstrip() for line in lines)


def build_site_table(
    sites: Sequence[SiteOutcome], mode: str, pictures: Sequence[str] = (), heading: str = "over time"
) -> TableData:
    """Return the table of sites: name, gamma, an optional picture of gamma, numbers by mode, and the verdict.

    The numbers are the benefit of the branch on held-out samples and its p-value in mode auto, and lambda and the slack
    u, if there is any, in other modes. The column of verdicts is left out if there are none.
    """
    others_of = {"auto": ["benefit", "p"], "strict": ["lambda"], "scheduled": ["lambda"]}
    numbers = ["gamma", *others_of.get(mode, ["lambda", "u"])]
    judged = any(site.verdict for site in sites)
    drawn = [heading] if pictures else []
    headers = ["site", "gamma", *drawn, *numbers[1:], *(["verdict"] if judged else [])]
    rows = []
    for number, site in enumerate(sites):
        gamma, *others = map(format_number, (site.gamma, site.lambda_, site.u)[: len(numbers)])
        if mode == "auto":
            known = math.isfinite(site.p)
            percent = f"{round(100 * site.benefit, 1) + 0.0:.1f} %".replace("-", MINUS)  # 0.0 turns -0.0 into 0
            others = [percent, f"{site.p:.1g}"] if known else ["", ""]
        picture = [pictures[number]] if pictures else []
        rows.append([site.name, gamma, *picture, *others, *([site.verdict] if judged else [])])
    return TableData(headers, rows, numbers, optional=drawn)
