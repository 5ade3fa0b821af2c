"""Draws line charts and heat maps for the HTML page, as SVG. Every line is labelled where it ends."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from markupsafe import Markup, escape

from .tables import average_spans, find_axis_start, format_number

Point = tuple[float, float]
WIDTH, HEIGHT = 420.0, 230.0  # size of a chart, in SVG units like all lengths below
LEFT, TOP, BOTTOM = 46.0, 10.0, 27.0  # margins of a chart
LETTER = 6.4  # estimated width of a letter
GAP = 13.0  # smallest distance between the base lines of two labels
AWAY = 16.0  # distance between the end of a line and its label
LINES_AT_MOST = COLOURS = 8  # more lines cannot be distinguished; page.css defines 8 colours
COLUMNS, LEVELS = 120, 8  # of a heat map; CSS classes: p1 to p8 above 0, n1 to n8 below 0, z at 0, x not finite
PARTS = 150  # number of parts of a long line; of each part only the lowest and highest point are drawn
FEW = 60  # a line with at most this many points has a dot per point
NOISY, SMOOTH = 240, 60  # a noisy line with more than NOISY points is drawn as SMOOTH means


@dataclass(frozen=True)
class Series:
    """A line of a chart. A noisy line is drawn smoothed, with the original line pale behind it."""

    name: str
    points: Sequence[Point]
    noisy: bool = False


@dataclass(frozen=True)
class Scale:
    """Maps values from ``low`` to ``high`` to positions from ``start`` to ``end``."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high = self.low, self.high
        if self.log:
            low, high, value = math.log10(low), math.log10(high), math.log10(value)
        share = (value - low) / (high - low) if high > low else 0.5
        return self.start + min(1.0, max(0.0, share)) * (self.end - self.start)

    def ticks(self, most: int = 5) -> list[float]:
        """Return round numbers between ``low`` and ``high``, about ``most`` of them."""
        if not self.log:
            return _find_round_numbers(self.low, self.high, most)
        decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        for marks in ((1, 2, 5), (1, 3), (1,)):
            found = [v for n in decades for mark in marks if self.low <= (v := mark * 10.0**n) <= self.high]
            if 2 <= len(found) <= most + 1:
                return found
        return found[:: -(-len(found) // most)] if found else _find_round_numbers(self.low, self.high, 3)


def _find_round_numbers(low: float, high: float, most: int) -> list[float]:
    span = high - low
    if not span > 0:
        return [low]
    size = 10.0 ** math.floor(math.log10(span / most))
    step = next(size * k for k in (1, 2, 5, 10, 20) if span / (size * k) <= most)
    return [round(n * step, 12) + 0.0 for n in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def fit_scale(values: Iterable[float], start: float, end: float, *, zero: bool = False) -> Scale:
    """Return a scale with room for all finite values: with 0 if ``zero``, else logarithmic for a wide range."""
    found = [value for value in values if math.isfinite(value)] or [0.0]
    low, high = min(found), max(found)
    if not zero and low > 0 and high > 12 * low:
        room = (high / low) ** 0.04
        return Scale(low / room, high * room, start, end, log=True)
    if zero:
        low, high = min(low, 0.0), max(high, 0.0)
    room = 0.06 * (high - low) or 0.1 * abs(high) or 1.0
    return Scale(low if zero and low == 0 else low - room, high + room, start, end)


def is_drawable(points: Sequence[Point]) -> bool:
    return any(math.isfinite(value) for _, value in points)


def thin(points: Sequence[Point], parts: int = PARTS) -> list[list[Point]]:
    """Split a line at values that are not finite, and drop points that would not be visible. Peaks are kept."""
    pieces = [list(piece) for finite, piece in groupby(points, lambda point: math.isfinite(point[1])) if finite]
    thinned = []
    for piece in pieces:
        count = max(1, round(parts * len(piece) / len(points)))
        if len(piece) > 3 * count:
            kept = {0, len(piece) - 1}
            for start, end in pairwise(round(number * len(piece) / count) for number in range(count + 1)):
                part = sorted(range(start, end), key=lambda i: piece[i][1])
                kept |= {part[0], part[-1]}
            piece = [piece[i] for i in sorted(kept)]
        thinned.append(piece)
    return thinned


def shorten_names(names: Sequence[str], most: int = 18) -> list[str]:
    """Shorten names for labels, without the modules that all have in common. Names stay distinct."""
    parts = [name.split(".") for name in names]
    while len(parts) > 1 and len({part[0] for part in parts}) == 1 and min(map(len, parts)) > 1:
        parts = [part[1:] for part in parts]
    if max(map(len, names), default=0) > most:
        names = [".".join(part) for part in parts]
    short = [_cut(name, most) for name in names]
    if len({*short}) == len({*names}):
        return short
    return [number + _cut(name, most - len(number)) for n, name in enumerate(names, 1) if (number := f"{n}: ")]


def _cut(name: str, most: int) -> str:
    return name if len(name) <= most else f"\N{HORIZONTAL ELLIPSIS}{name[1 - most :]}"


def draw_lines(
    title: str, series: Sequence[Series], *, zero: bool = False, events: Sequence[int] = (), unit: str = "step"
) -> Markup:
    """Return a line chart. ``zero`` puts 0 on the axis, and ``events`` are steps that get a vertical line."""
    series = [each for each in series if is_drawable(each.points)]
    values = [value for each in series for _, value in each.points]
    ends = [next(point for point in reversed(each.points) if math.isfinite(point[1])) for each in series]
    labels = shorten_names([each.name for each in series])
    if len(series) == 1:
        labels = [format_number(ends[0][1], 3)]
    right = max(50.0, AWAY + 6 + LETTER * max(map(len, labels)))
    first = min(each.points[0][0] for each in series)
    last = max(step for each in series for step, _ in each.points)
    x = Scale(find_axis_start(first, last), max(last, first + 1), LEFT, WIDTH - right)
    y = fit_scale(values, HEIGHT - BOTTOM, TOP, zero=zero)
    parts = []
    for tick in y.ticks():
        kind = "grid zero" if tick == 0 else "grid"
        parts.append(f'<path class="{kind}" d="M{x.start:.1f} {y(tick):.1f}H{x.end:.1f}"/>')
        parts.append(_text(x.start - 6, y(tick) + 4, format_number(tick, 3), "left"))
    parts.append(draw_ticks(x, y.start + 19, unit))
    parts += [f'<path class="event" d="M{x(step):.1f} {TOP:g}V{HEIGHT - BOTTOM:g}"/>' for step in events]
    parts += [_draw_line(each, x, y, f"c{n % COLOURS}") for n, each in enumerate(series)]
    heights = spread_labels([y(value) + 4 for _, value in ends], TOP + 8, HEIGHT - BOTTOM + 2)
    for n, (each, end, label, height) in enumerate(zip(series, ends, labels, heights, strict=True)):
        colour = f"c{n % COLOURS}"
        if x(end[0]) > x.end - 40:  # a longer connection between line and label would look like data
            line = f"M{x(end[0]) + 1:.1f} {y(end[1]):.1f}L{x.end + AWAY - 3:.1f} {height - 4:.1f}"
            parts.append(f'<path class="leader {colour}" d="{line}"/>')
        parts.append(_text(x.end + AWAY, height, label, colour, f"{each.name}: {format_number(end[1])}"))
    return _wrap(title, HEIGHT, parts)


def _wrap(title: str, height: float, parts: Sequence[str]) -> Markup:
    opening = f'<svg viewBox="0 0 {WIDTH:g} {height:g}" role="img" aria-label="{escape(title)}">'
    return Markup(f"{opening}{''.join(parts)}</svg>")


def _text(x: float, y: float, text: str, kind: str = "", tip: str = "") -> str:
    style = f'class="{kind}" ' if kind else ""
    more = f"<title>{escape(tip)}</title>" if tip else ""
    return f'<text {style}x="{x:.1f}" y="{y:.1f}">{escape(text)}{more}</text>'


def draw_ticks(x: Scale, base: float, unit: str) -> str:
    """Return the numbers below a chart, the last one with the unit. Numbers that would overlap others are left out."""
    ticks = [tick for tick in x.ticks(max(2, int((x.end - x.start) / 55))) if tick == int(tick)]
    parts: list[str] = []
    free = WIDTH
    for tick in reversed(ticks):
        text = f"{tick:,.0f}"
        start = x(tick) - LETTER * len(text) / 2
        if not parts:
            text = f"{text} {unit}s"
            start = min(start, WIDTH - LETTER * len(text))
        if start + LETTER * len(text) <= free:
            parts.append(_text(start, base, text))
            free = start - LETTER
    return "".join(reversed(parts))


def spread_labels(heights: Sequence[float], top: float, bottom: float) -> list[float]:
    """Return heights at which labels do not touch each other, in the order of their lines."""
    order = sorted(range(len(heights)), key=lambda n: heights[n])
    gap = min(GAP, (bottom - top) / max(1, len(heights) - 1))
    placed: dict[int, float] = {}
    height = top - gap
    for n in order:
        height = placed[n] = max(heights[n], height + gap)
    height = bottom + gap
    for n in reversed(order):
        height = placed[n] = min(placed[n], height - gap)
    return [placed[n] for n in range(len(heights))]


def _draw_line(series: Series, x: Scale, y: Scale, colour: str) -> str:
    def path(pieces: Sequence[Sequence[Point]]) -> str:
        return "".join("M" + "L".join(f"{x(a):.1f} {y(b):.1f}" for a, b in piece) for piece in pieces)

    drawn = ""
    points, pieces = series.points, thin(series.points)
    if series.noisy and len(points) > NOISY:
        drawn = f'<path class="noise {colour}" d="{path(pieces)}"/>'
        means = average_spans([int(step) for step, _ in points], [value for _, value in points], SMOOTH)
        size = (points[-1][0] - x.low) / SMOOTH
        pieces = thin([(x.low + (number + 0.5) * size, mean) for number, mean in enumerate(means)])
    drawn += f'<path class="line {colour}" d="{path(pieces)}"><title>{escape(series.name)}</title></path>'
    dots = [point for piece in pieces for point in piece] if len(points) <= FEW else []
    return drawn + "".join(f'<circle class="{colour}" cx="{x(a):.1f}" cy="{y(b):.1f}" r="2"/>' for a, b in dots)


def draw_heat_map(title: str, names: Sequence[str], steps: Sequence[int], values: Sequence[Sequence[float]]) -> Markup:
    """Return a heat map of ``values``, one series per site. The strongest shade stands for the largest |value|."""
    rows = [average_spans(steps, site, COLUMNS) for site in values]
    found = [value for row in rows for value in row if math.isfinite(value)]
    most = max(map(abs, found), default=0.0)
    top, high = 26.0, max(4.0, min(13.5, 270.0 / len(rows)))
    labels = shorten_names(names, 16)
    left = 8 + LETTER * max(map(len, labels))
    paths: dict[str, list[str]] = {}
    for place, row in enumerate(rows):
        begun = 0
        for shade, neighbours in groupby(_find_shade(value, most) for value in row):  # each group is a rectangle
            width = len(list(neighbours))
            paths.setdefault(shade, []).append(f"M{begun} {place}h{width}v1h{-width}z")
            begun += width
    cells = "".join(f'<path class="{shade}" d="{"".join(moves)}"/>' for shade, moves in sorted(paths.items()))
    size = f"translate({left:.1f} {top:g}) scale({(WIDTH - left - 8) / COLUMNS:.4f} {high:.3f})"
    parts = [f'<g class="heat" transform="{size}">{cells}</g>']
    for place in range(0, len(rows), math.ceil(13 / high)):
        parts.append(_text(left - 5, top + (place + 0.5) * high + 4, labels[place], "left", names[place]))
    bottom = top + len(rows) * high
    x = Scale(find_axis_start(min(steps), max(steps)), max(steps), left, WIDTH - 8)
    parts += [draw_ticks(x, bottom + 16, "step"), _draw_legend(min(found, default=0.0) < 0, most)]
    return _wrap(title, math.ceil(bottom + 24), parts)


def draw_sphere(title: str, points: Sequence[tuple[Sequence[float], float]]) -> Markup:
    """Return a map of the half sphere z >= 0, seen along z, with a dot for each unit vector, shaded by its value.

    The projection keeps areas (Lambert's azimuthal projection), so evenly spread vectors give evenly spread dots.
    """
    centre, radius = WIDTH / 2, 95.0
    most = max((value for _, value in points if math.isfinite(value)), default=0.0)
    least = min(points, key=lambda point: point[1], default=None)
    size = 0.85 * radius / math.sqrt(max(1, len(points)))
    dots = [f'<circle class="rim" cx="{centre:g}" cy="112" r="{radius + size:.1f}"/>']
    for point in points:
        (x, y, z), value = point
        scale = radius / math.sqrt(1 + abs(z))
        place = f'cx="{centre + scale * x:.1f}" cy="{112 - scale * y:.1f}"'
        tip = f"<title>({x:.2f}, {y:.2f}, {z:.2f}): {format_number(value, 3)}</title>"
        dots.append(f'<circle class="{_find_shade(value, most)}" {place} r="{size:.1f}">{tip}</circle>')
        if point is least:
            dots.append(f'<circle class="best" {place} r="{size + 2:.1f}"/>')
    labels = _text(centre + radius + 16, 116, "x") + _text(centre - 3, 6, "y")
    return _wrap(title, 226, [f'<g class="heat sphere">{"".join(dots)}</g>', labels, _draw_legend(False, most)])


def _find_shade(value: float, most: float) -> str:
    if not math.isfinite(value):
        return "x"
    # The shade depends on the square root of |value|, so that small values are visible beside large ones.
    level = round(LEVELS * math.sqrt(abs(value) / most)) if most else 0
    return "z" if level == 0 else f"{'p' if value > 0 else 'n'}{level}"


def _draw_legend(signed: bool, most: float) -> str:
    """Return the legend of a heat map, at its top right: the shades from the lowest to the highest value."""
    shades = [*(f"n{k}" for k in range(LEVELS, 0, -1) if signed), "z", *(f"p{k}" for k in range(1, LEVELS + 1))]
    high = format_number(most, 3)
    end = WIDTH - 8 - LETTER * len(high) - 6
    start = end - 8 * len(shades)
    places = enumerate(shades)
    boxes = (f'<rect class="{kind}" x="{start + 8 * k:.1f}" y="6" width="8" height="9"/>' for k, kind in places)
    low = _text(start - 5, 14.5, format_number(-most, 3) if signed else "0", "left")
    return f'{low}<g class="heat">{"".join(boxes)}</g>{_text(end + 5, 14.5, high)}'
