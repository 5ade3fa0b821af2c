"""The finite groups of the plane: rotations by parts of a turn, with or without reflections."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigError
from .groups import Rigid


@dataclass(frozen=True)
class Cyclic:
    """C_n: the n rotations of the plane by multiples of 360/n degrees."""

    n: int

    def __post_init__(self) -> None:
        if not isinstance(self.n, int) or self.n < 1:
            raise ConfigError(f"{type(self).__name__}: expected a whole number n >= 1, found {self.n!r}")

    @property
    def name(self) -> str:
        return f"C_{self.n}"

    def identity(self) -> Rigid:
        return self.rotation(0)

    def rotation(self, k: int) -> Rigid:
        """Counterclockwise by k/n of a full turn. Multiples of 90 degrees have whole numbers as entries."""
        quarters, rest = divmod(4 * k, self.n)
        angle = math.pi / 2 * rest / self.n
        turn = torch.linalg.matrix_power(_rotation(0, 1), quarters % 4)
        return Rigid(turn @ _rotation(math.cos(angle), math.sin(angle)), _tensor([0, 0]))

    def sample(self, generator: torch.Generator, *, scale: float = 1.0) -> Rigid:
        """Uniform. There is nothing for ``scale`` to say."""
        return self.rotation(int(torch.randint(self.n, (), generator=generator, device=generator.device)))


@dataclass(frozen=True)
class Dihedral(Cyclic):
    """D_n: the rotations of C_n, and n reflections. One of them is at the line through the origin whose angle to the
    x axis is ``axis``, in radians; the others are at lines that divide the half turn from there into n parts."""

    axis: float = 0.0

    @property
    def name(self) -> str:
        return f"D_{self.n}"

    def reflection(self, k: int) -> Rigid:
        """At the line of ``axis``, then a rotation by k/n of a full turn."""
        cosine, sine = math.cos(2 * self.axis), math.sin(2 * self.axis)
        mirror = Rigid(_tensor([[cosine, sine], [sine, -cosine]]), _tensor([0, 0]))
        return self.rotation(k).compose(mirror)

    def sample(self, generator: torch.Generator, *, scale: float = 1.0) -> Rigid:
        """Uniform on all 2n elements."""
        drawn = int(torch.randint(2 * self.n, (), generator=generator, device=generator.device))
        return self.rotation(drawn) if drawn < self.n else self.reflection(drawn - self.n)


def _tensor(values: Any) -> Tensor:
    """float64 on the CPU, whatever the default dtype and device are."""
    return torch.tensor(values, dtype=torch.float64, device="cpu")


def _rotation(cosine: float, sine: float) -> Tensor:
    """[2, 2]: counterclockwise."""
    return _tensor([[cosine, -sine], [sine, cosine]])
