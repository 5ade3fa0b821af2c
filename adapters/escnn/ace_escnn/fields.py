"""Translates escnn's groups and field types into groups and actions of ace-plugins."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ace_plugins import adapter as ace

NEAR = 1e-6
"""Largest difference of two matrix entries that count as equal, to find the element that a matrix belongs to."""


def grid_group(space: Any) -> tuple[ace.Cyclic, list[Any]]:
    """Return the subgroup of a gspace's group that maps pixels to pixels, and its elements as objects of escnn.

    The elements are rotations by multiples of 90 degrees, and reflections. For these, images need no interpolation,
    which would add to measured errors.
    """
    fibres = space.fibergroup
    every = fibres.elements if fibres.elements is not None else fibres.grid(4)
    exact = [element for element in every if _moves_pixels(_matrix(space, element))]
    mirrors = [m for m in (_matrix(space, element) for element in exact) if _determinant(m) < 0]
    if len(exact) == 1 and len(every) > 1:
        raise ace.AdapterError(
            f"escnn: no element of {space.name} except the identity maps the pixels of a square grid to pixels, so its "
            "symmetry cannot be measured on images"
        )
    rotations = len(exact) - len(mirrors)
    if not mirrors:
        return ace.Cyclic(rotations), exact
    cosine, sine = mirrors[0][0][0], mirrors[0][1][0]
    return ace.Dihedral(rotations, axis=math.atan2(sine, cosine) / 2), exact


def field_action(kind: Any, elements: Sequence[Any]) -> ace.Action:
    """Return the action of these elements on the channels of a FieldType, with the matrices that escnn computes."""
    if all(representation.is_trivial() for representation in kind.representations):
        return ace.Invariant()
    turns = [_matrix(kind.gspace, element) for element in elements]
    blocks = [[representation(element) for representation in kind.representations] for element in elements]
    return Fields(torch.tensor(turns, dtype=torch.float64), torch.stack([_diagonal(row) for row in blocks]))


@dataclass(frozen=True, eq=False)
class Fields(ace.Action):
    """The action of a finite group with n elements on the channels of a tensor (its dimension 1)."""

    turns: Tensor
    """Matrices [n, 2, 2] by which the elements act on the plane."""
    matrices: Tensor
    """Matrices [n, C, C] by which the same elements act on the channels."""

    def act(self, element: Any, x: Tensor) -> Tensor:
        off = (self.turns - element.matrix).abs().amax((1, 2))
        place = int(off.argmin())
        if float(off[place]) > NEAR:
            raise ace.AdapterError(
                f"escnn: expected one of the group's {len(off)} elements, found {element.matrix.tolist()}"
            )
        matrix = self.matrices[place].to(x.dtype).to(x.device)
        if x.shape[1] != len(matrix):
            raise ace.AdapterError(f"escnn: expected {len(matrix)} channels, found shape {list(x.shape)}")
        return torch.einsum("ij,bj...->bi...", matrix, x)


@dataclass(frozen=True, eq=False)
class FieldLike(ace.Action):
    """The action on an output that is a plain tensor: images [B, C, H, W] are rotated, logits [B, C] are not.

    Channels transform like those of the last escnn layer if there are as many; otherwise they are invariant.
    """

    of: ace.Action
    channels: int

    def act(self, element: Any, x: Tensor) -> Tensor:
        of = self.of if x.dim() > 1 and x.shape[1] == self.channels else ace.Invariant()
        return (ace.Grid(of=of) if x.dim() == 4 else of)(element, x)


def _diagonal(blocks: Sequence[Any]) -> Tensor:
    """Return the block diagonal matrix of these blocks, in float64."""
    made: Tensor = torch.block_diag(*map(torch.from_numpy, blocks))  # type: ignore[no-untyped-call]
    return made.double()


def _matrix(space: Any, element: Any) -> list[list[float]]:
    """Return the matrix [2, 2] of an element in coordinates with x to the right and y up."""
    matrix: list[list[float]] = space.basespace_action(element).tolist()
    return matrix


def _determinant(m: list[list[float]]) -> float:
    return m[0][0] * m[1][1] - m[0][1] * m[1][0]


def _moves_pixels(m: list[list[float]]) -> bool:
    return all(abs(entry - round(entry)) < NEAR for row in m for entry in row)
