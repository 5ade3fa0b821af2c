"""Numbers on paper: axes, round numbers beside them, and long series thinned to what can be seen."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

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
    for total, number in zip(sums, numbers, strict=True):
        before = total / number if number else before
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
