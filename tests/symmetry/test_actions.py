"""Group axioms for every action and group, the sampler's distribution, and actions on whole calls."""

from __future__ import annotations

import importlib.util
import math
import pickle
import sys
from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ace_plugins.actions import (
    E3,
    O3,
    SE3,
    SO3,
    Action,
    Element,
    Group,
    GroupAction,
    Invariant,
    Irreps,
    Positions,
    PseudoVectors,
    Vectors,
)
from ace_plugins.errors import AdapterError, ConfigError

needs_e3nn = pytest.mark.skipif(
    importlib.util.find_spec("e3nn") is None, reason="e3nn is not installed: pip install e3nn"
)
needs_pyg = pytest.mark.skipif(
    importlib.util.find_spec("torch_geometric") is None, reason="torch-geometric is not installed"
)
quick = settings(max_examples=10, deadline=None, derandomize=True)

GROUPS = [O3, SO3, E3, SE3]
IRREPS = "2x0e+0o+2x1o+1e+2e+2o+3o+4e"
# each with the shape of a tensor it acts on
ACTIONS = [
    pytest.param(Invariant(), (4, 5), id="invariant"),
    pytest.param(Vectors(), (4, 3), id="vectors"),
    pytest.param(Vectors(axis=1), (2, 3, 4), id="vectors-axis1"),
    pytest.param(Positions(), (4, 3), id="positions"),
    pytest.param(Positions(axis=0), (3, 4), id="positions-axis0"),
    pytest.param(PseudoVectors(), (4, 3), id="pseudovectors"),
    pytest.param(Irreps(IRREPS), (2, 38), id="irreps", marks=needs_e3nn),
    pytest.param(Irreps("2x1o+0e", axis=1), (2, 7, 3), id="irreps-axis1", marks=needs_e3nn),
]
# where Euler angles and arc cosines are at their worst
SPECIAL = [
    torch.diag(torch.tensor(signs, dtype=torch.float64))
    for signs in ([1.0, 1.0, 1.0], [1.0, -1.0, -1.0], [-1.0, 1.0, -1.0], [-1.0, -1.0, 1.0])
] + [torch.tensor([[0.0, 0.0, 1.0], [1.0, 0.0, 0.0], [0.0, 1.0, 0.0]], dtype=torch.float64)]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=generator(seed), dtype=torch.float64).to(dtype)


def elements(group: Group) -> st.SearchStrategy[Element]:
    random = st.integers(0, 2**32).map(lambda seed: group.sample(generator(seed), scale=2.0))

    def special(matrix: Tensor, other: Element) -> Element:
        return Element(other.sign * matrix, other.translation)

    return random | st.builds(special, st.sampled_from(SPECIAL), random)


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


# --- elements and groups


@pytest.mark.parametrize("group", GROUPS, ids=lambda g: g.name)
@quick
@given(data=st.data())
def test_elements_form_a_group(group: Group, data: st.DataObject) -> None:
    g, h, k = (data.draw(elements(group)) for _ in range(3))
    e = Element.identity()

    def same(a: Element, b: Element) -> None:
        close(a.matrix, b.matrix)
        close(a.translation, b.translation)

    same(g.compose(h).compose(k), g.compose(h.compose(k)))
    same(g.compose(e), g)
    same(e.compose(g), g)
    same(g.compose(g.inverse()), e)
    same(g.inverse().compose(g), e)
    assert g.compose(h).sign == g.sign * h.sign
    assert group.reflections or g.sign == 1
    assert group.translations or not g.translation.any()


@pytest.mark.parametrize(
    ("matrix", "translation"),
    [
        (torch.eye(3), torch.zeros(3, dtype=torch.float64)),
        (torch.eye(4, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)),
        (torch.eye(3, dtype=torch.float64), torch.zeros(1, 3, dtype=torch.float64)),
        (2 * torch.eye(3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)),
        (torch.full((3, 3), math.nan, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)),
    ],
    ids=["float32", "size", "translation", "scaled", "nan"],
)
def test_what_is_no_element_is_refused(matrix: Tensor, translation: Tensor) -> None:
    with pytest.raises(AdapterError, match="element: expected"):
        Element(matrix, translation)


def test_the_orthogonal_part_is_uniform() -> None:
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


def test_translations_are_normal_with_the_scale_given() -> None:
    gen, n = generator(2), 1000
    shifts = torch.stack([SE3.sample(gen, scale=3.0).translation for _ in range(n)])
    assert shifts.mean(0).abs().max() < 4.5 * 3 / n**0.5
    assert (shifts.std(0) / 3 - 1).abs().max() < 4.5 / (2 * n) ** 0.5
    assert not SE3.sample(gen, scale=0.0).translation.any()


def test_sampling_is_repeatable_and_leaves_the_global_stream_alone() -> None:
    before = torch.random.get_rng_state()
    first, again, other = (E3.sample(generator(seed)) for seed in (7, 7, 8))
    assert torch.equal(before, torch.random.get_rng_state())
    assert torch.equal(first.matrix, again.matrix)
    assert torch.equal(first.translation, again.translation)
    assert not torch.equal(first.matrix, other.matrix)


@pytest.mark.parametrize("scale", [-1.0, math.inf, math.nan])
def test_an_impossible_scale_is_refused(scale: float) -> None:
    with pytest.raises(ConfigError, match="scale: expected a finite number >= 0"):
        SE3.sample(generator(), scale=scale)


# --- actions on a tensor


@pytest.mark.parametrize("group", GROUPS, ids=lambda g: g.name)
@pytest.mark.parametrize(("action", "shape"), ACTIONS)
@quick
@given(data=st.data())
def test_actions_are_group_actions(action: Action, shape: tuple[int, ...], group: Group, data: st.DataObject) -> None:
    g, h = data.draw(elements(group)), data.draw(elements(group))
    x = normal(*shape, seed=data.draw(st.integers(0, 2**16)))
    before = x.clone()
    close(action(g, action(h, x)), action(g.compose(h), x))
    close(action(g.inverse(), action(g, x)), x)
    close(action(Element.identity(), x), x)
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(("action", "shape"), ACTIONS)
def test_dtype_and_layout_are_kept(action: Action, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    g, x = E3.sample(generator(3)), normal(*shape, dtype=dtype)
    y = action(g, x)
    assert y.dtype == dtype
    assert y.shape == x.shape
    assert y.is_contiguous()
    # halves are computed in float32 and rounded once, at the end
    exact = action(g, x.double())
    if dtype.itemsize < 4:
        assert torch.equal(y, action(g, x.float()).to(dtype))
    assert float((y.double() - exact).abs().max()) <= 8 * torch.finfo(dtype).eps * float(exact.abs().max())


@pytest.mark.parametrize(("action", "shape"), ACTIONS)
def test_actions_pickle_compare_and_pass_none(action: Action, shape: tuple[int, ...]) -> None:
    again = pickle.loads(pickle.dumps(action))
    assert again == action
    assert hash(again) == hash(action)
    g, x = E3.sample(generator(3)), normal(*shape)
    assert torch.equal(again(g, x), action(g, x))
    assert action(g, None) is None


def test_vectors_by_hand() -> None:
    turn = Element(SPECIAL[4], torch.tensor([10.0, 20.0, 30.0], dtype=torch.float64))  # x to y to z to x
    mirrored = Element(-SPECIAL[4], turn.translation)
    x = torch.tensor([[1.0, 2.0, 3.0]])
    assert Vectors()(turn, x).tolist() == [[3.0, 1.0, 2.0]]
    assert Vectors(axis=0)(turn, x.T).tolist() == [[3.0], [1.0], [2.0]]
    assert Positions()(turn, x).tolist() == [[13.0, 21.0, 32.0]]
    assert Vectors()(mirrored, x).tolist() == [[-3.0, -1.0, -2.0]]
    assert PseudoVectors()(mirrored, x).tolist() == [[3.0, 1.0, 2.0]]


@pytest.mark.parametrize("group", GROUPS, ids=lambda g: g.name)
def test_a_cross_product_is_a_pseudovector(group: Group) -> None:
    gen, a, b = generator(4), normal(5, 3, seed=1), normal(5, 3, seed=2)
    for _ in range(4):
        g = group.sample(gen)
        turned = torch.linalg.cross(Vectors()(g, a), Vectors()(g, b))
        close(turned, PseudoVectors()(g, torch.linalg.cross(a, b)))


def test_autocast_does_not_reach_the_action() -> None:
    g, x = SO3.sample(generator(5)), normal(64, 3, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = Vectors()(g, x)
    assert torch.equal(inside, Vectors()(g, x))


@pytest.mark.parametrize(
    ("action", "x", "message"),
    [
        (Vectors(), torch.zeros(2, 4), r"Vectors\(axis=-1\): expected size 3, found 4 in shape \[2, 4\]"),
        (Positions(axis=2), torch.zeros(3, 3), r"Positions\(axis=2\): expected size 3, found no such axis"),
        (Vectors(), torch.tensor(1.0), r"expected size 3, found no such axis in shape \[\]"),
        (Vectors(), torch.zeros(3, dtype=torch.long), "expected a floating point tensor, found torch.int64"),
        (Invariant(), [1.0], r"Invariant\(\): expected a tensor, found list"),
        pytest.param(
            Irreps("2x1o"), torch.zeros(5), "2x1o.*expected size 6, found 5", marks=needs_e3nn
        ),
        pytest.param(Irreps("2x1q"), torch.zeros(6), "irreps '2x1q': expected", marks=needs_e3nn),
    ],
)  # fmt: skip
def test_what_an_action_cannot_take_is_one_line(action: Action, x: Any, message: str) -> None:
    with pytest.raises(AdapterError, match=message) as caught:
        action(Element.identity(), x)
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


def test_without_e3nn_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "e3nn", None)
    action = Irreps("1o")  # making one is fine
    with pytest.raises(AdapterError, match=r"e3nn is not installed; pip install e3nn"):
        action(Element.identity(), torch.zeros(1, 3))


# --- actions on a call

EGNO = GroupAction(
    E3,
    {"x": Positions(), "v": Vectors(), "loc_mean": Positions()},
    (Positions(), Vectors(), Invariant()),
)
EGNO_NAMES = ["x", "h", "edge_index", "edge_fea", "v", "loc_mean"]


def test_arguments_by_position_by_name_and_left_out() -> None:
    g = E3.sample(generator(8))
    x, h, v, edges = normal(4, 3), normal(4, 2), normal(4, 3, seed=1), torch.zeros(2, 0, dtype=torch.long)
    args, kwargs = (x, h, edges), {"edge_fea": None, "v": v, "loc_mean": None}
    new_args, new_kwargs = EGNO.act_on_inputs(g, EGNO_NAMES, args, kwargs)
    close(new_args[0], Positions()(g, x))
    close(new_kwargs["v"], Vectors()(g, v))
    assert new_args[1] is h
    assert new_args[2] is edges
    assert new_kwargs["loc_mean"] is None
    assert args[0] is x
    assert kwargs["v"] is v
    short_args, short_kwargs = EGNO.act_on_inputs(g, EGNO_NAMES, (x, h), {})  # v and loc_mean have defaults
    assert len(short_args) == 2
    assert short_kwargs == {}


def test_starred_parameters_take_no_names() -> None:
    g, x, y = SO3.sample(generator(8)), normal(1, 3), normal(1, 3, seed=1)
    action = GroupAction(SO3, {"pos": Vectors()}, Invariant())
    # forward(self, x, *rest, pos=None, **more): no positional argument is pos
    args, kwargs = action.act_on_inputs(g, ["x", "*rest", "pos", "**more"], (x, y, y), {})
    assert args == (x, y, y)
    assert kwargs == {}
    _, kwargs = action.act_on_inputs(g, ["*args", "**more"], (), {"pos": x})
    close(kwargs["pos"], Vectors()(g, x))


def test_a_name_the_forward_does_not_have() -> None:
    action = GroupAction(SO3, {"poss": Vectors()}, Invariant())
    with pytest.raises(AdapterError, match=r"'poss': expected one of batch, pos, z \(did you mean 'pos'\?\)"):
        action.act_on_inputs(Element.identity(), ["z", "pos", "batch"], (1, normal(2, 3)), {})


def test_an_error_names_the_input() -> None:
    with pytest.raises(AdapterError, match=r"input 'v': Vectors.*expected size 3, found 2"):
        EGNO.act_on_inputs(Element.identity(), EGNO_NAMES, (normal(4, 3),), {"v": normal(4, 2)})


@dataclass
class Plain:
    pos: Tensor
    z: int = 0


@dataclass(frozen=True)
class Frozen:
    pos: Tensor
    z: int = 0


class Bare:
    def __init__(self, pos: Tensor) -> None:
        self.pos, self.z = pos, 0


Named = namedtuple("Named", ["pos", "z"], defaults=[0])


def as_dict(pos: Tensor) -> dict[str, Any]:
    return {"pos": pos, "z": 0}


@pytest.mark.parametrize("make", [as_dict, Plain, Frozen, Bare, Named])
def test_a_path_into_an_argument(make: Any) -> None:
    g, x = SE3.sample(generator(9)), normal(4, 3)

    def part(owner: Any, name: str) -> Any:
        return owner[name] if isinstance(owner, dict) else getattr(owner, name)

    graph, batch = make(x), {"graph": make(x)}
    action = GroupAction(SE3, {"graph.pos": Positions(), "batch.graph.pos": Vectors()}, Invariant())
    (new_graph,), kwargs = action.act_on_inputs(g, ["graph", "batch"], (graph,), {"batch": batch})
    assert type(new_graph) is type(graph)
    close(part(new_graph, "pos"), Positions()(g, x))
    close(part(kwargs["batch"]["graph"], "pos"), Vectors()(g, x))
    assert part(new_graph, "z") == 0
    assert part(graph, "pos") is x
    assert part(batch["graph"], "pos") is x
    wrong = GroupAction(SE3, {"graph.position": Positions()}, Invariant())
    with pytest.raises(AdapterError, match=r"input 'graph.position': unknown part of .* 'position'"):
        wrong.act_on_inputs(g, ["graph"], (graph,), {})
    assert action.act_on_inputs(g, ["graph", "batch"], (None,), {}) == ((None,), {})


def test_a_container_that_cannot_be_changed() -> None:
    class Sealed:
        __slots__ = ()

        @property
        def pos(self) -> Tensor:
            return torch.zeros(1, 3)

    action = GroupAction(SE3, {"graph.pos": Positions()}, Invariant())
    with pytest.raises(AdapterError, match=r"input 'graph.pos': a copy of Sealed cannot take it"):
        action.act_on_inputs(Element.identity(), ["graph"], (Sealed(),), {})


@needs_pyg
@needs_e3nn
def test_a_pyg_graph() -> None:
    from torch_geometric.data import Batch, Data

    g = E3.sample(generator(10))
    single = Data(x=normal(4, 7), pos=normal(4, 3), edge_index=torch.tensor([[0, 1], [1, 2]]), node_attr=normal(4, 4))
    inputs = {"graph.x": Irreps("2x1o+0e"), "graph.pos": Positions(), "graph.node_attr": Irreps("0e+1o")}
    action = GroupAction(E3, inputs, Irreps("1o"))
    for graph in (single, Batch.from_data_list([single, single])):
        before = {key: value.clone() for key, value in graph.to_dict().items()}
        (turned,), _ = action.act_on_inputs(g, ["graph"], (graph,), {})
        assert type(turned) is type(graph)
        for name, how in (("x", Irreps("2x1o+0e")), ("pos", Positions()), ("node_attr", Irreps("0e+1o"))):
            close(turned[name], how(g, before[name]))
        assert turned.edge_index is graph.edge_index
        assert all(torch.equal(graph[key], value) for key, value in before.items())
    # PyG answers None for a standard attribute that is not there; that is still a path that does not exist
    with pytest.raises(AdapterError, match=r"'graph.pos'.* unknown part of Data 'pos': expected one of x"):
        GroupAction(E3, {"graph.pos": Positions()}, Invariant()).act_on_inputs(
            g, ["graph"], (Data(x=normal(4, 7)),), {}
        )


# --- actions on outputs


def test_outputs_tensor_tuple_and_dict() -> None:
    g, x, v = E3.sample(generator(11)), normal(4, 3), normal(4, 3, seed=1)
    h = normal(4, 2)
    close(GroupAction(E3, {}, Vectors()).act_on_outputs(g, v), Vectors()(g, v))
    output = (x, v, h)
    turned = EGNO.act_on_outputs(g, output)
    assert type(turned) is tuple
    close(turned[0], Positions()(g, x))
    close(turned[1], Vectors()(g, v))
    assert turned[2] is h
    assert output[0] is x
    assert list(EGNO.compared(output)) == ["output.0", "output.1", "output.2"]
    logits = GroupAction(SO3, {}, [Invariant(), None])
    assert logits.act_on_outputs(g, (h, x)) == (h, x)
    assert list(logits.compared((h, x))) == ["output.0"]
    by_key = GroupAction(E3, {}, {"force": Vectors(), "energy": None})
    given_out = {"force": v, "energy": h, "more": x}
    by_key_turned = by_key.act_on_outputs(g, given_out)
    close(by_key_turned["force"], Vectors()(g, v))
    assert by_key_turned["energy"] is h
    assert by_key_turned["more"] is x
    assert given_out["force"] is v
    assert list(by_key.compared(given_out)) == ["output.force"]
    pair = Named(x, None)
    both = GroupAction(E3, {}, [Positions(), Vectors()])
    close(both.act_on_outputs(g, pair).pos, Positions()(g, x))
    assert both.act_on_outputs(g, pair).z is None
    assert list(both.compared(pair)) == ["output.0"]


@pytest.mark.parametrize(
    ("outputs", "output", "message"),
    [
        (Vectors(), (torch.zeros(3),), "output: Vectors.*expected a tensor, found tuple"),
        ([Vectors()], torch.zeros(3), "output: the action is for a tuple of 1, found Tensor"),
        ([Vectors()], (torch.zeros(3), None), "for a tuple of 1, found tuple of 2"),
        ({"force": Vectors()}, {"forces": torch.zeros(3)}, "'force': expected one of forces"),
        ([None, Vectors()], (None, torch.zeros(2)), "output.1: Vectors.*expected size 3, found 2"),
    ],
)
def test_outputs_of_another_structure(outputs: Any, output: Any, message: str) -> None:
    with pytest.raises(AdapterError, match=message):
        GroupAction(SO3, {}, outputs).act_on_outputs(Element.identity(), output)


def test_a_group_action_pickles_and_owns_its_containers() -> None:
    inputs: dict[str, Action] = {"x": Vectors()}
    action = GroupAction(O3, inputs, [Vectors(), None])
    inputs["y"] = Vectors()
    assert list(action.inputs) == ["x"]
    assert pickle.loads(pickle.dumps(action)) == action
