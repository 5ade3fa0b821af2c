"""Batches of graphs: the graph that each row belongs to, and one group element per graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..errors import AdapterError
from .groups import Rigids
from .parts import get_argument, get_part


@dataclass(frozen=True)
class Graphs:
    """Mapping from the rows of a model's inputs to the graphs of a batch.

    Paths are written as in ``GroupAction.inputs``. Inputs that ``edges`` and ``several`` do not
    list, and all outputs, have one row per node or one row per graph.
    """

    batch: str
    """Path of the vector with the graph number of every node, as in PyTorch Geometric. If there is a
    floating point tensor at this path, the batch is dense: the first dimension of each tensor counts the graphs."""
    edges: Mapping[str, str] = field(default_factory=dict)
    """Mapping from each input with one row per edge to the path of its edge index [2, edges], or of one row of that."""
    several: Mapping[str, int] = field(default_factory=dict)
    """Mapping from each input with several rows per graph to their number: 3 for lattice vectors [3 * graphs, 3]."""
    linked: str = ""
    """Path of an edge index, for batches without a batch vector: nodes that edges connect are one graph. The nodes of a
    graph must follow each other, and ``batch`` is the path of a floating point tensor with one row per node."""
    repeated: bool = False
    """True if layers have several rows per node: all nodes one after the other, then all of them again."""

    def find_rows(self, names: Sequence[str], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Rows | None:
        """Return the graph number of every row in this call; None if the call has no batch vector (a single graph).

        Args:
            names: Names of the model's arguments.
            args: Positional arguments of the call.
            kwargs: Keyword arguments of the call.

        Returns:
            The graph numbers of the rows, or None.
        """
        get = partial(value_at, names=names, args=args, kwargs=kwargs)
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
    """Return the graph number of every node: a graph ends where no edge leads from it or an earlier node further."""
    own = torch.arange(nodes, device=one.device)
    furthest = own.scatter_reduce(0, one, two, "amax").scatter_reduce(0, two, one, "amax")
    ends = furthest.cummax(0).values == own
    return ends.cumsum(0) - ends.long()


def value_at(path: str, names: Sequence[str], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return the input at a path; None if it is None or if a dict or PyG graph does not have it."""
    name, *steps = path.split(".")
    value = get_argument(name, names, args, kwargs)
    for step in steps:
        keys = getattr(value, "keys", None)
        if value is None or (callable(keys) and step not in keys()):
            return None  # a single graph has no batch vector
        value = get_part(value, step, f"input {path!r}")
    return value


@dataclass(frozen=True)
class Rows:
    """The graph number of every row of a batch."""

    nodes: Tensor
    """Graph number of every node."""
    others: Mapping[str, Tensor]
    """Mapping from the path of an input whose rows are not nodes to the graph number of each of its rows."""
    dense: bool = False
    """True if every node is a graph: the first dimension of all tensors counts the graphs."""
    repeated: bool = False
    """See `Graphs.repeated`."""

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

    def select(self, x: Any, path: str = "") -> Any:
        """Return the elements for the rows of x, which is the input at ``path``, or an output if ``path`` is ""."""
        if not isinstance(x, Tensor):
            return self.each  # the action will raise a clear error for x
        if path in self.rows.others:
            return self.each.with_index(self.rows.others[path])
        index = self.rows.find(len(x))
        if index is None:
            raise AdapterError(
                f"expected one row for each of {len(self.rows.nodes)} nodes or one per graph, found {len(x)} rows; "
                "list inputs with one row per edge in Graphs(edges=...), those with several per graph in several=..."
            )
        return self.each.with_index(index)

    def inverse(self) -> PerGraph:
        return PerGraph(self.each.inverse(), self.rows)
