"""Seeded numbers, objects that hold points, and a group that is not the project's own: S_n, all permutations."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ace_plugins.adapter import Action
from ace_plugins.errors import AdapterError


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=generator(seed), dtype=torch.float64).to(dtype)


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@dataclass(frozen=True, eq=False)
class Permutation:
    """Element i of the set goes to place ``to[i]``."""

    to: Tensor

    def compose(self, other: Permutation) -> Permutation:
        return Permutation(self.to[other.to])

    def inverse(self) -> Permutation:
        return Permutation(self.to.argsort())


@dataclass(frozen=True)
class Symmetric:
    """S_n."""

    n: int

    @property
    def name(self) -> str:
        return f"S_{self.n}"

    def identity(self) -> Permutation:
        return Permutation(torch.arange(self.n))

    def sample(self, generator: torch.Generator, *, scale: float = 1.0) -> Permutation:
        return Permutation(torch.randperm(self.n, generator=generator))


@dataclass(frozen=True)
class Members(Action):
    """The members of a set, along one axis."""

    axis: int = 0

    def act(self, element: Permutation, x: Tensor) -> Tensor:
        if not isinstance(element, Permutation):
            raise AdapterError(f"{self}: expected a Permutation, found {type(element).__name__}")
        return x.index_select(self.axis, element.inverse().to)


@dataclass
class Points:
    pos: Tensor
    z: int = 0


@dataclass(frozen=True)
class FrozenPoints:
    pos: Tensor
    z: int = 0


class BarePoints:
    def __init__(self, pos: Tensor) -> None:
        self.pos, self.z = pos, 0
