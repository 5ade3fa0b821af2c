"""What a run tells its user about each layer, read off the history of its gamma and lambda.

strict: gamma goes to 0 and lambda settles, the symmetry fits the data. gamma keeps swinging about 0, or settles
elsewhere while lambda keeps growing: the symmetry is too strict. resilient: u says how much the data breaks it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

NEAR = 0.05
"""|gamma| below this counts as 0: what the branch adds is small beside f_eq."""
FEWEST = 12
"""Points of a history below which nothing can be said about where it goes."""

MEANING = {
    "fits": "gamma is at 0 and lambda has settled: the symmetry fits the data, the branch can go",
    "at 0": "gamma is at 0, lambda or u still moves",
    "landed": "gamma came close to 0 and is 0 for good: this is plain upstream again",
    "cut": "gamma was set to 0 from far away: this is plain upstream again, but the branch was cut off rather than "
    "learnt away; land later, or let gamma move faster (gamma_lr)",
    "dying down": "gamma swings about 0, less and less: give it more steps, or damp it (augmented, gamma_lr, land_at)",
    "swinging": "gamma keeps swinging about 0: the symmetry is too strict for the data (try mode resilient), or a "
    "learning rate (dual_lr, gamma_lr) is too high",
    "held off": "gamma has settled away from 0 and lambda keeps growing: the symmetry is too strict for the data (try "
    "mode resilient), or lambda grows too slowly (dual_lr)",
    "moving": "gamma, or u, is still on its way: give it more steps, or let gamma move faster (gamma_lr, land_at)",
    "too short": "too few steps to tell",
    "diverged": "gamma or lambda is not finite: lower the learning rate",
    "broken": "the data breaks the symmetry here: u says how much",
    "a little": "the data breaks the symmetry here a little",
    "over": "|gamma| is above its bound, or swings over it: give it more steps",
    "at bound": "|gamma| is at epsilon: this layer would use more",
    "within": "|gamma| is below epsilon",
}


def verdict(mode: str, gamma: Sequence[float], lambda_: Sequence[float], bound: float, *, landed: bool = False) -> str:
    """A key of `MEANING` for one site. ``bound`` is what |gamma| may be at the end: u or epsilon."""
    if not all(map(math.isfinite, (*gamma, *lambda_, bound))):
        return "diverged"
    if landed:
        before = next((value for value in reversed(gamma) if value), 0.0)
        return "cut" if abs(before) > NEAR else "landed"
    if len(gamma) < FEWEST:
        return "too short"
    if mode == "strict":
        return _strict(gamma, lambda_)
    now = _mean([*map(abs, gamma[-(len(gamma) // 4) :])])  # wherever it is in its swing
    if now > bound + min(NEAR, max(0.25 * bound, 0.02)):
        return "over"
    if mode == "bounded":
        return "at bound" if now > 0.9 * bound else "within"
    unused = bound > NEAR and now < 0.5 * bound  # slack that gamma leaves goes, if slowly
    if unused or _spread(lambda_, 4) > 0.1 * _size(lambda_):  # u follows lambda
        return "at 0" if now <= NEAR and (unused or bound <= NEAR) else "moving"
    return "fits" if bound < 0.01 else "a little" if bound < NEAR else "broken"


def _strict(gamma: Sequence[float], lambda_: Sequence[float]) -> str:
    quarter = len(gamma) // 4
    settled = _spread(lambda_, 2) <= 0.05 * _size(lambda_)
    if _size(gamma[-quarter:]) <= NEAR:
        return "fits" if settled else "at 0"
    half = gamma[-2 * quarter :]
    if min(half) < -0.5 * NEAR and max(half) > 0.5 * NEAR:
        return _swing(gamma)
    # A slow gamma, and one that is just turning round, were elsewhere half a run ago.
    stays = _spread(gamma, 4) <= 0.1 * min(abs(gamma[-1]), abs(gamma[-1] - gamma[0]))
    return "held off" if stays and not settled else "moving"


def _swing(gamma: Sequence[float]) -> str:
    peaks = _peaks(gamma)
    if len(peaks) > 1 and 0.5 * peaks[-1] < abs(gamma[-1]) and peaks[-1] < peaks[-2]:
        peaks.pop()  # it may still rise
    few = len(peaks) < 4
    count = 1 if few else max(2, len(peaks) // 3)
    dying = max(peaks[-count:]) < 0.8 * max(peaks[-2 * count : -count], default=0.0)
    return "dying down" if dying else "moving" if few else "swinging"


def _peaks(gamma: Sequence[float]) -> list[float]:
    """How far gamma got each time it was on one side of 0."""
    peaks: list[float] = []
    side = 0.0
    for value in gamma:
        if abs(value) > 0.5 * NEAR and math.copysign(1, value) != side:
            side = math.copysign(1, value)
            peaks.append(0.0)
        if peaks:
            peaks[-1] = max(peaks[-1], abs(value))
    return peaks


def _spread(values: Sequence[float], eighths: int) -> float:
    """How far it moved in the last eighths of the run, noise aside."""
    length = len(values) // 8
    ends = [len(values) - number * length for number in range(eighths)]
    means = [_mean(values[end - length : end]) for end in ends]
    return max(means) - min(means)


def _size(values: Sequence[float]) -> float:
    return max(map(abs, values))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
