"""The finite groups of the plane on images, against torch.rot90 and torch.flip."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import generator
from torch import Tensor

from ace_plugins.adapter import Cyclic, Dihedral, Grid, Vectors

quick = settings(max_examples=25, deadline=None, derandomize=True)
whole = st.integers(-9, 9)
sides = st.integers(1, 7)


def image(side: int, seed: int) -> Tensor:
    return torch.randn(2, 3, side, side, generator=generator(seed))


def flipped(x: Tensor, axis: str) -> Tensor:
    """Upside down (at the x axis) or left to right (at the y axis)."""
    return x.flip(-2 if axis == "x" else -1)


@quick
@given(k=whole, turns=st.sampled_from([1, 2, 4, 8]), side=sides, seed=whole)
def test_quarter_turns_are_rot90_bit_for_bit(k: int, turns: int, side: int, seed: int) -> None:
    x = image(side, seed + 9)
    quarter = Cyclic(turns).rotation(k * max(1, turns // 4))
    steps = k * {1: 4, 2: 2}.get(turns, 1)
    assert torch.equal(Grid()(quarter, x), torch.rot90(x, steps, (-2, -1)))


@quick
@given(k=whole, axis=st.sampled_from(["x", "y"]), side=sides, seed=whole)
def test_reflections_are_flip_and_then_rot90_bit_for_bit(k: int, axis: str, side: int, seed: int) -> None:
    x = image(side, seed + 9)
    mirror = Dihedral(4, 0.0 if axis == "x" else math.pi / 2).reflection(k)
    assert torch.equal(Grid()(mirror, x), torch.rot90(flipped(x, axis), k, (-2, -1)))


@quick
@given(seed=whole, side=sides)
def test_images_are_acted_on_as_the_group_multiplies(seed: int, side: int) -> None:
    gen, x = generator(seed + 9), image(side, seed + 30)
    g, h = (Dihedral(4).sample(gen) for _ in range(2))
    grid = Grid()
    assert torch.equal(grid(g.compose(h), x), grid(g, grid(h, x)))
    assert torch.equal(grid(g.inverse(), grid(g, x)), x)


@pytest.mark.parametrize("axis", ["x", "y"])
def test_a_vector_field_is_mirrored_with_its_arrows(axis: str) -> None:
    field = torch.randn(2, 4, 4, generator=generator(1))  # x and y components
    mirror = Dihedral(4, 0.0 if axis == "x" else math.pi / 2).reflection(0)
    signs = torch.tensor([1.0, -1.0] if axis == "x" else [-1.0, 1.0])[:, None, None]
    torch.testing.assert_close(Grid(of=Vectors(axis=-3))(mirror, field), flipped(signs * field, axis))


def test_an_oblong_image_can_be_mirrored_and_turned_half() -> None:
    x = torch.randn(1, 3, 5, generator=generator(2))
    assert torch.equal(Grid()(Dihedral(2).reflection(0), x), x.flip(-2))
    assert torch.equal(Grid()(Dihedral(2).reflection(1), x), x.flip(-1))
    assert torch.equal(Grid()(Cyclic(2).rotation(1), x), x.flip(-1, -2))
