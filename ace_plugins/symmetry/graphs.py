"""Batches of graphs: the graph that each row belongs to, and one group element per graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..errors import AdapterError
from .groups import Rigids
from .parts import bind_arguments, find_part, get_part


@dataclass(frozen=True)
class Graphs:
    """Mapping from the rows of a model's inputs to the graphs of a batch.

    Paths are written as in ``GroupAction.inputs``. Outputs, and inputs that ``edges`` and ``several`` do not list, have
    one row per node or one row per graph.
    """

    batch: str
    """Path of the vector with the graph number of every node, as in PyTorch Geometric. If it leads to a floating point
    tensor, the batch is dense: the first dimension of each tensor counts the graphs."""
    edges: Mapping[str, str] = field(default_factory=dict)
    """Mapping from each input with one row per edge to the path of its edge index [2, edges], or of one row of that."""
    several: Mapping[str, int] = field(default_factory=dict)
    """Mapping from each input with several rows per graph to their number: 3 for lattice vectors [3 * graphs, 3]."""
    linked: str = ""
    """Path of an edge index, for batches without a batch vector: nodes that edges connect are one graph. The nodes of a
    graph must be consecutive, and ``batch`` is the path of a floating point tensor with one row per node."""
    repeated: bool = False
    """True if layers have several rows per node: rows for all nodes, then rows for all nodes again, and so on."""

    def find_rows(self, names: Sequence[str], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Rows | None:
        """Return the graph number of every row in a call with ``args`` and ``kwargs``; None without a batch vector.

        ``names`` are the parameters of the forward pass, see `GroupAction.act_on_inputs`.
        """
        get = partial(_value_at, bind_arguments(names, args, kwargs))
        batch = get(self.batch)
        if not isinstance(batch, Tensor) or not batch.dim():
            return None
        if batch.is_floating_point():
            index = get(self.linked) if self.linked else None
            if index is None:
                return Rows(torch.arange(len(batch), device=batch.device), {}, dense=True)
            return Rows(_find_linked(len(batch), index[0], index[1]), {}, repeated=self.repeated)
        rows = {}
        for path, place in self.edges.items():
            if isinstance(index := get(place), Tensor):
                rows[path] = batch[index if index.dim() == 1 else index[0]]
        for path, count in self.several.items():
            if isinstance(value := get(path), Tensor):
                rows[path] = torch.arange(len(value), device=value.device) // count
        return Rows(batch, rows, repeated=self.repeated)


def _find_linked(nodes: int, one: Tensor, two: Tensor) -> Tensor:
    """Return the graph number of every node: a graph ends at a node if no edge leads beyond this node."""
    own = torch.arange(nodes, device=one.device)
    furthest = own.scatter_reduce(0, one, two, "amax").scatter_reduce(0, two, one, "amax")
    ends = furthest.cummax(0).values == own
    return ends.cumsum(0) - ends.long()


def _value_at(given: Mapping[str, Any], path: str) -> Any:
    """Return the input at a path; None if it is None or if a dict or PyG graph does not have it."""
    value: Any = given
    for step in path.split("."):
        # A dict or PyG graph of a single graph has no batch vector. In other objects, a missing attribute is an error.
        optional = value is None or callable(getattr(value, "keys", None))
        value = find_part(value, step) if optional else get_part(value, step, f"input {path!r}")
    return value


@dataclass(frozen=True)
class Rows:
    """The graph number of every row of a batch."""

    nodes: Tensor  # graph number of every node
    others: Mapping[str, Tensor]  # by path, for inputs whose rows are not nodes: graph number of every row
    dense: bool = False  # True if every node is a graph: the first dimension of all tensors counts the graphs
    repeated: bool = False  # see `Graphs.repeated`

    def find(self, count: int) -> Tensor | None:
        """Return the graph number of each row of a tensor with ``count`` rows; None if it is unknown."""
        nodes = len(self.nodes)
        if count == nodes:
            return self.nodes
        for other in self.others.values():
            if len(other) == count:
                return other
        if count < nodes and not self.dense:
            return torch.arange(count, device=self.nodes.device)  # one row per graph
        if count % nodes or not (self.dense or self.repeated):
            return None
        return self.nodes.repeat_interleave(count // nodes) if self.dense else self.nodes.repeat(count // nodes)


@dataclass(frozen=True, eq=False)
class PerGraph:
    """One group element per graph of a batch."""

    each: Rigids
    rows: Rows

    def select(self, x: Any, path: str) -> Any:
        """Return the elements for the rows of x, the input or output at ``path``."""
        if not isinstance(x, Tensor):
            return self.each  # the action raises an error for x
        if path in self.rows.others:
            return replace(self.each, index=self.rows.others[path])
        index = self.rows.find(len(x))
        if index is None:
            raise AdapterError(
                f"expected one row for each of {len(self.rows.nodes)} nodes or one per graph, found {len(x)} rows; "
                "list inputs with one row per edge in Graphs(edges=...), with several rows per graph in several=..."
            )
        return replace(self.each, index=index)

    def inverse(self) -> PerGraph:
        return PerGraph(self.each.inverse(), self.rows)
