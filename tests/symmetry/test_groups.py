"""The group laws for every group, and how elements are distributed."""

from __future__ import annotations

import math
import pickle
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import Permutation, Symmetric, close, generator
from torch import Tensor

from ace_plugins.adapter import E2, E3, O2, O3, SE2, SE3, SO2, SO3, Cyclic, Dihedral, Element, Group, Rigid
from ace_plugins.errors import AdapterError

quick = settings(max_examples=10, deadline=None, derandomize=True)

EUCLIDEAN = [O3, SO3, E3, SE3, O2, SO2, E2, SE2]
GROUPS: list[Group] = [
    *EUCLIDEAN,
    *(Cyclic(n) for n in (1, 4, 7)),
    *(Dihedral(n) for n in (1, 4)),
    Dihedral(5, axis=0.3),
    Symmetric(5),
]


def same(a: Element, b: Element) -> None:
    if isinstance(a, Permutation) and isinstance(b, Permutation):
        assert torch.equal(a.to, b.to)
        return
    assert isinstance(a, Rigid)
    assert isinstance(b, Rigid)
    close(a.matrix, b.matrix)
    close(a.translation, b.translation)


@pytest.mark.parametrize("group", GROUPS, ids=lambda g: g.name)
@quick
@given(seed=st.integers(0, 2**32))
def test_elements_form_a_group(group: Group, seed: int) -> None:
    gen = generator(seed)
    g, h, k = (group.sample(gen, scale=2.0) for _ in range(3))
    e = group.identity()
    same(g.compose(h).compose(k), g.compose(h.compose(k)))
    same(g.compose(e), g)
    same(e.compose(g), g)
    same(g.compose(g.inverse()), e)
    same(g.inverse().compose(g), e)
    if isinstance(g, Rigid) and isinstance(h, Rigid):
        assert g.compose(h).sign == g.sign * h.sign
        assert math.isclose(float(torch.linalg.det(g.matrix)), g.sign)


@pytest.mark.parametrize("group", GROUPS, ids=lambda g: g.name)
def test_groups_pickle_and_elements_compare_by_identity(group: Group) -> None:
    again = pickle.loads(pickle.dumps(group))
    assert again == group
    assert again.name == group.name
    same(again.sample(generator(3)), group.sample(generator(3)))
    assert group.identity() != group.identity()
    assert isinstance(group, Group)


@pytest.mark.parametrize("group", EUCLIDEAN, ids=lambda g: g.name)
def test_a_group_has_exactly_its_elements(group: Any) -> None:
    gen = generator(1)
    sampled = [group.sample(gen) for _ in range(40)]
    assert group.name in ("O(3)", "SO(3)", "E(3)", "SE(3)", "O(2)", "SO(2)", "E(2)", "SE(2)")
    assert {g.dimension for g in sampled} == {int(group.name[-2])}
    assert {g.sign for g in sampled} == ({1} if group.name.startswith("S") else {1, -1})
    assert all(g.translation.any() == ("E" in group.name) for g in sampled)


def test_the_random_numbers_of_space_stay_what_they_were() -> None:
    """Errors reported in the past can be measured again: these are the elements of the first release."""
    known = {E3: (0.11445770894, -0.43742878364), SO3: (-0.11445770894, 0.0)}
    for group, (entry, shift) in known.items():
        gen = generator(5)
        sampled = [group.sample(gen, scale=2.0) for _ in range(3)]
        assert float(sampled[0].matrix[0, 0]) == pytest.approx(entry, abs=1e-10)
        assert float(sampled[2].translation[0]) == pytest.approx(shift, abs=1e-10)


D: Any = {"dtype": torch.float64}


@pytest.mark.parametrize(
    ("matrix", "translation"),
    [
        pytest.param(torch.eye(3), torch.zeros(3, **D), id="float32"),
        pytest.param(torch.eye(4, **D), torch.zeros(4, **D), id="four dimensions"),
        pytest.param(torch.eye(3, **D)[0], torch.zeros(3, **D), id="no matrix"),
        pytest.param(torch.eye(3, **D), torch.zeros(2, **D), id="mixed"),
        pytest.param(torch.eye(3, **D), torch.zeros(3, **D, device="meta"), id="device"),
        pytest.param(2 * torch.eye(2, **D), torch.zeros(2, **D), id="scaled"),
        pytest.param(torch.full((3, 3), math.nan, **D), torch.zeros(3, **D), id="nan"),
    ],
)
def test_what_is_no_rigid_motion_is_refused(matrix: Tensor, translation: Tensor) -> None:
    with pytest.raises(AdapterError, match="^element: expected .*, found [^\n]*$"):
        Rigid(matrix, translation)


def test_the_orthogonal_part_in_space_is_uniform() -> None:
    gen, n = generator(1), 2500
    sampled = [O3.sample(gen) for _ in range(n)]
    signs = torch.tensor([float(g.sign) for g in sampled])
    rotations = torch.stack([g.sign * g.matrix for g in sampled])
    noise = 4.5 / n**0.5  # standard errors, of entries with a variance below 1
    assert signs.mean().abs() < noise
    for matrices in (rotations, torch.stack([g.matrix for g in sampled])):
        assert matrices.mean(0).abs().max() < noise
        second = torch.einsum("nij,nkl->ijkl", matrices, matrices) / n
        eye = torch.eye(3, dtype=torch.float64)
        haar = torch.einsum("ik,jl->ijkl", eye, eye) / 3
        assert (second - haar).abs().max() < noise
    # a third moment that tells SO(3) from O(3): E[R00 R11 R22] = 1/6
    assert abs(float((rotations[:, 0, 0] * rotations[:, 1, 1] * rotations[:, 2, 2]).mean()) - 1 / 6) < noise
    # the angle has density (1 - cos t) / pi, so its mean is pi/2 + 2/pi; its deviation is 0.65
    cosine = ((rotations.diagonal(dim1=1, dim2=2).sum(-1) - 1) / 2).clamp(-1, 1)
    assert abs(float(torch.arccos(cosine).mean()) - (math.pi / 2 + 2 / math.pi)) < noise


def test_the_orthogonal_part_in_the_plane_is_uniform() -> None:
    gen, n = generator(1), 1000
    sampled = [O2.sample(gen) for _ in range(n)]
    noise = 4.5 / n**0.5
    assert abs(sum(g.sign for g in sampled)) / n < noise
    for sign in (1, -1):
        angles = torch.tensor([math.atan2(g.matrix[1, 0], g.matrix[0, 0]) for g in sampled if g.sign == sign])
        for harmonic in range(1, 5):  # all Fourier coefficients of a uniform angle vanish
            moments = torch.stack([torch.cos(harmonic * angles), torch.sin(harmonic * angles)]).mean(1)
            assert moments.abs().max() < 4.5 / len(angles) ** 0.5


@pytest.mark.parametrize("n", [1, 3, 4, 8])
def test_the_cyclic_group(n: int) -> None:
    group, gen = Cyclic(n), generator(4)
    turn = group.rotation(1)
    power = group.identity()
    for k in range(n):
        same(power, group.rotation(k))
        close(power.matrix[:, 0], torch.tensor([math.cos(2 * math.pi * k / n), math.sin(2 * math.pi * k / n)], **D))
        power = turn.compose(power)
    same(power, group.identity())
    same(group.rotation(-1), turn.inverse())
    assert group.name == f"C_{n}"
    if n % 4 == 0:  # quarter turns have whole entries
        assert group.rotation(n // 4).matrix.tolist() == [[0, -1], [1, 0]]
    drawn = Counter(round(math.atan2(g.matrix[1, 0], g.matrix[0, 0]) * n / (2 * math.pi)) % n
                    for g in (group.sample(gen) for _ in range(400)))  # fmt: skip
    assert set(drawn) == set(range(n))
    assert all(abs(count - 400 / n) < 4.5 * (400 / n) ** 0.5 for count in drawn.values())


@pytest.mark.parametrize("n", [1, 3, 4])
@pytest.mark.parametrize("axis", [0.0, math.pi / 2, 0.3])
def test_the_dihedral_group(n: int, axis: float) -> None:
    group, gen = Dihedral(n, axis), generator(5)
    mirrors = [group.reflection(k) for k in range(n)]
    along = torch.tensor([math.cos(axis), math.sin(axis)], **D)
    close(mirrors[0].matrix @ along, along)
    for k, mirror in enumerate(mirrors):
        assert mirror.sign == -1
        same(mirror.compose(mirror), group.identity())
        same(mirror.compose(group.rotation(1)), group.rotation(-1).compose(mirror))
        same(mirror, group.rotation(k).compose(mirrors[0]))
    assert group.name == f"D_{n}"
    assert group != Cyclic(n)
    every = torch.stack([e.matrix for e in (*mirrors, *(group.rotation(k) for k in range(n)))])
    drawn = Counter(int((every - group.sample(gen).matrix).abs().amax((1, 2)).argmin()) for _ in range(100 * n))
    assert set(drawn) == set(range(2 * n))
    assert all(abs(count - 50) < 4.5 * 50**0.5 for count in drawn.values())


@pytest.mark.parametrize("group", [SE2, SE3], ids=lambda g: g.name)
def test_translations_are_normal_with_the_scale_given(group: Group) -> None:
    gen, n = generator(2), 1000
    shifts = torch.stack([group.sample(gen, scale=3.0).translation for _ in range(n)])  # type: ignore[attr-defined]
    assert shifts.mean(0).abs().max() < 4.5 * 3 / n**0.5
    assert (shifts.std(0) / 3 - 1).abs().max() < 4.5 / (2 * n) ** 0.5
    assert not group.sample(gen, scale=0.0).translation.any()  # type: ignore[attr-defined]


@pytest.mark.parametrize("group", [E3, E2, Cyclic(1000)], ids=lambda g: g.name)
def test_sampling_is_repeatable_and_leaves_the_global_stream_alone(group: Group) -> None:
    before = torch.random.get_rng_state()
    with torch.device("meta"):  # whatever the defaults are
        first, again, other = (group.sample(generator(seed)).compose(group.identity()) for seed in (7, 7, 8))
    assert torch.equal(before, torch.random.get_rng_state())
    assert isinstance(first, Rigid)
    assert (first.matrix.device.type, first.matrix.dtype) == ("cpu", torch.float64)
    same(first, again)
    assert not torch.allclose(first.matrix, other.matrix)  # type: ignore[attr-defined]
