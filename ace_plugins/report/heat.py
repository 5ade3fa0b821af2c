"""Heat maps as SVG, for more layers than lines can show: a row for each layer, time from left to right."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from .lines import LETTER, WIDTH, across_ticks, shortened, svg
from .scales import Scale, beginning, columns, spans
from .words import number

ACROSS = 120
"""Columns of a map."""
LEVELS = 8
"""Shades on either side of 0, in the page's style: p1 to p8 above 0, n1 to n8 below, z for 0, x for not finite."""
TOP, BOTTOM = 26.0, 24.0
TALL = 270.0
"""Of all rows together, while they can be that thin."""


def heat_map(title: str, names: Sequence[str], steps: Sequence[int], values: Sequence[Sequence[float]]) -> str:
    """``values``: of every site one for every step. The strongest shade is the largest absolute value."""
    places = spans(steps, ACROSS)
    rows = [columns(places, site, ACROSS) for site in values]
    found = [value for row in rows for value in row if math.isfinite(value)]
    most = max(map(abs, found), default=0.0)
    tall = max(4.0, min(13.5, TALL / len(rows)))
    labels = [shortened(name, 16) for name in names]
    left = 8 + LETTER * max(map(len, labels))
    wide = (WIDTH - left - 8) / ACROSS
    paths: dict[str, list[str]] = {}
    for place, row in enumerate(rows):
        shades = [_shade(value, most) for value in row]
        begun = 0
        for end in range(1, ACROSS + 1):
            if end == ACROSS or shades[end] != shades[begun]:  # neighbours of one shade are one stroke
                move = f"M{begun} {place}h{end - begun}v1h{begun - end}z"
                paths.setdefault(shades[begun], []).append(move)
                begun = end
    drawn = "".join(f'<path class="{shade}" d="{"".join(moves)}"/>' for shade, moves in sorted(paths.items()))
    parts = [f'<g class="heat" transform="translate({left:.1f} {TOP:g}) scale({wide:.4f} {tall:.3f})">{drawn}</g>']
    every = math.ceil(13 / tall)
    for place, (name, label) in enumerate(zip(names, labels, strict=True)):
        if place % every == 0:
            base = TOP + (place + 0.5) * tall + 4
            told = f"{escape(label)}<title>{escape(name)}</title>"
            parts.append(f'<text class="left" x="{left - 5:.1f}" y="{base:.1f}">{told}</text>')
    bottom = TOP + len(rows) * tall
    x = Scale(beginning(min(steps), max(steps)), max(steps), left, WIDTH - 8)
    parts += [across_ticks(x, bottom + 16, "step"), _legend(min(found, default=0.0) < 0, most)]
    return svg(title, WIDTH, math.ceil(bottom + BOTTOM), parts)


def _shade(value: float, most: float) -> str:
    if not math.isfinite(value):
        return "x"
    # By the root, so that small values are seen beside large ones.
    level = round(LEVELS * math.sqrt(abs(value) / most)) if most else 0
    return "z" if level == 0 else f"{'p' if value > 0 else 'n'}{level}"


def _legend(signed: bool, most: float) -> str:
    """The shades from the lowest to the highest value, above the map on the right."""
    shades = [*(f"n{k}" for k in range(LEVELS, 0, -1) if signed), "z", *(f"p{k}" for k in range(1, LEVELS + 1))]
    wide, high = 8.0, number(most, 3)
    end = WIDTH - 8 - LETTER * len(high) - 6
    start = end - wide * len(shades)
    boxes = "".join(
        f'<rect class="{shade}" x="{start + k * wide:.1f}" y="6" width="{wide:g}" height="9"/>'
        for k, shade in enumerate(shades)
    )
    low = number(-most, 3) if signed else "0"
    return (
        f'<text class="left" x="{start - 5:.1f}" y="14.5">{low}</text><g class="heat">{boxes}</g>'
        f'<text x="{end + 5:.1f}" y="14.5">{high}</text>'
    )
