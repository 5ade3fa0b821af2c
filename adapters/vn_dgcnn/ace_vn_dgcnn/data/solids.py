"""Families of closed surfaces, sampled uniformly by area, with outward normals.

Families can be distinguished in any orientation. They are generated upright, with z as axis.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

Array = NDArray[np.float64]
Surface = tuple[Array, Array]
"""Points [n, 3] and outward unit normals [n, 3], in random order."""
Sampler = Callable[[int], Surface]


def sphere(random: Generator, count: int) -> Surface:
    normals = random.standard_normal((count, 3))
    normals /= np.linalg.norm(normals, axis=1, keepdims=True)
    return normals.copy(), normals


def ellipsoid(random: Generator, count: int, middle: float, short: float) -> Surface:
    """Sample an ellipsoid with half axes 1, ``middle`` and ``short``, the last along z."""
    axes = np.array([1.0, middle, short])
    found = np.empty((0, 3))
    while len(found) < count:
        directions, _ = sphere(random, 2 * count)
        # Rejection sampling by the local increase of area.
        stretch = np.linalg.norm(directions / axes, axis=1) * axes.min()
        found = np.concatenate([found, directions[random.random(len(directions)) < stretch]])
    normals = found[:count] / axes
    return found[:count] * axes, normals / np.linalg.norm(normals, axis=1, keepdims=True)


def cylinder(random: Generator, count: int, height: float) -> Surface:
    """Sample a cylinder of radius 1, closed at both ends."""
    ends = [(math.pi, partial(_disc, random, height=up * height / 2, up=up)) for up in (-1.0, 1.0)]
    return _sample_parts(random, count, [(2 * math.pi * height, partial(_wall, random, height=height)), *ends])


def capsule(random: Generator, count: int, length: float) -> Surface:
    """Sample a cylinder of radius 1 and this length between two hemispheres."""

    def ends(n: int) -> Surface:
        points, normals = sphere(random, n)
        points[:, 2] += np.copysign(length / 2, points[:, 2])
        return points, normals

    side = partial(_wall, random, height=length)
    return _sample_parts(random, count, [(2 * math.pi * length, side), (4 * math.pi, ends)])


def cone(random: Generator, count: int, height: float) -> Surface:
    """Sample a cone of radius 1, closed below, with its centre of mass at the origin."""
    slant = math.hypot(1.0, height)

    def side(n: int) -> Surface:
        radius, angle = np.sqrt(random.random(n)), random.uniform(0, 2 * math.pi, n)
        around = np.stack([np.cos(angle), np.sin(angle)], axis=1)
        points = np.column_stack([around * radius[:, None], height * (0.75 - radius)])
        return points, np.column_stack([around * (height / slant), np.full(n, 1 / slant)])

    base = partial(_disc, random, height=-height / 4, up=-1.0)
    return _sample_parts(random, count, [(math.pi * slant, side), (math.pi, base)])


def torus(random: Generator, count: int, tube: float) -> Surface:
    """Sample a tube of this radius around the unit circle."""
    angle, around = random.uniform(0, 2 * math.pi, count), _sample_angles(random, count, tube)
    outward = np.stack([np.cos(angle), np.sin(angle), np.zeros(count)], axis=1)
    normals = np.cos(around)[:, None] * outward
    normals[:, 2] = np.sin(around)
    return outward + tube * normals, normals


def helix(random: Generator, count: int, tube: float, rise: float, turns: float) -> Surface:
    """Sample a tube around a right-handed helix of radius 1 that rises by ``rise`` per turn, with flat ends."""
    slope = rise / (2 * math.pi)
    speed = math.hypot(1.0, slope)
    end = math.pi * turns

    def frame(angle: Array) -> tuple[Array, Array, Array, Array]:
        """Return centre line, tangent, normal (towards the axis) and binormal."""
        cos, sin, zero = np.cos(angle), np.sin(angle), np.zeros_like(angle)
        line = np.stack([cos, sin, slope * angle], axis=1)
        tangent = np.stack([-sin, cos, np.full_like(angle, slope)], axis=1) / speed
        inward = np.stack([-cos, -sin, zero], axis=1)
        return line, tangent, inward, np.cross(tangent, inward)

    def side(n: int) -> Surface:
        line, _, inward, binormal = frame(random.uniform(-end, end, n))
        around = _sample_angles(random, n, -tube / speed**2)[:, None]  # 1 / speed^2 is the helix's curvature
        normals = np.cos(around) * inward + np.sin(around) * binormal
        return line + tube * normals, normals

    def ends(n: int) -> Surface:
        sides = random.choice([-1.0, 1.0], n)
        line, tangent, inward, binormal = frame(sides * end)
        flat, _ = _disc(random, n, 0.0, 1.0)
        return line + tube * (flat[:, :1] * inward + flat[:, 1:2] * binormal), tangent * sides[:, None]

    length = 2 * end * speed
    return _sample_parts(random, count, [(2 * math.pi * tube * length, side), (2 * math.pi * tube**2, ends)])


def tetrahedron(random: Generator, count: int, height: float) -> Surface:
    """Sample a pyramid on a regular triangle of circumradius 1, with its centre of mass at the origin."""
    angles = 2 * math.pi / 3 * np.arange(3)
    base = np.stack([np.cos(angles), np.sin(angles), np.full(3, -height / 4)], axis=1)
    apex = np.array([0.0, 0.0, 0.75 * height])
    after = np.roll(base, -1, axis=0)
    corners = np.concatenate([base, base[:1]])
    first = np.concatenate([after - base, base[2:] - base[:1]])
    second = np.concatenate([apex - base, base[1:2] - base[:1]])
    return _faces(random, count, corners, first, second, triangles=True)


def cuboid(random: Generator, count: int, width: float, height: float) -> Surface:
    """Sample a box of length 2, with this width and height."""
    return _extrude(random, count, [-1, 1], [-width / 2, width / 2], ["#"], height)


def cross(random: Generator, count: int, arm: float, height: float) -> Surface:
    """Sample a plus sign of span 2 with arms of width ``arm``."""
    cuts = [-1, -arm / 2, arm / 2, 1]
    return _extrude(random, count, cuts, cuts, [".#.", "###", ".#."], height)


def l_bracket(random: Generator, count: int, foot: float, width: float, height: float) -> Surface:
    """Sample an arm of length 2 and a foot, both of this width."""
    return _extrude(random, count, [-foot / 2, width - foot / 2, foot / 2], [-1, width - 1, 1], ["##", "#."], height)


def cube_with_hole(random: Generator, count: int, hole: float, height: float) -> Surface:
    """Sample a block with edges 2, 2 and ``height``, and a square hole through it."""
    cuts = [-1, -hole / 2, hole / 2, 1]
    return _extrude(random, count, cuts, cuts, ["###", "#.#", "###"], height)


@dataclass(frozen=True)
class Family:
    """A class of shapes: a surface, and the ranges from which the proportions of each shape are drawn."""

    surface: Callable[..., Surface]
    proportions: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    def sample(self, random: Generator, count: int) -> Surface:
        """Draw a shape. Its farthest point is at distance 1 from the origin."""
        drawn = {name: random.uniform(*between) for name, between in self.proportions.items()}
        points, normals = self.surface(random, count, **drawn)
        return points / np.linalg.norm(points, axis=1).max(), normals


FAMILIES: Mapping[str, Family] = {
    "sphere": Family(sphere),
    "cuboid": Family(cuboid, {"width": (0.8, 1.6), "height": (0.4, 1.0)}),
    "cylinder": Family(cylinder, {"height": (1.5, 4.0)}),
    "cone": Family(cone, {"height": (1.2, 3.0)}),
    "torus": Family(torus, {"tube": (0.2, 0.45)}),
    "tetrahedron": Family(tetrahedron, {"height": (1.0, 2.0)}),
    "helix": Family(helix, {"tube": (0.1, 0.2), "rise": (0.9, 1.4), "turns": (1.5, 3.0)}),
    "cross": Family(cross, {"arm": (0.4, 0.8), "height": (0.3, 0.8)}),
    "ellipsoid": Family(ellipsoid, {"middle": (0.55, 0.8), "short": (0.3, 0.45)}),
    "capsule": Family(capsule, {"length": (1.5, 4.0)}),
    "l_bracket": Family(l_bracket, {"foot": (1.0, 1.8), "width": (0.3, 0.5), "height": (0.4, 1.0)}),
    "cube_with_hole": Family(cube_with_hole, {"hole": (0.8, 1.4), "height": (1.2, 2.0)}),
}
"""Families by class name, the part of a shape's id before the last underscore. Add new ones at the end: the position
of a family is its label and part of the seed of its shapes."""


def _sample_parts(random: Generator, count: int, parts: Sequence[tuple[float, Sampler]]) -> Surface:
    """Sample a surface of several parts, given as (area, sampler), in proportion to their areas."""
    areas = np.array([area for area, _ in parts])
    which = random.choice(len(parts), count, p=areas / areas.sum())
    points, normals = np.empty((count, 3)), np.empty((count, 3))
    for number, (_, sampler) in enumerate(parts):
        here = which == number
        points[here], normals[here] = sampler(int(here.sum()))
    return points, normals


def _disc(random: Generator, count: int, height: float, up: float) -> Surface:
    """Sample the unit disc at this height, facing up (1) or down (-1)."""
    radius, angle = np.sqrt(random.random(count)), random.uniform(0, 2 * math.pi, count)
    points = np.stack([radius * np.cos(angle), radius * np.sin(angle), np.full(count, height)], axis=1)
    return points, np.tile([0.0, 0.0, up], (count, 1))


def _wall(random: Generator, count: int, height: float) -> Surface:
    """Sample the side of an upright cylinder of radius 1."""
    angle = random.uniform(0, 2 * math.pi, count)
    normals = np.stack([np.cos(angle), np.sin(angle), np.zeros(count)], axis=1)
    points = normals.copy()
    points[:, 2] = random.uniform(-height / 2, height / 2, count)
    return points, normals


def _sample_angles(random: Generator, count: int, slope: float) -> Array:
    """Sample angles with density proportional to 1 + slope cos, the area of a bent tube by angle.

    The densities at opposite angles add up to a constant, so a rejected angle is replaced by its opposite.
    """
    angle = random.uniform(0, 2 * math.pi, count)
    kept = 2 * random.random(count) < 1 + slope * np.cos(angle)
    return np.where(kept, angle, angle + math.pi)


def _faces(
    random: Generator, count: int, corners: Array, first: Array, second: Array, *, triangles: bool = False
) -> Surface:
    """Sample parallelograms or triangles, given by a corner and two edges [f, 3] with outward cross product."""
    normals = np.cross(first, second)
    areas = np.linalg.norm(normals, axis=1)
    which = random.choice(len(areas), count, p=areas / areas.sum())
    along = random.random((count, 2))
    if triangles:
        along = np.where(along.sum(axis=1, keepdims=True) > 1, 1 - along, along)
    points = corners[which] + along[:, :1] * first[which] + along[:, 1:] * second[which]
    return points, (normals / areas[:, None])[which]


def _extrude(
    random: Generator, count: int, xs: Sequence[float], ys: Sequence[float], cells: Sequence[str], height: float
) -> Surface:
    """Sample an upright prism over the cells "#" of a grid with lines at ``xs`` and ``ys``; texts are rows of cells."""
    filled = np.pad(np.array([[cell == "#" for cell in row] for row in cells]), 1)
    up = (0.0, 0.0, height)
    faces: list[tuple[tuple[float, float, float], ...]] = []
    for row, column in np.argwhere(filled):
        left, right, near, far = xs[column - 1], xs[column], ys[row - 1], ys[row]
        x, y = (right - left, 0.0, 0.0), (0.0, far - near, 0.0)
        faces += [((left, near, height / 2), x, y), ((left, near, -height / 2), y, x)]
        # There is a wall between a filled and an empty cell.
        walls = {
            (0, 1): ((right, near, -height / 2), y, up),
            (0, -1): ((left, near, -height / 2), up, y),
            (1, 0): ((left, far, -height / 2), up, x),
            (-1, 0): ((left, near, -height / 2), x, up),
        }
        faces += [wall for (down, across), wall in walls.items() if not filled[row + down, column + across]]
    corners, first, second = np.array(faces, dtype=np.float64).transpose(1, 0, 2)
    return _faces(random, count, corners, first, second)
