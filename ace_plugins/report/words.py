"""Numbers, lengths of time and counts, as people read them."""

from __future__ import annotations

import math

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
