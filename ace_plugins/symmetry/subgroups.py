"""Subgroups of the rotations and reflections of space and of the plane, as values: groups that can be sampled."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..errors import AdapterError
from .groups import Rigid, Rigids, SampledTogether, make_tensor, make_unit

AXES = {"x": (1.0, 0.0, 0.0), "y": (0.0, 1.0, 0.0), "z": (0.0, 0.0, 1.0)}
NEAR = 5.0  # an axis at most this many degrees from x, y or z gets the name x, y or z


@dataclass(frozen=True)
class SO2About(SampledTogether):
    """The rotations of space about one axis through the origin.

    Raises:
        AdapterError: If the axis is not a finite vector other than 0.
    """

    axis: tuple[float, float, float]
    """Direction of the axis, of any length."""
    mirrors: bool = False
    """Also include the reflections in all planes that contain the axis."""

    def __post_init__(self) -> None:
        length = math.hypot(*self.axis)
        if len(self.axis) != 3 or not 0 < length < math.inf:
            raise AdapterError(f"axis {self.axis}: expected three numbers that are not all 0")
        object.__setattr__(self, "axis", tuple(part / length for part in self.axis))

    @property
    def name(self) -> str:
        mirrors = " and reflections in planes that contain it" if self.mirrors else ""
        return f"rotations about {name_axis(self.axis)}{mirrors}"

    def identity(self) -> Rigid:
        """Return the rotation by 0."""
        return rotate(self.axis, 0.0)

    def sample_many(self, count: int, generator: torch.Generator, *, scale: float = 1.0) -> Rigids:
        """Return ``count`` independent elements, drawn with ``generator``; ``scale`` has no effect."""
        drawn = torch.rand(2, count, generator=generator, dtype=torch.float64, device=generator.device).cpu()
        matrix = _turn(make_tensor(self.axis), 2 * math.pi * drawn[0])
        if self.mirrors:
            mirror = reflect(perpendicular(self.axis)[0]).matrix
            matrix = torch.where(drawn[1, :, None, None] < 0.5, matrix @ mirror, matrix)
        return Rigids(matrix, make_tensor([[0, 0, 0]]).expand(count, -1), torch.arange(count))


@dataclass(frozen=True, eq=False)
class Subgroup(SampledTogether):
    """A finite group, given by its elements, such as one reflection and the identity."""

    name: str
    elements: Sequence[Rigid] = field(repr=False)
    """All elements, the identity first."""

    def identity(self) -> Rigid:
        """Return the first element."""
        return self.elements[0]

    def sample_many(self, count: int, generator: torch.Generator, *, scale: float = 1.0) -> Rigids:
        """Return ``count`` independent elements, drawn with ``generator``; ``scale`` has no effect."""
        drawn = torch.randint(len(self.elements), (count,), generator=generator, device=generator.device).cpu()
        matrix, shift = (
            torch.stack([getattr(each, name) for each in self.elements]) for name in ("matrix", "translation")
        )
        return Rigids(matrix[drawn], shift[drawn], torch.arange(count))


def _turn(axis: Tensor, angles: Tensor) -> Tensor:
    """Return the matrices of rotations about a unit vector by these angles, [angles, 3, 3] (Rodrigues' formula)."""
    cross = torch.linalg.cross(axis.expand(3, 3), make_unit(3)).T
    sine, cosine = angles.sin()[:, None, None], angles.cos()[:, None, None]
    turned: Tensor = make_unit(3) + sine * cross + (1 - cosine) * (cross @ cross)
    return turned


def rotate(axis: Sequence[float], angle: float) -> Rigid:
    """Return the rotation about a unit vector by an angle in radians."""
    return Rigid(_turn(make_tensor(axis), make_tensor([angle]))[0], make_tensor([0, 0, 0]))


def reflect(normal: Sequence[float]) -> Rigid:
    """Return the reflection in the plane, or line of the plane, with this unit normal."""
    n = make_tensor(normal)
    return Rigid(make_unit(len(n)) - 2 * torch.outer(n, n), 0 * n)


def shift(vector: Sequence[float]) -> Rigid:
    """Return the translation by a vector."""
    return Rigid(make_unit(len(vector)), make_tensor(vector))


def perpendicular(axis: Sequence[float]) -> tuple[list[float], list[float]]:
    """Return two unit vectors that are perpendicular to a unit vector of space and to each other."""
    n = make_tensor(axis)
    other = make_tensor([1, 0, 0]) if abs(axis[0]) < 0.7 else make_tensor([0, 1, 0])
    one = torch.nn.functional.normalize(torch.linalg.cross(n, other), dim=0)
    return one.tolist(), torch.linalg.cross(n, one).tolist()


def spread_axes(count: int) -> Iterator[tuple[float, float, float]]:
    """Yield unit vectors that are spread evenly over a half sphere (a Fibonacci lattice)."""
    for number in range(count):
        z, angle = (number + 0.5) / count, math.pi * (1 + math.sqrt(5)) * number
        yield math.sqrt(1 - z * z) * math.cos(angle), math.sqrt(1 - z * z) * math.sin(angle), z


def name_axis(axis: Sequence[float]) -> str:
    """Return "the z-axis" for an axis close to it (likewise x and y), else its direction, "(0.60, 0.00, 0.80)"."""
    for name, unit in AXES.items():
        if angle_between(axis, unit) < NEAR:
            return f"the {name}-axis"
    sign = math.copysign(1.0, max(axis, key=abs))  # an axis and its opposite are the same
    return f"({', '.join(f'{round(sign * part, 2) + 0.0:.2f}' for part in axis)})"


def angle_between(one: Sequence[float], two: Sequence[float]) -> float:
    """Return the angle between two axes, given as unit vectors, in degrees from 0 to 90."""
    cosine: Any = sum(a * b for a, b in zip(one, two, strict=True))
    return math.degrees(math.acos(min(1.0, abs(cosine))))
