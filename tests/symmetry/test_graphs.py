"""An element for each graph: what it does to a batch is what each element alone does to its graph."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ace_plugins.adapter import (
    E2,
    E3,
    SO3,
    Action,
    AdapterError,
    Graphs,
    Grid,
    GroupAction,
    Invariant,
    Irreps,
    Positions,
    PseudoVectors,
    Rigid,
    Tensors,
    Vectors,
)
from ace_plugins.symmetry.graphs import PerGraph

ACTIONS = {
    "vectors": (Vectors(), (3,)),
    "vector channels": (Vectors(axis=1), (3, 5)),
    "positions": (Positions(), (3,)),
    "positions over time": (Positions(), (4, 3)),
    "pseudovectors": (PseudoVectors(), (2, 3)),
    "tensors": (Tensors(), (3, 3)),
    "irreps": (Irreps("2x0e+1x0o+2x1o+1x1e+1x2e+1x3o"), (24,)),
    "invariant": (Invariant(), (7,)),
}
NODES = torch.tensor([0, 0, 2, 1, 2, 2])


def drawn(seed: int, count: int = 6, scale: float = 1.0) -> Any:
    return E3.sample_many(count, torch.Generator().manual_seed(seed), scale=scale)


@pytest.mark.parametrize("name", ACTIONS)
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 1000))
def test_each_row_gets_the_element_of_its_graph(name: str, seed: int) -> None:
    action, shape = ACTIONS[name]
    each = drawn(seed)
    x = torch.randn(len(NODES), *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    together = action(replace(each, index=NODES), x)
    for row, graph in enumerate(NODES.tolist()):
        alone = action(Rigid(each.matrix[graph], each.translation[graph]), x[row : row + 1])
        assert torch.allclose(together[row], alone[0], rtol=0, atol=1e-12)
    back = action(replace(each, index=NODES).inverse(), together)
    assert torch.allclose(back, x, atol=1e-11)


def test_elements_are_uniform_and_independent() -> None:
    many = drawn(0, 20_000)
    assert torch.allclose(many.matrix.mean(0), torch.zeros(3, 3).double(), atol=0.02)
    assert torch.allclose((many.matrix[:, :, 0] ** 2).mean(0), torch.full((3,), 1 / 3).double(), atol=0.02)
    assert float(torch.linalg.det(many.matrix).mean()) == pytest.approx(0, abs=0.02)
    assert float(many.translation.std()) == pytest.approx(1, abs=0.02)
    assert torch.allclose(
        E2.sample_many(20_000, torch.Generator()).matrix.mean(0), torch.zeros(2, 2).double(), atol=0.02
    )


def batch(**more: Any) -> Any:
    """Three rings, so that there are as many edges as nodes."""
    ahead = torch.tensor([1, 0, 4, 3, 5, 2])
    edges = torch.stack([torch.arange(6), ahead])
    pos = torch.randn(6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    order = torch.tensor([5, 4, 3, 2, 1, 0])  # edges in another order than nodes
    parts: dict[str, Any] = {"batch": NODES, "edge_index": edges[:, order], "pos": pos}
    parts["edge_vec"] = (pos[edges[1]] - pos[edges[0]])[order]
    return SimpleNamespace(**{**parts, **more})


ACTION = GroupAction(
    E3,
    {"graph.pos": Positions(), "graph.edge_vec": Vectors()},
    outputs=(Vectors(), Vectors()),
    graphs=Graphs("graph.batch", edges={"graph.edge_vec": "graph.edge_index"}),
)


def test_a_batch_in_a_frame_per_graph() -> None:
    """Lengths of edges stay, edges stay differences of positions, and outputs of nodes and of graphs turn back."""
    graph = batch()
    frame = ACTION.sample_frame(torch.Generator().manual_seed(0), ["graph"], (graph,), {})
    assert isinstance(frame, PerGraph)
    (turned,), _ = ACTION.act_on_inputs(frame, ["graph"], (graph,), {})
    one, two = turned.edge_index
    assert torch.allclose(turned.edge_vec, turned.pos[two] - turned.pos[one], atol=1e-12)
    assert not torch.allclose(turned.edge_vec, graph.edge_vec)
    matrices = {tuple(frame.each.matrix[g].flatten().tolist()) for g in NODES.tolist()}
    assert len(matrices) == 3
    summed = torch.zeros(3, 3, dtype=torch.float64).index_add(0, NODES, turned.pos)
    nodes, graphs = ACTION.act_on_outputs(frame.inverse(), (turned.pos, summed))
    assert torch.allclose(nodes, graph.pos, atol=1e-12)
    assert torch.allclose(graphs, torch.zeros(3, 3, dtype=torch.float64).index_add(0, NODES, graph.pos), atol=1e-12)


@pytest.mark.parametrize("end", [0, 1])
def test_edges_may_be_given_by_one_of_their_ends(end: int) -> None:
    """As SchNetPack has them, whose ends are two vectors."""
    graph = batch()
    graph.ends = graph.edge_index[end]
    action = replace(ACTION, graphs=Graphs("graph.batch", edges={"graph.edge_vec": "graph.ends"}))
    frame = action.sample_frame(torch.Generator().manual_seed(0), ["graph"], (graph,), {})
    (turned,), _ = action.act_on_inputs(frame, ["graph"], (graph,), {})
    one, two = turned.edge_index
    assert torch.allclose(turned.edge_vec, turned.pos[two] - turned.pos[one], atol=1e-12)
    assert not torch.allclose(turned.edge_vec, graph.edge_vec)


def test_several_rows_for_each_graph() -> None:
    """As many rows of lattice vectors as there are nodes, in another order: each goes with its graph all the same."""
    graph = batch(batch=torch.tensor([0, 0, 0, 0, 0, 1]), cell=torch.eye(3, dtype=torch.float64).repeat(2, 1))
    inputs = {"graph.pos": Positions(), "graph.cell": Vectors()}
    action = GroupAction(E3, inputs, Invariant(), Graphs("graph.batch", several={"graph.cell": 3}))
    frame = action.sample_frame(torch.Generator().manual_seed(0), ["graph"], (graph,), {})
    assert isinstance(frame, PerGraph)
    (turned,), _ = action.act_on_inputs(frame, ["graph"], (graph,), {})
    for number in range(2):
        rows = slice(3 * number, 3 * number + 3)
        assert torch.allclose(turned.cell[rows], frame.each.matrix[number].T, atol=1e-12)


@pytest.mark.parametrize(
    ("graph", "why"),
    [(batch(batch=None), "no batch vector"), ({"pos": torch.zeros(2, 3), "edge_vec": None}, "a dict without one")],
)
def test_one_element_without_a_batch_vector(graph: Any, why: str) -> None:
    assert isinstance(ACTION.sample_frame(torch.Generator(), ["graph"], (graph,), {}), Rigid), why


@pytest.mark.parametrize(
    ("graphs", "step"), [(Graphs("graph.bacth"), "bacth"), (Graphs("graph.batch", {"graph.edge_vec": "graph.e"}), "e")]
)
def test_a_wrong_attribute_is_refused(graphs: Graphs, step: str) -> None:
    action = GroupAction(E3, {"graph.pos": Positions()}, Invariant(), graphs)
    with pytest.raises(AdapterError, match=f"input 'graph.{step}': unknown part of SimpleNamespace '{step}'"):
        action.sample_frame(torch.Generator(), ["graph"], (batch(),), {})


def test_a_dense_batch_has_a_graph_in_every_row() -> None:
    action = GroupAction(SO3, {"points": Vectors(axis=1)}, outputs=Invariant(), graphs=Graphs("points"))
    points = torch.randn(4, 3, 10)
    frame = action.sample_frame(torch.Generator().manual_seed(0), ["points"], (), {"points": points})
    _, turned = action.act_on_inputs(frame, ["points"], (), {"points": points})
    assert turned["points"].shape == points.shape
    gram = [torch.einsum("bin,bim->bnm", p, p) for p in (points, turned["points"])]
    assert torch.allclose(*gram, atol=1e-4)
    cross = [torch.einsum("in,im->nm", p[0], p[1]) for p in (points, turned["points"])]
    assert not torch.allclose(*cross, atol=0.1), "each has been turned on its own"


def test_rows_that_are_neither_nodes_nor_graphs_are_reported() -> None:
    action = GroupAction(E3, {"graph.edge_vec": Vectors()}, outputs=Invariant(), graphs=Graphs("graph.batch"))
    graph = batch(edge_vec=torch.zeros(9, 3))
    frame = action.sample_frame(torch.Generator(), ["graph"], (graph,), {})
    with pytest.raises(AdapterError, match=r"'graph.edge_vec'.*each of 6 nodes.*found 9 rows.*Graphs\(edges="):
        action.act_on_inputs(frame, ["graph"], (graph,), {})


def test_images_have_one_element_for_the_batch() -> None:
    grid: Action = Grid()
    with pytest.raises(AdapterError, match="expected one group element for the whole batch"):
        grid(E2.sample_many(2, torch.Generator(), scale=0.0), torch.zeros(2, 4, 4))
