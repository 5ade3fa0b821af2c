"""The paper's toy task: turn a square into another shape, which may or may not share its symmetry.

Squares of two sizes lie anywhere on a small grid, under a little noise. Seen from its middle a square looks the same
after every quarter turn. So must then what an equivariant model makes of it, whatever the target is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

SIDE = 16
"""Pixels of an image along each axis."""
HALF = (3, 4)
"""Pixels from the middle of a square to its edge."""
NOISE = 0.05
"""Standard deviation of what is added to every pixel of an input."""


def _box(x: Tensor, y: Tensor, half_width: Tensor, half_height: Tensor) -> Tensor:
    return (x.abs() <= half_width) & (y.abs() <= half_height)


def _square(x: Tensor, y: Tensor, half: Tensor) -> Tensor:
    return _box(x, y, half - 2, half - 2)


def _rectangle(x: Tensor, y: Tensor, half: Tensor) -> Tensor:
    return _box(x, y, half + 1, half - 2)


def _letter(x: Tensor, y: Tensor, half: Tensor) -> Tensor:
    """An L, with a short bar in the middle."""
    stem, foot = x <= 1 - half, y <= 1 - half
    return _box(x, y, half, half) & (stem | foot | ((y == 0) & (x <= 0)))


TARGETS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "square": _square,
    "rectangle": _rectangle,
    "asymmetric shape": _letter,
}
"""What a square becomes: whether a pixel belongs to it that is x to the right of the middle and y above."""


@dataclass(frozen=True)
class Images:
    """Squares [n, 1, SIDE, SIDE], and what they are to become."""

    inputs: Tensor
    targets: Tensor
    floor: float
    """The mean squared error below which no C_4-equivariant model gets on squares without noise."""

    def __len__(self) -> int:
        return len(self.inputs)


def draw(count: int, target: str, seed: int) -> Images:
    """So many squares at random places; the same ones for every target."""
    made = torch.Generator().manual_seed(seed)
    half = torch.tensor(HALF)[torch.randint(len(HALF), (count, 1, 1, 1), generator=made)]
    margin = half + 2
    place = torch.rand(2, count, 1, 1, 1, generator=made) * (SIDE - 2 * margin)
    column, row = place.long() + margin
    x = torch.arange(SIDE) - column
    y = row - torch.arange(SIDE)[:, None]
    shape = TARGETS[target]
    # The four quarter turns of the target about the square's middle: an equivariant model cannot tell which is meant,
    # and their mean is the best guess.
    turned = [shape(a, b, half).float() for a, b in ((x, y), (y, -x), (-x, -y), (-y, x))]
    noise = NOISE * torch.randn(count, 1, SIDE, SIDE, generator=made)
    inputs = _box(x, y, half, half).float() + noise
    floor = float((turned[0] - torch.stack(turned).mean(0)).square().mean())
    return Images(inputs, turned[0], floor)
