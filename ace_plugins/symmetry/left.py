"""Finds the subgroup of its symmetry group that a trained model keeps, such as the rotations about one axis.

A model keeps a subgroup if it is equivariant under it. A model that was trained with branches has learned what breaks
the symmetry in its data, so it keeps about the same subgroup as the data. Each candidate subgroup is judged by its
error: the equivariance error under its elements, divided by that under the whole group, on the same batch. The axis
with the smallest error is searched on the first batch. All candidates are then measured on the other batches, which
gives an interval for each error.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ConfigError
from ..statistics import t_interval
from .actions import GroupAction, Positions
from .groups import SO2, SO3, Cyclic, Dihedral, Euclidean, Rigid
from .measure import as_call, as_double, compare_orders, evaluate, forward_names, measure_distance, preserve_state
from .parts import bind_arguments, find_at
from .subgroups import name_axis, perpendicular, reflect, rotate, shift, spread_axes

FEWEST = 4  # smallest number of batches
KEPT = 0.1  # a subgroup with a smaller error, in units of that under the whole group, is kept
NOISE = 1e-4  # a smaller relative error under the whole group is rounding in single precision
DIRECTIONS = 100  # number of axes on the half sphere from which the search starts, about 15 degrees apart
STEPS = (8.0, 4.0, 2.0, 1.0)  # degrees: distances from the best axis at which the search tries six others each
DRAWN = 8  # number of elements of an infinite group that are tried per batch
FOLDS = {4: (90, 180), 3: (120,), 2: (180,)}  # angles of the finite rotation groups that are tried about each axis
ANGLES = (180, 120, 57)  # angles in degrees of the rotations that the search tries about each axis

Vector = tuple[float, ...]
Draw = Callable[[], Sequence[Rigid]]  # returns elements to try; called once for each batch


@dataclass(frozen=True)
class SubgroupError:
    """The error of a model under one subgroup."""

    name: str
    """Description, such as "rotations about the z-axis"."""
    error: float
    """Equivariance error under this subgroup divided by that under the whole group; geometric mean over batches.
    Rotations and reflections are compared with all rotations and reflections, translations with all translations."""
    low: float
    """Lower end of the 95 % interval of ``error``."""
    high: float
    """Upper end of the 95 % interval of ``error``."""
    axis: tuple[float, ...] = ()
    """Unit vector: the axis of rotations, the normal of a mirror or the direction of translations; () without one."""

    @property
    def verdict(self) -> str:
        """Return "kept", "broken" or, if the interval contains the limit of 0.1, "cannot tell"."""
        return "kept" if self.high < KEPT else "broken" if self.low >= KEPT else "cannot tell"


@dataclass(frozen=True)
class SymmetryLeft:
    """The subgroups of a model's symmetry group that the trained model keeps and breaks."""

    group: str
    """Name of the whole group."""
    relative: float
    """Relative equivariance error under the whole group; for groups with translations the larger of two: that under
    rotations and reflections, and that under translations."""
    subgroups: tuple[SubgroupError, ...]
    """The candidates, the largest subgroups first; empty if the model keeps the whole group."""
    axes: tuple[tuple[Vector, float], ...] = ()
    """Every axis of the search on the sphere, with the error of rotations about it."""
    note: str = ""
    """Reason why the result is not about the data; empty if it has branches that were trained without random frames."""

    @property
    def kept(self) -> tuple[SubgroupError, ...]:
        """The candidates that are kept, without those that other kept ones contain."""
        return tuple(each for each in self.subgroups if each.verdict == "kept")

    @property
    def sentence(self) -> str:
        """The answer in one sentence."""
        if not self.subgroups:
            return f"The model keeps all of {self.group}{f'; {self.note}' if self.note else ''}."
        doubtful = [each.name for each in self.subgroups if each.verdict == "cannot tell"]
        unsure = f" It is unclear whether the model keeps {_join(doubtful)}." if doubtful else ""
        if not self.kept:
            return f"The model keeps no subgroup of {self.group} that was tried.{unsure}"
        return (
            f"The model keeps {_join([each.name for each in self.kept])}; it breaks the rest of {self.group}.{unsure}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the result as a dict for JSON."""
        subgroups = [{**dataclasses.asdict(each), "verdict": each.verdict} for each in self.subgroups]
        return {**dataclasses.asdict(self), "subgroups": subgroups, "sentence": self.sentence}


def _join(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


class _Measurement:
    """Measures squared errors of a model on several batches, in units of those under the whole group."""

    def __init__(self, model: nn.Module, action: GroupAction, batches: Sequence[Any], seed: int) -> None:
        self.model, self.action, self.seed = model, action, seed
        self.calls = [as_call(batch) for batch in batches]
        self.outputs = [evaluate(model, *call, seed) for call in self.calls]
        self.generator = torch.Generator().manual_seed(seed)
        self.found: list[SubgroupError] = []
        group, every = action.group, range(len(batches))
        self.moves = getattr(group, "translations", False)
        self.distance = _measure_spread(action, forward_names(model), *self.calls[0])
        # Squared errors by batch: under random rotations and reflections, under translations, and the larger one.
        self.turns = [self.mean(_list_elements(group) or self.sample(group), batch) for batch in every]
        self.shifts = [self.mean(self.sample_shifts(), batch) if self.moves else 0.0 for batch in every]
        self.whole = [max(pair) for pair in zip(self.turns, self.shifts, strict=True)]
        tensors = (y for output in self.outputs for y in action.tensors_to_compare(output).values())
        self.size = sum(float(as_double(y).square().sum()) for y in tensors)

    def sample(self, group: Any) -> list[Rigid]:
        """Draw rotations, and reflections if the group has them."""
        return [group.sample(self.generator, scale=0.0) for _ in range(DRAWN)]

    def sample_shifts(self) -> list[Rigid]:
        """Draw translations in all directions."""
        drawn: list[Any] = [self.action.group.sample(self.generator, scale=self.distance) for _ in range(DRAWN)]
        return [shift(element.translation.tolist()) for element in drawn]

    def sample_shifts_along(self, directions: Callable[[], Sequence[Vector]]) -> list[Rigid]:
        """Draw translations by random distances along these directions."""
        sizes = (self.distance * torch.randn(DRAWN, generator=self.generator)).tolist()
        return [shift([size * part for part in each]) for size, each in zip(sizes, directions(), strict=True)]

    def uniform(self) -> list[float]:
        return torch.rand(DRAWN, generator=self.generator).tolist()

    def errors(self, elements: Sequence[Rigid], batch: int = 0) -> list[float]:
        """Return the squared norm of the difference between f(g x) and g f(x) for each element g."""
        pairs = compare_orders(self.model, self.action, self.calls[batch], self.outputs[batch], elements, self.seed)
        return [measure_distance(*pair) ** 2 for pair in pairs]

    def mean(self, elements: Sequence[Rigid], batch: int = 0) -> float:
        return sum(self.errors(elements, batch)) / len(elements)

    def judge(self, name: str, draw: Draw, axis: Sequence[float] = (), unit: Sequence[float] = ()) -> bool:
        """Measure a candidate on all batches but the first, and list it. Returns whether it is kept.

        ``unit`` has the squared errors to divide by, one per batch. Default: those under rotations and reflections.
        """
        units = [max(size, 1e-300) for size in unit or self.turns]
        squares = [self.mean(draw(), batch) / units[batch] for batch in range(1, len(self.calls))]
        logs = [math.log(max(square, 1e-18)) / 2 for square in squares]
        low, high = t_interval(logs)
        error = sum(logs) / len(logs)
        self.found.append(SubgroupError(name, math.exp(error), math.exp(low), math.exp(high), tuple(axis)))
        return self.found[-1].verdict == "kept"

    def judge_shifts(self, *parts: tuple[str, Vector, Callable[[], Sequence[Vector]]]) -> None:
        """Judge all translations and, if they are broken, parts of them: each a name, an axis and directions."""
        if self.moves and not self.judge("all translations", self.sample_shifts, unit=self.whole):
            for name, axis, directions in parts:
                self.judge(name, partial(self.sample_shifts_along, directions), axis, self.shifts)


def find_left(model: nn.Module, action: GroupAction, batches: Sequence[Any], *, seed: int = 0) -> SymmetryLeft:
    """Find which subgroups a model keeps in eval mode; see `ace_plugins.symmetry_left`."""
    group, count = action.group, len(batches)
    if count < FEWEST:
        raise ConfigError(f"batches: expected at least {FEWEST}: one to search on, others to measure on; found {count}")
    if not isinstance(group, (Euclidean, Cyclic)):
        raise ConfigError(f"group {group.name}: expected rigid motions of space or of the plane, C_n or D_n")
    axes: list[tuple[Vector, float]] = []
    with torch.inference_mode(False), preserve_state(model):
        tool = _Measurement(model, action, batches, seed)
        relative = math.sqrt(sum(tool.whole) / (tool.size or 1.0))
        if relative > NOISE and all(tool.whole):
            if isinstance(group, Cyclic):
                _try_finite(tool, group)
            elif group.dimension == 3:
                axes = _try_space(tool, group)
            else:
                _try_plane(tool, group)
    return SymmetryLeft(group.name, relative, tuple(tool.found), tuple(axes))


def _measure_spread(action: GroupAction, names: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    """Return the standard deviation of the coordinates of all positions in a batch; 1 without positions."""
    given = bind_arguments(names, args, kwargs)
    moved = [path.removesuffix("?") for path, each in action.inputs.items() if isinstance(each, Positions)]
    found = [as_double(x) for path in moved if isinstance(x := find_at(given, path), Tensor) and len(x) > 1]
    return float(torch.cat([(x - x.mean(0)).flatten() for x in found]).square().mean().sqrt()) if found else 1.0


def _list_elements(group: Any) -> list[Rigid]:
    """Return the elements of a finite group except the identity; an empty list for other groups."""
    if not isinstance(group, Cyclic):
        return []
    mirrors = [group.reflection(k) for k in range(group.n)] if isinstance(group, Dihedral) else []
    return [*map(group.rotation, range(1, group.n)), *mirrors]


def _try_finite(tool: _Measurement, group: Cyclic) -> None:
    """Judge the subgroups of C_n or D_n: the largest group of rotations that is kept, and every reflection."""
    for order in range(group.n, 1, -1):
        if group.n % order == 0 and (order < group.n or isinstance(group, Dihedral)):
            turns = [group.rotation(k * group.n // order) for k in range(1, order)]
            if tool.judge(f"rotations by {360 / order:g} degrees", partial(list, turns)):
                break
    if not isinstance(group, Dihedral):
        return
    for k in range(group.n):
        angle = math.degrees(group.axis) + 180 * k / group.n
        tool.judge(f"the reflection in the line at {angle:g} degrees", partial(list, [group.reflection(k)]))


def _try_plane(tool: _Measurement, group: Euclidean) -> None:
    """Judge subgroups of the rotations, reflections and translations of the plane."""
    if not tool.judge("all rotations", lambda: tool.sample(SO2), unit=tool.whole):
        for order in (6, 4, 3, 2):
            turns = [Cyclic(order).rotation(k) for k in range(1, order)]
            if tool.judge(f"rotations by {360 // order} degrees", partial(list, turns)):
                break
    if group.reflections:
        normals = [(math.cos(math.radians(angle)), math.sin(math.radians(angle))) for angle in range(0, 180, 3)]
        best = min(normals, key=lambda normal: tool.mean([reflect(normal)]))
        line = (math.degrees(math.atan2(best[1], best[0])) + 90) % 180
        tool.judge(f"the reflection in the line at {line:.0f} degrees", lambda: [reflect(best)], best)
    x, y = (1.0, 0.0), (0.0, 1.0)
    tool.judge_shifts(
        ("translations along x", x, lambda: [x] * DRAWN), ("translations along y", y, lambda: [y] * DRAWN)
    )


def _try_space(tool: _Measurement, group: Euclidean) -> list[tuple[Vector, float]]:
    """Judge subgroups of the rotations, reflections and translations of space. Returns the errors about each axis."""
    known: dict[Vector, dict[int, float]] = {}

    def mean_error(angles: Sequence[int], axis: Vector) -> float:
        """Return the mean squared error of rotations about an axis on the first batch."""
        found = known.setdefault(axis, {})
        new = [angle for angle in angles if angle not in found]
        found |= zip(new, tool.errors([rotate(axis, math.radians(angle)) for angle in new]), strict=True)
        return sum(found[angle] for angle in angles) / len(angles)

    spins = tool.judge("all rotations", lambda: tool.sample(SO3), unit=tool.whole)
    axis, tried = _search(partial(mean_error, ANGLES))
    one, two = perpendicular(axis)

    def across() -> list[Vector]:
        """Draw directions perpendicular to the axis."""
        turns = ((math.cos(2 * math.pi * x), math.sin(2 * math.pi * x)) for x in tool.uniform())
        return [tuple(c * a + s * b for a, b in zip(one, two, strict=True)) for c, s in turns]

    about = f"rotations about {name_axis(axis)}"
    if not spins and tool.judge(about, lambda: [rotate(axis, 2 * math.pi * x) for x in tool.uniform()], axis):
        tool.judge("half turns about axes perpendicular to it", lambda: [rotate(n, math.pi) for n in across()], axis)
        if group.reflections:
            tool.judge("reflections in planes that contain it", lambda: [reflect(n) for n in across()], axis)
            tool.judge("the reflection in the plane perpendicular to it", lambda: [reflect(axis)], axis)
        along = ("translations along it", axis, lambda: [axis] * DRAWN)
        tool.judge_shifts(along, ("translations perpendicular to it", axis, across))
    else:
        for order, angles in FOLDS.items() if not spins else ():
            best, _ = _search(partial(mean_error, angles))
            turns = [rotate(best, 2 * math.pi * k / order) for k in range(1, order)]
            if tool.judge(f"rotations by {360 // order} degrees about {name_axis(best)}", partial(list, turns), best):
                break
        if group.reflections:
            inversion = Rigid(-group.identity().matrix, group.identity().translation)
            tool.judge("the inversion", lambda: [inversion], unit=tool.whole if spins else ())
        if group.reflections and not spins:
            normal, _ = _search(lambda n: tool.mean([reflect(n)]))
            tool.judge(
                f"the reflection in the plane perpendicular to {name_axis(normal)}", lambda: [reflect(normal)], normal
            )
        tool.judge_shifts()
    return [(each, math.sqrt(square / tool.whole[0])) for each, square in tried]


def _search(error: Callable[[Vector], float]) -> tuple[Vector, list[tuple[Vector, float]]]:
    """Return the axis with the smallest error, and the errors about axes that are spread over the sphere."""
    tried: list[tuple[Vector, float]] = [(axis, error(axis)) for axis in spread_axes(DIRECTIONS)]
    best = min(tried, key=itemgetter(1))
    for step in STEPS:
        near = [(axis, error(axis)) for axis in _ring(best[0], math.radians(step))]
        best = min([best, *near], key=itemgetter(1))
    return best[0], tried


def _ring(axis: Vector, angle: float) -> Iterator[Vector]:
    """Yield six unit vectors at an angle to an axis."""
    one, two = perpendicular(axis)
    for k in range(6):
        u, v = math.sin(angle) * math.cos(math.pi * k / 3), math.sin(angle) * math.sin(math.pi * k / 3)
        yield tuple(math.cos(angle) * a + u * b + v * c for a, b, c in zip(axis, one, two, strict=True))
