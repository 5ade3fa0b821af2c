"""Numbers, lengths of time and counts, as people read them.

What a run has come to, as a table.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .verdicts import meaning

MINUS = "\N{MINUS SIGN}"


def number(value: float, digits: int = 4) -> str:
    """For people: four digits that count, a real minus sign, and words where there is no number."""
    if not math.isfinite(value):
        return "not finite"
    text = f"{value:.{digits}g}"
    if "e" in text:
        mantissa, _, exponent = text.partition("e")
        text = f"{mantissa}e{int(exponent)}"
    elif abs(value) >= 1000:
        text = f"{float(text):,.0f}"
    return "0" if text in ("0", "-0") else text.replace("-", MINUS)


def duration(seconds: float) -> str:
    """For people: ``42 s``, ``7 min``, ``2.5 h``."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def plural(count: int, word: str) -> str:
    return f"{count:,} {word}{'' if count == 1 else 's'}"


WIDEST = 500
"""Letters of a table where there is no terminal to fit it to: a name that is broken cannot be searched for."""


def console(stderr: bool = False) -> Console:
    """Lines are as long as they are, so that people can search and paste them; tables fit the terminal."""
    made = Console(stderr=stderr, highlight=False, soft_wrap=True)
    if not made.is_terminal and "COLUMNS" not in os.environ:
        made.width = WIDEST
    return made


def shown(mode: str) -> tuple[str, ...]:
    """What there is to see of a site. Strict and scheduled mode have no slack."""
    return ("gamma", "lambda", "u") if mode in ("bounded", "resilient") else ("gamma", "lambda")


def table_of(*columns: str, numbers: Sequence[str] = ()) -> Table:
    table = Table(header_style="bold")
    for column in columns:
        # Names stay whole: they are what people type and search for.
        table.add_column(
            column,
            justify="right" if column in numbers else "left",
            overflow="fold",
            no_wrap=column in ("name", "site", *numbers),
        )
    return table


def print_run(run: Mapping[str, Any]) -> None:
    out = console(stderr=True)
    steps = f"{run['steps']:,} step{'' if run['steps'] == 1 else 's'}"
    steps = f"landed at step {run['steps']:,}" if run["landed"] else steps
    where = f", trace in {run['folder']}" if run["folder"] else ""
    out.print(f"ACE {run['mode']}, {steps}{escape(where)}")
    keys = shown(run["mode"])
    table = table_of("site", *keys, "verdict", numbers=keys)
    for site in run["sites"]:
        numbers = (_number(site[key], ".4f") for key in keys)
        table.add_row(escape(site["name"]), *numbers, site["verdict"])
    out.print(table, soft_wrap=False)
    for word in dict.fromkeys(site["verdict"] for site in run["sites"]):
        out.print(f"{word}: {escape(meaning(word, run['mode']))}")
    if run["errors"]:
        told = ", ".join(f"{_number(error['relative'], '.3g')} at step {error['step']:,}" for error in run["errors"])
        out.print(f"equivariance error under {run['errors'][0]['group']}, with branches, relative: {told}")
    if run["verdict"]:
        out.print(escape(run["verdict"]))


def _number(value: float | None, form: str) -> str:
    return "not finite" if value is None else format(value, form)
