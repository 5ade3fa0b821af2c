"""Batches of graphs: which row of a tensor belongs to which graph, and an element of the group for each graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..errors import AdapterError
from .groups import Rigids
from .parts import argument, part_of


@dataclass(frozen=True)
class Graphs:
    """Where a model's inputs say which rows belong to which graph. Paths are those of ``GroupAction.inputs``.

    ``batch`` is a vector of whole numbers, the graph of every node, as PyTorch Geometric has it; or a tensor of
    another kind whose first dimension counts the graphs. ``edges`` are the inputs with a row for every edge, each
    with the path of its edge index [2, edges], or of the nodes at one of its ends [edges]. ``several`` are the inputs
    with more than one row for every graph, each with how many: 3 for the lattice vectors of all graphs [3 graphs, 3].
    All other inputs and outputs have a row for every node or graph.
    """

    batch: str
    edges: Mapping[str, str] = field(default_factory=dict)
    several: Mapping[str, int] = field(default_factory=dict)

    def look(self, names: Sequence[str], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Rows | None:
        """The rows of this batch; None if it does not tell, as a single graph does not."""
        batch = _at(self.batch, names, args, kwargs)
        if not isinstance(batch, Tensor) or not batch.dim():
            return None
        if batch.is_floating_point():
            return Rows(torch.arange(len(batch), device=batch.device), {})
        edges = {path: _at(index, names, args, kwargs) for path, index in self.edges.items()}
        rows = {
            path: batch[index if index.dim() == 1 else index[0]]
            for path, index in edges.items()
            if isinstance(index, Tensor)
        }
        for path, count in self.several.items():
            value = _at(path, names, args, kwargs)
            if isinstance(value, Tensor):
                rows[path] = torch.arange(len(value), device=value.device) // count
        return Rows(batch, rows)


def _at(path: str, names: Sequence[str], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    name, *steps = path.split(".")
    value = argument(name, names, args, kwargs)
    for step in steps:
        if value is None:
            break
        keys = getattr(value, "keys", None)
        if callable(keys) and step not in keys():
            return None  # a single graph has no batch vector
        value = part_of(value, step, f"input {path!r}")
    return value


@dataclass(frozen=True)
class Rows:
    """The graph of every node, and of every row of the inputs whose rows are no nodes."""

    nodes: Tensor
    others: Mapping[str, Tensor]

    @property
    def most(self) -> int:
        """There are at most so many graphs. To know how many, one would have to wait for the device."""
        return len(self.nodes)


@dataclass(frozen=True, eq=False)
class PerGraph:
    """An element for each graph of a batch."""

    each: Rigids
    rows: Rows

    def at(self, x: Any, path: str = "") -> Any:
        """The elements for the rows of a tensor: an input with its path, or an output."""
        if not isinstance(x, Tensor):
            return self.each  # the action will say that it wants one
        if path in self.rows.others:
            return self.each.of(self.rows.others[path])
        if len(x) == len(self.rows.nodes):
            return self.each.of(self.rows.nodes)
        if len(x) > self.rows.most:
            raise AdapterError(
                f"expected a row for each of {self.rows.most} nodes or for each graph, found {len(x)}; "
                "name inputs with a row for each edge in Graphs(edges=...), with several for each graph in several"
            )
        return self.each.of(torch.arange(len(x), device=x.device))

    def compose(self, other: PerGraph) -> PerGraph:
        return PerGraph(self.each.compose(other.each), self.rows)

    def inverse(self) -> PerGraph:
        return PerGraph(self.each.inverse(), self.rows)
