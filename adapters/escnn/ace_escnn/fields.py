"""escnn's groups and feature fields as the host's: which elements a grid has, and what they do to channels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ace_plugins import adapter as ace

NEAR = 1e-6
"""How far off an element's matrix may be from the one it is taken for."""


def group_of(space: Any) -> tuple[ace.Cyclic, list[Any]]:
    """The part of a gspace's group that moves whole pixels (multiples of 90 degrees, and reflections between them), and
    its elements in escnn. What is measured with these is the model's own error, and no interpolation's."""
    fibres = space.fibergroup
    every = fibres.elements if fibres.elements is not None else fibres.grid(4)
    exact = [element for element in every if _moves_pixels(_matrix(space, element))]
    mirrors = [m for m in (_matrix(space, element) for element in exact) if _determinant(m) < 0]
    if len(exact) == 1 and len(every) > 1:
        raise ace.AdapterError(
            f"escnn: {space.name} has no element but the identity that moves whole pixels of a square grid, so that "
            "its symmetry cannot be seen on images"
        )
    rotations = len(exact) - len(mirrors)
    if not mirrors:
        return ace.Cyclic(rotations), exact
    cosine, sine = mirrors[0][0][0], mirrors[0][1][0]
    return ace.Dihedral(rotations, axis=math.atan2(sine, cosine) / 2), exact


def field_action(kind: Any, elements: Sequence[Any]) -> ace.Action:
    """How elements act on the channels of a FieldType: escnn's own matrices, element by element."""
    if all(representation.is_trivial() for representation in kind.representations):
        return ace.Invariant()
    turns = [_matrix(kind.gspace, element) for element in elements]
    blocks = [[representation(element) for representation in kind.representations] for element in elements]
    return Fields(torch.tensor(turns, dtype=torch.float64), torch.stack([_diagonal(row) for row in blocks]))


@dataclass(frozen=True, eq=False)
class Fields(ace.Action):
    """The channels, dimension 1 of a tensor, under the elements of a finite group."""

    turns: Tensor
    """[n, 2, 2]: what each element does to the plane."""
    matrices: Tensor
    """[n, C, C]: what it does to the channels."""

    def act(self, element: Any, x: Tensor) -> Tensor:
        off = (self.turns - element.matrix).abs().amax((1, 2))
        place = int(off.argmin())
        if float(off[place]) > NEAR:
            raise ace.AdapterError(f"escnn: expected one of {len(off)} elements, found {element.matrix.tolist()}")
        matrix = self.matrices[place].to(x.dtype).to(x.device)
        if x.shape[1] != len(matrix):
            raise ace.AdapterError(f"escnn: expected {len(matrix)} channels, found shape {list(x.shape)}")
        return torch.einsum("ij,bj...->bi...", matrix, x)


@dataclass(frozen=True, eq=False)
class FieldLike(ace.Action):
    """What a plain model gives, as its shape tells: images [B, C, H, W] turn, logits [B, C] do not.

    Channels turn as those of its last escnn layer, where there are as many; other channels stay as they are.
    """

    of: ace.Action
    channels: int

    def act(self, element: Any, x: Tensor) -> Tensor:
        of = self.of if x.dim() > 1 and x.shape[1] == self.channels else ace.Invariant()
        return (ace.Grid(of=of) if x.dim() == 4 else of)(element, x)


def _diagonal(blocks: Sequence[Any]) -> Tensor:
    """The blocks as one matrix, float64."""
    made: Tensor = torch.block_diag(*map(torch.from_numpy, blocks))  # type: ignore[no-untyped-call]
    return made.double()


def _matrix(space: Any, element: Any) -> list[list[float]]:
    """[2, 2]: what an element does to the plane, x to the right and y up."""
    matrix: list[list[float]] = space.basespace_action(element).tolist()
    return matrix


def _determinant(m: list[list[float]]) -> float:
    return m[0][0] * m[1][1] - m[0][1] * m[1][0]


def _moves_pixels(m: list[list[float]]) -> bool:
    return all(abs(entry - round(entry)) < NEAR for row in m for entry in row)
