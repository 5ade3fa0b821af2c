"""Numbers on paper: axes, round numbers beside them, and long series thinned to what can be seen.

Line charts as SVG. Every line is labelled where it ends, so that nobody looks from a legend to a line and back.

Heat maps as SVG, for more layers than lines can show: a row for each layer, time from left to right.

Runs as one picture file, with matplotlib: for slides and papers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any

from ..errors import AceError
from ..output import check_picture
from .runs import QUANTITIES, Run
from .tables import number

Point = tuple[float, float]
FEW = 150
"""Parts that a long series is cut into, each drawn by its lowest and highest point: more cannot be seen."""


@dataclass(frozen=True)
class Scale:
    """Values from ``low`` to ``high``, in a picture from ``start`` to ``end``."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high, value = (math.log10(v) for v in (self.low, self.high, value)) if self.log else self._plain(value)
        share = (value - low) / (high - low) if high > low else 0.5
        return self.start + min(1.0, max(0.0, share)) * (self.end - self.start)

    def _plain(self, value: float) -> tuple[float, float, float]:
        return self.low, self.high, value

    def ticks(self, most: int = 5) -> list[float]:
        """Round numbers inside."""
        if self.log:
            return _decades(self.low, self.high, most)
        return _round_numbers(self.low, self.high, most)


def scale_of(values: Iterable[float], start: float, end: float, *, log: bool = False, zero: bool = False) -> Scale:
    """A scale that shows all finite values, with a little room; with ``zero``, 0 too."""
    found = [value for value in values if math.isfinite(value) and (value > 0 or not log)]
    if log and found:
        low, high = min(found), max(found)
        room = max((high / low) ** 0.04, 1.02)
        return Scale(low / room, high * room, start, end, log=True)
    if zero or not found:
        found.append(0.0)
    low, high = min(found), max(found)
    room = 0.06 * (high - low) or 0.1 * abs(high) or 1.0
    # Where a value cannot be below 0, neither is the axis.
    return Scale(low - room if low < 0 or not zero else low, high + room, start, end)


def wants_log(values: Iterable[float]) -> bool:
    """Positive, and over more than a decade."""
    found = [value for value in values if math.isfinite(value)]
    return bool(found) and min(found) > 0 and max(found) > 12 * min(found)


def thinned(points: Sequence[Point], parts: int = FEW) -> list[list[Point]]:
    """The pieces of a line, split where a value is not finite. Peaks stay where they are."""
    pieces: list[list[Point]] = [[]]
    for point in points:
        if math.isfinite(point[1]):
            pieces[-1].append(point)
        elif pieces[-1]:
            pieces.append([])
    total = max(1, len(points))
    return [_thin(piece, max(1, round(parts * len(piece) / total))) for piece in pieces if piece]


def _thin(points: list[Point], parts: int) -> list[Point]:
    if len(points) <= 3 * parts:
        return points
    kept = {0, len(points) - 1}
    for part in _parts(len(points), parts):
        kept.add(min(part, key=lambda i: points[i][1]))
        kept.add(max(part, key=lambda i: points[i][1]))
    return [points[i] for i in sorted(kept)]


def smoothed(points: Sequence[Point], parts: int = FEW) -> list[list[Point]]:
    """The middle of every part of a noisy line, from where it begins to where it ends."""
    finite = [point for point in points if math.isfinite(point[1])]
    if len(finite) <= parts:
        return [finite] if finite else []
    made = [_middle([finite[i] for i in part]) for part in _parts(len(finite), parts)]
    return [[finite[0], *made, (finite[-1][0], made[-1][1])]]


def _middle(points: list[Point]) -> Point:
    return points[len(points) // 2][0], sorted(value for _, value in points)[len(points) // 2]


def beginning(first: float, last: float) -> float:
    """Where the axis of a run begins: at 0, unless the run goes on from a checkpoint."""
    return 0.0 if first <= 0.05 * last else first


def spans(steps: Sequence[int], count: int) -> list[int]:
    """For each step, which of ``count`` equal spans of the run it is in."""
    last = max(steps, default=0)
    low = beginning(min(steps, default=0), last)
    size = max(1.0, last - low) / count
    return [min(count - 1, max(0, math.ceil((step - low) / size) - 1)) for step in steps]


def columns(places: Sequence[int], values: Sequence[float], count: int) -> list[float]:
    """The mean of the values in each span; NaN if one of them is not finite. An empty span is as the one before."""
    sums, numbers = [0.0] * count, [0] * count
    for place, value in zip(places, values, strict=True):
        sums[place] += value
        numbers[place] += 1
    before = values[0] if values else math.nan
    made: list[float] = []
    for total, count in zip(sums, numbers, strict=True):
        before = total / count if count else before
        made.append(before)
    return made


def evenly(length: int, most: int) -> list[int]:
    """At most so many places of a series, the last among them."""
    every = max(1, -(-length // most))
    return list(range(length - 1, -1, -every))[::-1]


def _parts(length: int, parts: int) -> list[range]:
    ends = [round(number * length / parts) for number in range(parts + 1)]
    return [range(a, b) for a, b in pairwise(ends) if b > a]


def _round_numbers(low: float, high: float, most: int) -> list[float]:
    span = high - low
    if not span > 0:
        return [low]
    size = 10.0 ** math.floor(math.log10(span / most))
    step = next(size * k for k in (1, 2, 5, 10, 20) if span / (size * k) <= most)
    return [round(n * step, 12) + 0.0 for n in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def _decades(low: float, high: float, most: int) -> list[float]:
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    found: list[float] = []
    for marks in ((1, 2, 5), (1, 3), (1,)):
        every = [mark * 10.0**n for n in range(first, last + 1) for mark in marks]
        found = [value for value in every if low <= value <= high]
        if 2 <= len(found) <= most + 1:
            return found
    return found[:: max(1, -(-len(found) // most))] or _round_numbers(low, high, 3)


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


PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#8b8f94")
"""Told apart by everyone (Okabe and Ito)."""
PICTURE_COLUMNS = 200
NAMED = 20
"""Rows of a map that are named, at most."""


def draw(runs: Sequence[Run], path: Path) -> None:
    """A row for each run: gamma, lambda, u, the loss and the equivariance error."""
    check_picture(path)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(17, 3.1 * len(runs)), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(runs), 5, squeeze=False)
    for run, row in zip(runs, grid, strict=True):
        for name, axes in zip(QUANTITIES, row, strict=False):
            _layers(figure, axes, run, name)
        _curve(row[3], "training loss", run.loss)
        _curve(row[4], f"equivariance error {run.group}".strip(), run.errors)
        row[0].set_ylabel(f"{run.title}\n{run.name}", fontsize=9)
    save(figure, path)


def save(figure: Any, path: Path) -> None:
    try:
        figure.savefig(path)
    except OSError as error:
        raise AceError(
            f"picture {path} cannot be written: {error.strerror or error}; mend that and try again"
        ) from None


def _layers(figure: Any, axes: Any, run: Run, name: str) -> None:
    _dress(axes, name)
    values = run.values[name]
    if not run.steps or not values:
        return
    if len(values) > LINES_AT_MOST:
        places = spans(run.steps, PICTURE_COLUMNS)
        rows = [columns(places, site, PICTURE_COLUMNS) for site in values]
        most = max((abs(value) for row in rows for value in row if math.isfinite(value)), default=0.0) or 1.0
        signed = any(value < 0 for row in rows for value in row)
        shown = axes.imshow(
            rows,
            aspect="auto",
            cmap="PuOr_r" if signed else "Oranges",
            vmin=-most if signed else 0,
            vmax=most,
            interpolation="nearest",
            extent=(beginning(min(run.steps), run.length), run.length, len(rows) - 0.5, -0.5),
        )
        figure.colorbar(shown, ax=axes, fraction=0.05)
        axes.grid(False)
        every = -(-len(rows) // NAMED)
        axes.set_yticks(range(0, len(rows), every), [shortened(site) for site in run.sites[::every]], fontsize=6)
        return
    for index, (site, at) in enumerate(zip(run.sites, values, strict=True)):
        axes.plot(run.steps, at, color=PALETTE[index % len(PALETTE)], linewidth=1.3, label=site)
    if name == QUANTITIES[0]:
        axes.legend(frameon=False, fontsize=7)


def _curve(axes: Any, title: str, points: Sequence[tuple[int, float]]) -> None:
    _dress(axes, title)
    if not points:
        axes.set_axis_off()
        return
    axes.plot(
        [step for step, _ in points],
        [value for _, value in points],
        color=PALETTE[0],
        linewidth=1.2 if len(points) < 500 else 0.4,
    )
    if wants_log([value for _, value in points]):
        axes.set_yscale("log")


def _dress(axes: Any, title: str) -> None:
    axes.set_title(title, fontsize=10)
    axes.set_xlabel("step", fontsize=8)
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.2)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
