"""How a group acts on whole calls: arguments by name and by path, outputs of every structure."""

from __future__ import annotations

import pickle
from collections import namedtuple
from typing import Any

import pytest
import torch
from samples import BarePoints, FrozenPoints, Points, close, generator, normal
from torch import Tensor

from ace_plugins.adapter import E3, O3, SE3, SO3, GroupAction, Invariant, Irreps, Positions, Vectors
from ace_plugins.errors import AdapterError

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
        action.act_on_inputs(SO3.identity(), ["z", "pos", "batch"], (1, normal(2, 3)), {})


def test_an_error_names_the_input() -> None:
    with pytest.raises(AdapterError, match=r"input 'v': Vectors.*expected size 3 in axis -1, found shape"):
        EGNO.act_on_inputs(SO3.identity(), EGNO_NAMES, (normal(4, 3),), {"v": normal(4, 2)})


Named = namedtuple("Named", ["pos", "z"], defaults=[0])


def as_dict(pos: Tensor) -> dict[str, Any]:
    return {"pos": pos, "z": 0}


@pytest.mark.parametrize("make", [as_dict, Points, FrozenPoints, BarePoints, Named])
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
    with pytest.raises(AdapterError, match=r"input 'graph.pos': a copy of Sealed cannot be changed"):
        action.act_on_inputs(SO3.identity(), ["graph"], (Sealed(),), {})


def test_a_pyg_graph() -> None:
    data = pytest.importorskip("torch_geometric.data")
    pytest.importorskip("e3nn")
    Batch, Data = data.Batch, data.Data
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
    assert list(EGNO.tensors_to_compare(output)) == ["output.0", "output.1", "output.2"]
    logits = GroupAction(SO3, {}, [Invariant(), None])
    assert logits.act_on_outputs(g, (h, x)) == (h, x)
    assert list(logits.tensors_to_compare((h, x))) == ["output.0"]
    by_key = GroupAction(E3, {}, {"force": Vectors(), "energy": None})
    given_out = {"force": v, "energy": h, "more": x}
    by_key_turned = by_key.act_on_outputs(g, given_out)
    close(by_key_turned["force"], Vectors()(g, v))
    assert by_key_turned["energy"] is h
    assert by_key_turned["more"] is x
    assert given_out["force"] is v
    assert list(by_key.tensors_to_compare(given_out)) == ["output.force"]
    energies = GroupAction(E3, {}, {"force": Vectors(), "energy": Invariant()}, beside=["energy"])
    assert list(energies.tensors_to_compare(given_out)) == ["output.force"]
    close(energies.mean([given_out, {**given_out, "energy": h + 2}])["energy"], h + 1)
    pair = Named(x, None)
    both = GroupAction(E3, {}, [Positions(), Vectors()])
    close(both.act_on_outputs(g, pair).pos, Positions()(g, x))
    assert both.act_on_outputs(g, pair).z is None
    assert list(both.tensors_to_compare(pair)) == ["output.0"]
    mean = both.mean([pair, Named(x + 2, None)])
    close(mean.pos, x + 1)
    assert mean.z is None, "what the model leaves out has no mean"


@pytest.mark.parametrize(
    ("outputs", "output", "message"),
    [
        (Vectors(), (torch.zeros(3),), "output: Vectors.*expected a tensor, found tuple"),
        ([Vectors()], torch.zeros(3), "expected a tuple of 1,.* found Tensor"),
        ([Vectors()], (torch.zeros(3), None), "expected a tuple of 1,.* found tuple of 2"),
        ({"force": Vectors()}, {"forces": torch.zeros(3)}, "'force': expected one of forces"),
        ([None, Vectors()], (None, torch.zeros(2)), "output.1: Vectors.*expected size 3 in axis -1, found shape"),
    ],
)
def test_outputs_of_another_structure(outputs: Any, output: Any, message: str) -> None:
    with pytest.raises(AdapterError, match=message):
        GroupAction(SO3, {}, outputs).act_on_outputs(SO3.identity(), output)


def test_a_group_action_pickles() -> None:
    action = GroupAction(O3, {"x": Vectors()}, [Vectors(), None])
    assert pickle.loads(pickle.dumps(action)) == action


def test_parts_that_some_calls_go_without() -> None:
    g = E3.sample(generator(8))
    pos, cell = normal(4, 3), normal(3, 3, seed=1)
    outputs = {"energy": Invariant(), "forces?": Vectors(), "about.stress?": Vectors()}
    action = GroupAction(E3, {"data.pos": Positions(), "data.cell?": Vectors()}, outputs)
    (turned,), _ = action.act_on_inputs(g, ["data"], ({"pos": pos, "cell": cell},), {})
    close(turned["cell"], Vectors()(g, cell))
    (turned,), _ = action.act_on_inputs(g, ["data"], ({"pos": pos},), {})
    assert turned.keys() == {"pos"}
    _, kwargs = action.act_on_inputs(g, ["data"], (), {"data": {"pos": pos, "cell": None}})
    assert kwargs["data"]["cell"] is None
    energy = normal(2, 1, seed=2)
    assert action.act_on_outputs(g, {"energy": energy}) == {"energy": energy}
    both = {"energy": energy, "forces": pos, "about": {}}
    assert action.tensors_to_compare(both).keys() == {"output.energy", "output.forces"}
    close(action.act_on_outputs(g, both)["forces"], Vectors()(g, pos))
    close(action.mean([both, {**both, "forces": -pos}])["forces"], torch.zeros_like(pos))
    with pytest.raises(AdapterError, match=r"input 'data.pos'"):
        action.act_on_inputs(g, ["data"], ({"cell": cell},), {})


def test_outputs_beside_others_are_turned_and_averaged_but_not_compared() -> None:
    g = E3.sample(generator(8))
    action = GroupAction(E3, {}, {"energy": Invariant(), "forces?": Vectors()}, beside=("energy",))
    both = {"energy": normal(2, 1), "forces": normal(4, 3, seed=1)}
    assert action.tensors_to_compare(both).keys() == {"output.forces"}
    assert action.tensors_to_compare({"energy": both["energy"]}).keys() == {"output.energy"}
    close(action.act_on_outputs(g, both)["forces"], Vectors()(g, both["forces"]))
    close(action.mean([both, {**both, "energy": 3 * both["energy"]}])["energy"], 2 * both["energy"])
