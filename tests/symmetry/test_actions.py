"""Every action on tensors: the laws of a group action, numbers known by hand, and refusals."""

from __future__ import annotations

import importlib.util
import math
import pickle
import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import Members, Symmetric, close, generator, normal
from torch import Tensor

from ace_plugins.adapter import (
    E2,
    E3,
    O2,
    O3,
    SE2,
    SE3,
    SO2,
    SO3,
    Action,
    Cyclic,
    Element,
    Grid,
    Group,
    Invariant,
    Irreps,
    Positions,
    PseudoVectors,
    Rigid,
    Tensors,
    Vectors,
)
from ace_plugins.errors import AdapterError

needs_e3nn = pytest.mark.skipif(
    importlib.util.find_spec("e3nn") is None, reason="e3nn is not installed: pip install e3nn"
)
quick = settings(max_examples=10, deadline=None, derandomize=True)

SPACE, PLANE = [O3, SO3, E3, SE3], [O2, SO2, E2, SE2, Cyclic(5)]
IRREPS = "2x0e+0o+2x1o+1e+2e+2o+3o+4e"


# an action, the shape of a tensor it acts on, and the groups it acts under
ACTIONS = [
    pytest.param(Invariant(), (4, 5), [*SPACE, *PLANE, Symmetric(4)], id="invariant"),
    pytest.param(Vectors(), (4, 3), SPACE, id="vectors"),
    pytest.param(Vectors(axis=1), (2, 3, 4), SPACE, id="vectors-axis1"),
    pytest.param(Vectors(), (4, 2), PLANE, id="vectors-plane"),
    pytest.param(Positions(), (4, 3), SPACE, id="positions"),
    pytest.param(Positions(axis=0), (2, 4), PLANE, id="positions-plane-axis0"),
    pytest.param(PseudoVectors(), (4, 3), SPACE, id="pseudovectors"),
    pytest.param(PseudoVectors(), (4, 2), PLANE, id="pseudovectors-plane"),
    pytest.param(Tensors(), (4, 3, 3), SPACE, id="tensors"),
    pytest.param(Tensors(axes=(2, 0)), (2, 4, 2), PLANE, id="tensors-plane-axes"),
    pytest.param(Irreps(IRREPS), (2, 38), SPACE, id="irreps", marks=needs_e3nn),
    pytest.param(Irreps("2x1o+0e", axis=1), (2, 7, 3), SPACE, id="irreps-axis1", marks=needs_e3nn),
    pytest.param(Grid(), (2, 5, 5), [Cyclic(4), Cyclic(2)], id="grid"),
    pytest.param(Grid(axes=(0, -2)), (4, 4, 3), [Cyclic(4)], id="grid-axes"),
    pytest.param(Grid(of=Vectors(axis=-3)), (3, 2, 4, 4), [Cyclic(4)], id="grid-of-vectors"),
    pytest.param(Members(axis=1), (2, 4, 3), [Symmetric(4)], id="members"),
]
# where Euler angles and arc cosines are at their worst
SPECIAL = [
    torch.diag(torch.tensor(signs, dtype=torch.float64))
    for signs in ([1.0, 1.0, 1.0], [1.0, -1.0, -1.0], [-1.0, 1.0, -1.0], [-1.0, -1.0, 1.0])
] + [torch.tensor([[0.0, 0.0, 1.0], [1.0, 0.0, 0.0], [0.0, 1.0, 0.0]], dtype=torch.float64)]


def elements(group: Group) -> st.SearchStrategy[Element]:
    random = st.integers(0, 2**32).map(lambda seed: group.sample(generator(seed), scale=2.0))
    if group not in SPACE:
        return random

    def special(matrix: Tensor, other: Rigid) -> Rigid:
        return Rigid(other.sign * matrix, other.translation)

    return random | st.builds(special, st.sampled_from(SPECIAL), random)


def plane(*rows: list[float]) -> Rigid:
    return Rigid(torch.tensor(rows, dtype=torch.float64), torch.zeros(2, dtype=torch.float64))


def turn(degrees: float) -> Rigid:
    c, s = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    return plane([c, -s], [s, c])


# --- laws


@pytest.mark.parametrize(("action", "shape", "groups"), ACTIONS)
@quick
@given(data=st.data())
def test_actions_are_group_actions(
    action: Action, shape: tuple[int, ...], groups: list[Group], data: st.DataObject
) -> None:
    group = data.draw(st.sampled_from(groups))
    g, h = data.draw(elements(group)), data.draw(elements(group))
    x = normal(*shape, seed=data.draw(st.integers(0, 2**16)))
    before = x.clone()
    close(action(g, action(h, x)), action(g.compose(h), x))
    close(action(g.inverse(), action(g, x)), x)
    close(action(group.identity(), x), x)
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(("action", "shape", "groups"), ACTIONS)
def test_dtype_and_layout_are_kept(
    action: Action, shape: tuple[int, ...], groups: list[Group], dtype: torch.dtype
) -> None:
    g, x = groups[0].sample(generator(3)), normal(*shape, dtype=dtype)
    y = action(g, x)
    assert y.dtype == dtype
    assert y.shape == x.shape
    assert y.is_contiguous()
    # halves are computed in float32 and rounded once, at the end
    exact = action(g, x.double())
    if dtype.itemsize < 4:
        assert torch.equal(y, action(g, x.float()).to(dtype))
    assert float((y.double() - exact).abs().max()) <= 8 * torch.finfo(dtype).eps * float(exact.abs().max())


@pytest.mark.parametrize(("action", "shape", "groups"), ACTIONS)
def test_actions_pickle_compare_pass_none_and_let_gradients_through(
    action: Action, shape: tuple[int, ...], groups: list[Group]
) -> None:
    again = pickle.loads(pickle.dumps(action))
    assert again == action
    assert hash(again) == hash(action)
    g, x = groups[0].sample(generator(3)), normal(*shape).requires_grad_()
    assert torch.equal(again(g, x), action(g, x))
    assert action(g, None) is None
    assert action(g, x).requires_grad


# --- by hand


def test_vectors_by_hand() -> None:
    to_next = Rigid(SPECIAL[4], torch.tensor([10.0, 20.0, 30.0], dtype=torch.float64))  # x to y to z to x
    mirrored = Rigid(-SPECIAL[4], to_next.translation)
    x = torch.tensor([[1.0, 2.0, 3.0]])
    assert Vectors()(to_next, x).tolist() == [[3.0, 1.0, 2.0]]
    assert Vectors(axis=0)(to_next, x.T).tolist() == [[3.0], [1.0], [2.0]]
    assert Positions()(to_next, x).tolist() == [[13.0, 21.0, 32.0]]
    assert Vectors()(mirrored, x).tolist() == [[-3.0, -1.0, -2.0]]
    assert PseudoVectors()(mirrored, x).tolist() == [[3.0, 1.0, 2.0]]
    mirror = plane([1.0, 0.0], [0.0, -1.0])
    assert Vectors()(Cyclic(4).rotation(1), x[:, :2]).tolist() == [[-2.0, 1.0]]
    assert PseudoVectors()(mirror, x[:, :2]).tolist() == [[-1.0, 2.0]]


@pytest.mark.parametrize("group", [E3, SO3], ids=lambda g: g.name)
def test_products_of_vectors(group: Group) -> None:
    gen, a, b = generator(4), normal(5, 3, seed=1), normal(5, 3, seed=2)
    for _ in range(4):
        g = group.sample(gen)
        turned_a, turned_b = Vectors()(g, a), Vectors()(g, b)
        close(torch.linalg.cross(turned_a, turned_b), PseudoVectors()(g, torch.linalg.cross(a, b)))
        close(turned_a[:, :, None] * turned_b[:, None], Tensors()(g, a[:, :, None] * b[:, None]))
        # a cell: the rows are lattice vectors, and whole numbers of them give positions
        close(Vectors()(g, a[:3].T @ b[:3]), a[:3].T @ Vectors()(g, b[:3]))


def test_autocast_does_not_reach_the_action() -> None:
    g, x = SO3.sample(generator(5)), normal(64, 3, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = Vectors()(g, x)
    assert torch.equal(inside, Vectors()(g, x))


# --- grids


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool])
def test_quarter_turns_and_their_reflections_move_whole_pixels(dtype: torch.dtype) -> None:
    x = normal(3, 5, 5).mul(10).to(dtype)
    exact = {
        ((1.0, 0.0), (0.0, 1.0)): x,
        ((0.0, -1.0), (1.0, 0.0)): torch.rot90(x, 1, (-2, -1)),
        ((-1.0, 0.0), (0.0, -1.0)): torch.rot90(x, 2, (-2, -1)),
        ((0.0, 1.0), (-1.0, 0.0)): torch.rot90(x, 3, (-2, -1)),
        ((-1.0, 0.0), (0.0, 1.0)): x.flip(-1),  # x -> -x, left and right
        ((1.0, 0.0), (0.0, -1.0)): x.flip(-2),  # y -> -y, up and down
        ((0.0, -1.0), (-1.0, 0.0)): x.mT,  # y up: rows and columns change places about the line y = -x
        ((0.0, 1.0), (1.0, 0.0)): x.mT.flip(-1, -2),
    }
    for rows, expected in exact.items():
        moved = Grid()(plane(*map(list, rows)), x)
        assert torch.equal(moved, expected)
        assert moved.is_contiguous()
    rounded = turn(30).compose(turn(60))  # a quarter turn but for the last bits
    assert torch.equal(Grid()(rounded, x), torch.rot90(x, 1, (-2, -1)))


def test_a_vector_field_turns_its_pixels_and_its_vectors() -> None:
    field = torch.zeros(2, 3, 3)
    field[:, 1, 2] = torch.tensor([5.0, 7.0])  # right of the centre
    turned = Grid(of=Vectors(axis=-3))(Cyclic(4).rotation(1), field)
    expected = torch.zeros(2, 3, 3)
    expected[:, 0, 1] = torch.tensor([-7.0, 5.0])  # above the centre
    assert torch.equal(turned, expected)


@quick
@given(st.floats(0, 360), st.booleans(), st.sampled_from([(40, 40), (41, 30)]))
def test_any_angle_resamples_a_smooth_image(angle: float, reflected: bool, shape: tuple[int, int]) -> None:
    """A blob off the centre goes where the rotation takes its middle."""
    height, width = shape
    y, x = torch.meshgrid((height - 1) / 2 - torch.arange(height), torch.arange(width) - (width - 1) / 2, indexing="ij")

    def blob(middle: Tensor) -> Tensor:
        return torch.exp(-((x - middle[0]).square() + (y - middle[1]).square()) / 40).double()

    middle = torch.tensor([3.0, 5.0], dtype=torch.float64)
    g = turn(angle).compose(plane([1.0, 0.0], [0.0, -1.0])) if reflected else turn(angle)
    if height != width and float((g.matrix - g.matrix.round()).abs().max()) < 1e-9:
        return
    torch.testing.assert_close(Grid()(g, blob(middle)), blob(g.matrix @ middle), atol=0.03, rtol=0)


def test_resampling_puts_zeros_outside_and_meets_quarter_turns() -> None:
    corner = Grid()(turn(45), torch.ones(1, 9, 9))[0, 0, 0]
    assert corner == 0
    x = normal(2, 6, 6)
    torch.testing.assert_close(Grid()(turn(90.00001), x), torch.rot90(x, 1, (-2, -1)), atol=1e-5, rtol=0)
    elsewhere = Grid(axes=(2, 0))(turn(30), x.movedim((-2, -1), (2, 0)))
    assert torch.equal(elsewhere.movedim((2, 0), (-2, -1)), Grid()(turn(30), x))


# --- refusals


@pytest.mark.parametrize(
    ("action", "element", "x", "message"),
    [
        (Vectors(), SO3, torch.zeros(2, 4), r"Vectors\(axis=-1\): expected size 3 in axis -1, found shape \[2, 4\]"),
        (Vectors(), SO2, torch.zeros(2, 3), r"Vectors\(axis=-1\): expected size 2 in axis -1, found shape \[2, 3\]"),
        (Positions(axis=2), SO3, torch.zeros(3, 3), r"Positions\(axis=2\): expected size 3 in axis 2"),
        (Vectors(), SO3, torch.tensor(1.0), r"expected size 3 in axis .*, found shape \[\]"),
        (Vectors(), SO3, torch.zeros(3, dtype=torch.long), "expected a floating point tensor, found torch.int64"),
        (Vectors(), Symmetric(3), torch.zeros(3), r"Vectors\(axis=-1\): expected .* type Rigid, found Permutation"),
        (Members(), SO3, torch.zeros(3), r"Members\(axis=0\): expected a Permutation, found Rigid"),
        (Invariant(), SO3, [1.0], r"Invariant\(\): expected a tensor, found list"),
        (
            Tensors(),
            SO3,
            torch.zeros(3, 2),
            r"Tensors\(axes=\(-2, -1\)\): expected size 3 in axis -1, found shape \[3, 2\]",
        ),
        (Tensors(), SO3, torch.zeros(3), r"Tensors.*: expected size 3 in axis .*, found shape \[3\]"),
        (Grid(), SO3, torch.zeros(3, 3), "Grid.*: expected an element in 2 dimensions, found 3"),
        (Grid(), Symmetric(3), torch.zeros(3, 3), "Grid.*: expected .* type Rigid, found Permutation"),
        (Grid(), turn(90), torch.zeros(3, 4), "Grid.*: expected H = W for a turn of 90 degrees, found 3 and 4"),
        (Grid(), E2.sample(generator()), torch.zeros(3, 3), "expected a group without translations; use O2"),
        (Grid(of=Vectors(-3)), SO2, torch.zeros(3, 4, 4), r"Vectors\(axis=-3\): expected size 2 in axis -3"),
        pytest.param(Irreps("2x1o"), SO3, torch.zeros(5), "2x1o.*expected size 6 in axis -1", marks=needs_e3nn),
        (Irreps("1o"), SO2, torch.zeros(3), "Irreps.*1o.*: expected an element in 3 dimensions, found 2"),
    ],
)
def test_what_an_action_cannot_take_is_one_line(action: Action, element: Any, x: Any, message: str) -> None:
    with pytest.raises(AdapterError, match=message) as caught:
        action(element.identity() if isinstance(element, Group) else element, x)
    assert "\n" not in str(caught.value)


# --- e3nn


@needs_e3nn
def test_degree_one_is_the_matrix() -> None:
    gen, x = generator(6), normal(5, 3)
    for _ in range(8):
        g = E3.sample(gen)
        close(Irreps("1o")(g, x), x @ g.matrix.T)
        close(Irreps("1e")(g, x), g.sign * x @ g.matrix.T)
        close(Irreps("0o")(g, x[:, :1]), g.sign * x[:, :1])
        close(Irreps("3x0e")(g, x), x)


@needs_e3nn
def test_irreps_agree_with_e3nn() -> None:
    from e3nn import o3

    gen, irreps = generator(7), o3.Irreps(IRREPS)
    x, r = normal(2, irreps.dim), normal(6, 3, seed=1)
    for _ in range(6):
        g = O3.sample(gen)
        theirs = x @ irreps.D_from_matrix(g.matrix).T
        # e3nn makes its generators in the default dtype, here float32
        torch.testing.assert_close(Irreps(IRREPS)(g, x), theirs, rtol=1e-4, atol=1e-4)
        harmonics = o3.Irreps.spherical_harmonics(6)
        before, after = (o3.spherical_harmonics(harmonics, points, normalize=False) for points in (r, Vectors()(g, r)))
        torch.testing.assert_close(Irreps(harmonics)(g, before), after, rtol=1e-9, atol=1e-8)


def test_without_e3nn_the_error_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "e3nn", None)
    action = Irreps("1o")  # making one is fine
    with pytest.raises(AdapterError, match=r"e3nn is not installed; pip install e3nn"):
        action(SO3.identity(), torch.zeros(1, 3))
