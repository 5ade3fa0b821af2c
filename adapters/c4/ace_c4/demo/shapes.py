"""Images of the paper's toy task: turn a square into another shape, which may or may not have its symmetry.

Squares of two sizes lie anywhere on a small grid, with a little noise. A square is the same after a quarter turn about
its centre, so the output of an equivariant model must be too, whatever the target is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

SIDE = 16
"""Width and height of an image in pixels."""
HALF = (3, 4)
"""Distances from the centre of a square to its edge, in pixels."""
NOISE = 0.05
"""Standard deviation of the noise on every input pixel."""


def _box(x: Tensor, y: Tensor, half_width: Tensor, half_height: Tensor) -> Tensor:
    return (x.abs() <= half_width) & (y.abs() <= half_height)


def _square(x: Tensor, y: Tensor, half: Tensor) -> Tensor:
    return _box(x, y, half - 2, half - 2)


def _rectangle(x: Tensor, y: Tensor, half: Tensor) -> Tensor:
    return _box(x, y, half + 1, half - 2)


def _letter(x: Tensor, y: Tensor, half: Tensor) -> Tensor:
    """Return whether a pixel belongs to an L with a short bar in the middle."""
    stem, foot = x <= 1 - half, y <= 1 - half
    return _box(x, y, half, half) & (stem | foot | ((y == 0) & (x <= 0)))


TARGETS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "square": _square,
    "rectangle": _rectangle,
    "asymmetric shape": _letter,
}
"""Target shapes: whether the pixel x to the right of the square's centre and y above it belongs to the shape."""


@dataclass(frozen=True)
class Images:
    """Squares and their targets, [n, 1, SIDE, SIDE] each."""

    inputs: Tensor
    targets: Tensor
    floor: float
    """Lowest mean squared error of any C_4-equivariant model on squares without noise."""

    def __len__(self) -> int:
        return len(self.inputs)


def draw(count: int, target: str, seed: int) -> Images:
    """Draw squares at random places. They are the same for every target."""
    made = torch.Generator().manual_seed(seed)
    half = torch.tensor(HALF)[torch.randint(len(HALF), (count, 1, 1, 1), generator=made)]
    margin = half + 2
    place = torch.rand(2, count, 1, 1, 1, generator=made) * (SIDE - 2 * margin)
    column, row = place.long() + margin
    x = torch.arange(SIDE) - column
    y = row - torch.arange(SIDE)[:, None]
    shape = TARGETS[target]
    # An equivariant model cannot distinguish the four rotations of the target about the square's centre. Its best
    # output is their mean.
    rotated = [shape(a, b, half).float() for a, b in ((x, y), (y, -x), (-x, -y), (-y, x))]
    noise = NOISE * torch.randn(count, 1, SIDE, SIDE, generator=made)
    inputs = _box(x, y, half, half).float() + noise
    floor = float((rotated[0] - torch.stack(rotated).mean(0)).square().mean())
    return Images(inputs, rotated[0], floor)
