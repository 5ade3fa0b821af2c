"""Which subgroup a model has left: functions whose symmetry is known, for every kind of group."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from ace_plugins.adapter import (
    E3,
    O2,
    O3,
    SE3,
    SO3,
    Cyclic,
    Dihedral,
    Graphs,
    Grid,
    GroupAction,
    Invariant,
    Positions,
    SO2About,
    Subgroup,
    Vectors,
)
from ace_plugins.errors import AdapterError, ConfigError
from ace_plugins.symmetry.left import SymmetryLeft, find_left
from ace_plugins.symmetry.subgroups import angle_between, name_axis, reflect, rotate, spread_axes


class Function(nn.Module):
    """A function of points x [n, 4, 3] as a model."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def find(function: Callable[[Tensor], Tensor], group: Any = O3, *, batches: int = 5, size: float = 1.0) -> SymmetryLeft:
    generator = torch.Generator().manual_seed(3)
    data = [size * torch.randn(40, 4, 3, generator=generator, dtype=torch.float64) for _ in range(batches)]
    kind = Positions() if getattr(group, "translations", False) else Vectors()
    return find_left(Function(function), GroupAction(group, {"x": kind}, Invariant()), [(x,) for x in data])


def kept(left: SymmetryLeft) -> list[str]:
    return [each.name for each in left.kept]


def distances(x: Tensor) -> Tensor:
    return (x[:, 1:] - x[:, :1]).norm(dim=-1).tanh().sum(1)


@settings(max_examples=6, deadline=None)
@given(st.tuples(*[st.floats(-1, 1)] * 3).filter(lambda axis: math.hypot(*axis) > 0.1))
def test_the_axis_of_a_field_is_found(axis: tuple[float, float, float]) -> None:
    unit = torch.tensor(axis, dtype=torch.float64) / math.hypot(*axis)
    left = find(lambda x: distances(x) + torch.tanh(x[:, 0] @ unit + 0.5 * x[:, 1] @ unit))
    turns, *more = left.kept
    assert angle_between(turns.axis, unit.tolist()) < 2
    assert turns.name == f"rotations about {name_axis(turns.axis)}"
    assert [each.name for each in more] == ["reflections in planes that contain it"]
    assert left.sentence.startswith(f"The model keeps {turns.name} and reflections in planes")
    assert {each.verdict for each in left.subgroups} == {"kept", "broken"}


def test_rotations_alone_are_kept_where_the_function_has_a_handedness() -> None:
    def screw(x: Tensor) -> Tensor:
        return torch.tanh(x[:, 0, 2]) + torch.tanh(x[:, 0, 0] * x[:, 1, 1] - x[:, 0, 1] * x[:, 1, 0])

    assert kept(find(screw)) == ["rotations about the z-axis"]
    triple = find(lambda x: torch.linalg.det(x[:, :3]).tanh())  # changes its sign under reflections
    assert kept(triple) == ["all rotations"]


def test_gravity_and_a_floor_leave_what_is_horizontal() -> None:
    left = find(lambda x: distances(x) + torch.tanh(x[:, :, 2]).sum(1), E3)
    assert kept(left) == [
        "rotations about the z-axis",
        "reflections in planes that contain it",
        "translations perpendicular to it",
    ]
    weight = find(lambda x: distances(x) + torch.tanh(x[:, 0, 2] - x[:, 1, 2]), SE3)  # gravity without a floor
    assert kept(weight) == ["rotations about the z-axis", "all translations"]
    for size in (1e-3, 1e3):  # the unit of length does not matter
        scaled = find(lambda x, size=size: torch.tanh(x[:, :, 2] / size).sum(1), E3, size=size)
        assert kept(scaled) == kept(left)
    assert kept(find(lambda x: distances(x) + torch.tanh(x.norm(dim=-1)).sum(1), E3)) == [
        "all rotations",
        "the inversion",
    ]


def test_a_mirror_and_finite_rotations_are_found() -> None:
    mirror = find(lambda x: torch.tanh(x[:, 0, 0] + 0.7 * x[:, 1, 1] * x[:, 0, 1] + x[:, 2, 2] ** 2 * x[:, 0, 0]))
    assert "the reflection in the plane perpendicular to the z-axis" in kept(mirror)
    assert not any("rotations about" in name for name in kept(mirror))

    def square(x: Tensor) -> Tensor:  # a field with the four-fold symmetry of a square about z, pointing up
        return torch.tanh(x[:, 0, 2]) + torch.tanh(x[:, 0, 0] ** 2 * x[:, 0, 1] ** 2)

    assert "rotations by 90 degrees about the z-axis" in kept(find(square, SO3))


@pytest.mark.parametrize("seed", range(3))
def test_nothing_is_named_where_nothing_is_left(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    m, v, w = (torch.randn(size, generator=generator, dtype=torch.float64) for size in ((3, 3), (3,), (3,)))
    left = find(lambda x: torch.tanh(x[:, 0] @ v + 0.7 * ((x[:, 0] @ m) * x[:, 1]).sum(1) + 0.5 * x[:, 1] @ w))
    assert not left.kept
    assert left.sentence.startswith("The model keeps no subgroup of O(3) that was tried.")


def test_a_symmetric_model_keeps_everything() -> None:
    for group in (O3, E3, SO3):
        left = find(distances, group)
        assert (left.sentence, left.subgroups) == (f"The model keeps all of {group.name}.", ())
        assert left.relative < 1e-9
    assert find(torch.zeros_like).subgroups == ()


def test_too_few_samples_give_no_answer() -> None:
    """The size of the break varies from batch to batch, so that three batches cannot tell."""
    sizes = iter([0.3, 3.0, 0.03] * 1000)

    def noisy(x: Tensor) -> Tensor:
        up = torch.tanh(x[:, 0, 2])
        return up + next(sizes) * 0.2 * torch.tanh(x[:, 0, 0])

    left = find(noisy, batches=4)
    assert "cannot tell" in {each.verdict for each in left.subgroups}
    assert "It is unclear whether the model keeps" in left.sentence


IMAGES = [torch.randn(6, 1, 8, 8, generator=torch.Generator().manual_seed(n), dtype=torch.float64) for n in range(5)]


def test_subgroups_of_images() -> None:
    def find_on(weight: Tensor, group: Any) -> SymmetryLeft:
        model = Function(lambda x: (x[:, 0] * weight).sum((1, 2)).tanh())
        return find_left(model, GroupAction(group, {"x": Grid()}, Invariant()), [(x,) for x in IMAGES])

    generic = torch.randn(8, 8, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    half = generic + generic.rot90(2)
    assert kept(find_on(half, Cyclic(4))) == ["rotations by 180 degrees"]
    assert kept(find_on(generic, Cyclic(4))) == []
    both = half + half.flip(-1)  # a rectangle's symmetry: half turns and the two axes
    assert kept(find_on(both, Dihedral(4))) == [
        "rotations by 180 degrees",
        "the reflection in the line at 0 degrees",
        "the reflection in the line at 90 degrees",
    ]
    assert find_on(sum(half.rot90(k) for k in range(2)), Cyclic(4)).subgroups == ()


def test_subgroups_of_the_plane() -> None:
    data = [torch.randn(30, 3, 2, generator=torch.Generator().manual_seed(n), dtype=torch.float64) for n in range(5)]

    def find_in_plane(function: Callable[[Tensor], Tensor]) -> SymmetryLeft:
        return find_left(Function(function), GroupAction(O2, {"x": Vectors()}, Invariant()), [(x,) for x in data])

    def threefold(x: Tensor) -> Tensor:
        z = torch.complex(x[:, 0, 0], x[:, 0, 1])
        return (z**3).imag.tanh() + (z**3).real.tanh()

    assert kept(find_in_plane(threefold))[0] == "rotations by 120 degrees"
    line = find_in_plane(lambda x: torch.tanh(x[:, 0, 0]) + torch.tanh(x[:, 1, 0] * x[:, 0, 1] ** 2))
    assert kept(line) == ["the reflection in the line at 0 degrees"]


def test_wrong_input_is_refused_and_results_are_json() -> None:
    with pytest.raises(ConfigError, match="expected at least 4"):
        find(distances, batches=3)
    nothing = Subgroup("nothing", [rotate((0, 0, 1), 0.0)])
    with pytest.raises(ConfigError, match="group nothing"):
        find(distances, nothing)
    with pytest.raises(AdapterError, match="three numbers"):
        SO2About((0.0, 0.0, 0.0))
    found = find(lambda x: torch.tanh(x[:, 0, 2]), SO3).to_dict()
    assert found["sentence"] == "The model keeps rotations about the z-axis; it breaks the rest of SO(3)."
    assert {*found["subgroups"][0]} == {"name", "error", "low", "high", "axis", "verdict"}
    assert len(found["axes"]) == 100


def test_elements_of_subgroups() -> None:
    generator = torch.Generator().manual_seed(0)
    axis = torch.tensor([0.6, 0.0, 0.8], dtype=torch.float64)
    for group in (SO2About((3.0, 0.0, 4.0)), SO2About((0.6, 0.0, 0.8), mirrors=True)):
        drawn = group.sample_many(400, generator)
        assert torch.allclose(drawn.matrix @ axis, axis.expand(400, 3))
        assert torch.allclose(drawn.matrix @ drawn.matrix.mT, torch.eye(3, dtype=torch.float64).expand(400, 3, 3))
        rotations = float((torch.linalg.det(drawn.matrix) > 0).double().mean())
        assert rotations == 1 if not group.mirrors else 0.4 < rotations < 0.6
        angles = torch.acos((torch.diagonal(drawn.matrix[:100], dim1=1, dim2=2).sum(1) - 1).div(2).clamp(-1, 1))
        assert group.mirrors or 1.2 < float(angles.mean()) < 1.9  # uniform on [0, pi]: pi / 2
    assert torch.allclose(
        rotate((0, 0, 1), math.pi / 2).matrix @ torch.tensor([1.0, 0, 0]).double(),
        torch.tensor([0.0, 1, 0]).double(),
        atol=1e-12,
    )
    mirror = Subgroup("mirror", [rotate((0, 0, 1), 0.0), reflect((0, 0, 1))])
    assert {round(float(mirror.sample(generator).sign)) for _ in range(20)} == {1, -1}
    assert mirror.sample_many(50, generator).matrix.shape == (50, 3, 3)
    assert max(min(angle_between(a, b) for b in spread_axes(150)) for a in [(1, 0, 0), (0, 1, 0), (0, 0, 1)]) < 12


def test_actions_take_subgroups_with_one_element_per_graph() -> None:
    for group in (SO2About((0, 0, 1)), Subgroup("half turns", [rotate((0, 0, 1), 0.0), rotate((0, 0, 1), math.pi)])):
        action = GroupAction(group, {"x": Positions()}, Invariant(), graphs=Graphs(batch="batch"))
        x, batch = torch.randn(40, 3, dtype=torch.float64), torch.arange(20).repeat_interleave(2)
        frame = action.sample_frame(torch.Generator().manual_seed(1), ["x", "batch"], (x, batch), {})
        (turned, _), _ = action.act_on_inputs(frame, ["x", "batch"], (x, batch), {})
        assert torch.allclose(turned[:, 2], x[:, 2])
        assert torch.allclose(turned.norm(dim=1), x.norm(dim=1))
        angles = torch.atan2(turned[:, 1], turned[:, 0]) - torch.atan2(x[:, 1], x[:, 0])
        pairs = torch.stack([angles.cos(), angles.sin()], 1).view(20, 2, 2)
        assert torch.allclose(pairs[:, 0], pairs[:, 1])  # both nodes of a graph turn alike
        assert len({round(float(cosine), 6) for cosine in pairs[:, 0, 0]}) > 1  # graphs do not
