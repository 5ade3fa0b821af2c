"""Line charts as SVG. Every line is labelled where it ends, so that nobody looks from a legend to a line and back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from .scales import Point, Scale, beginning, scale_of, smoothed, thinned, wants_log
from .words import number

WIDTH, HEIGHT = 420.0, 230.0
LEFT, TOP, BOTTOM = 46.0, 10.0, 27.0
LETTER = 6.4
"""The width of a letter beside a line."""
LABEL = 18
"""Letters of a label at most."""
AWAY = 16.0
"""From the end of a line to its label."""
GAP = 13.0
"""Between two labels, from base line to base line."""
ROOM = 55.0
"""For a number below a chart."""
MANY = 240
"""Points from which noise hides where a line goes."""
COLOURS = 8
"""That the page's style has."""
LINES_AT_MOST = 8
"""More lines than that cannot be told apart."""


@dataclass(frozen=True)
class Series:
    name: str
    points: Sequence[Point]
    noisy: bool = False
    """Drawn as the middle of it, with the noise pale behind."""


def shortened(name: str, most: int = LABEL) -> str:
    """Both ends of a long name: layers differ there."""
    if len(name) <= most:
        return name
    head = (most - 1) // 3
    return f"{name[:head]}\N{HORIZONTAL ELLIPSIS}{name[len(name) - (most - 1 - head) :]}"


def line_chart(
    title: str,
    series: Sequence[Series],
    *,
    zero: bool = False,
    marks: bool = False,
    events: Sequence[Point] = (),
    across: str = "step",
) -> str:
    """An SVG picture. ``zero``: 0 is on the axis; ``marks``: every point gets a dot; ``events``: steps to mark."""
    series = [each for each in series if any(math.isfinite(value) for _, value in each.points)]
    values = [value for each in series for _, value in each.points]
    log = not zero and wants_log(values)
    ends = [next(point for point in reversed(each.points) if math.isfinite(point[1])) for each in series]
    labels = [
        shortened(each.name) if len(series) > 1 else number(end[1], 3) for each, end in zip(series, ends, strict=True)
    ]
    right = max(50.0, AWAY + 6 + LETTER * max(map(len, labels), default=0))
    first = min((each.points[0][0] for each in series), default=0.0)
    last = max((point[0] for each in series for point in each.points), default=1.0)
    x = Scale(beginning(first, last), max(last, first + 1), LEFT, WIDTH - right)
    y = scale_of(values, HEIGHT - BOTTOM, TOP, log=log, zero=zero)
    parts = [_axes(x, y, across)]
    parts += [_event(x(step)) for step, _ in events]
    for colour, each in enumerate(series):
        parts.append(_line(each, x, y, colour % COLOURS, marks))
    # A line that ends early has its label there: a long leader would look like more of it.
    beside = [n for n, end in enumerate(ends) if x(end[0]) > x.end - 40]
    places = dict(zip(beside, spread([y(ends[n][1]) + 4 for n in beside], TOP + 8, HEIGHT - BOTTOM + 2), strict=True))
    for n, (each, end, label) in enumerate(zip(series, ends, labels, strict=True)):
        kind = f"c{n % COLOURS}"
        place = places.get(n, y(end[1]) + 4)
        near = x.end + AWAY if n in places else x(end[0]) + 6
        if n in places and (abs(place - 4 - y(end[1])) > 3 or x(end[0]) < x.end - 4):
            line = f"M{x(end[0]) + 1:.1f} {y(end[1]):.1f}L{near - 3:.1f} {place - 4:.1f}"
            parts.append(f'<path class="leader {kind}" d="{line}"/>')
        told = f"{escape(label)}<title>{escape(each.name)}: {number(end[1])}</title>"
        parts.append(f'<text class="{kind}" x="{near:.1f}" y="{place:.1f}">{told}</text>')
    return svg(title, WIDTH, HEIGHT, parts)


def svg(title: str, width: float, height: float, parts: Sequence[str]) -> str:
    told = escape(title, quote=True)
    return f'<svg viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{told}">{"".join(parts)}</svg>'


def spread(places: Sequence[float], top: float, bottom: float) -> list[float]:
    """Labels as near to their lines as they can be without touching."""
    order = sorted(range(len(places)), key=lambda i: places[i])
    gap = min(GAP, (bottom - top) / max(1, len(places) - 1))
    groups: list[tuple[float, int]] = []  # the middle of the labels that touch, and how many they are
    for i in order:
        middle, count = places[i], 1
        while groups and middle - (count - 1) * gap / 2 < groups[-1][0] + (groups[-1][1] + 1) * gap / 2:
            before, others = groups.pop()
            middle, count = (middle * count + before * others) / (count + others), count + others
        half = (count - 1) * gap / 2
        groups.append((min(max(middle, top + half), bottom - half), count))
    placed = [middle + (k - (count - 1) / 2) * gap for middle, count in groups for k in range(count)]
    made = [0.0] * len(places)
    for i, place in zip(order, placed, strict=True):
        made[i] = place
    return made


def _axes(x: Scale, y: Scale, across: str) -> str:
    parts = []
    for tick in y.ticks():
        base = y(tick)
        kind = "grid zero" if tick == 0 else "grid"
        parts.append(f'<path class="{kind}" d="M{x.start:.1f} {base:.1f}H{x.end:.1f}"/>')
        parts.append(f'<text class="left" x="{x.start - 6:.1f}" y="{base + 4:.1f}">{number(tick, 3)}</text>')
    return "".join(parts) + across_ticks(x, y.start + 19, across)


def across_ticks(x: Scale, base: float, across: str) -> str:
    """The numbers below a chart; the last has the unit. One that would touch the next is left out."""
    ticks = [tick for tick in x.ticks(max(2, int((x.end - x.start) / ROOM))) if tick == int(tick)]
    parts: list[str] = []
    free = WIDTH
    for tick in reversed(ticks):
        told = f"{tick:,.0f}"
        # The number stands below its tick, and the unit after it.
        start = x(tick) - LETTER * len(told) / 2
        told = told if parts else f"{told} {across}s"
        if not parts:
            start = min(start, WIDTH - LETTER * len(told))
        if start + LETTER * len(told) <= free:
            parts.append(f'<text x="{start:.1f}" y="{base:.1f}">{told}</text>')
            free = start - LETTER
    return "".join(reversed(parts))


def _event(place: float) -> str:
    return f'<path class="event" d="M{place:.1f} {TOP:g}V{HEIGHT - BOTTOM:g}"/>'


def _line(series: Series, x: Scale, y: Scale, colour: int, marks: bool) -> str:
    parts = []
    points = [(step, value) for step, value in series.points if not (y.log and value <= 0)]
    pieces = thinned(points)
    if series.noisy and len(points) > MANY:
        parts.append(f'<path class="noise c{colour}" d="{_path(pieces, x, y)}"/>')
        pieces = smoothed(points, MANY // 4)
    parts.append(f'<path class="line c{colour}" d="{_path(pieces, x, y)}"><title>{escape(series.name)}</title></path>')
    if marks or len(points) == 1:
        dots = [point for piece in pieces for point in piece][:200]
        parts += [f'<circle class="c{colour}" cx="{x(a):.1f}" cy="{y(b):.1f}" r="2"/>' for a, b in dots]
    return "".join(parts)


def _path(pieces: Sequence[Sequence[Point]], x: Scale, y: Scale) -> str:
    return "".join("M" + "L".join(f"{x(a):.1f} {y(b):.1f}" for a, b in piece) for piece in pieces)
