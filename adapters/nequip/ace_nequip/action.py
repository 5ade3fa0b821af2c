"""How E(3) acts on what a NequIP model is given and gives: dicts of tensors, some of which come and go."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ace_plugins import adapter as ace


@dataclass(frozen=True)
class PerGraph(ace.Tensors):
    """Stress and virial [graphs, 3, 3]. Without a cell NequIP has no stress, and gives an empty tensor for it."""

    def act(self, element: Any, x: Tensor) -> Tensor:
        return super().act(element, x) if x.numel() else x


def action(model: Any) -> ace.GroupAction:
    inputs = {
        "data.pos": ace.Positions(),
        "data.cell?": ace.Vectors(),  # its rows are lattice vectors
        "data.edge_cell_shift?": ace.Invariant(),  # counts lattice vectors
        "data.edge_vectors?": ace.Vectors(),
    }
    outputs = {
        "total_energy": ace.Invariant(),
        "atomic_energy?": ace.Invariant(),
        "forces?": ace.Vectors(),
        "stress?": PerGraph(),
        "virial?": PerGraph(),
    }
    graphs = ace.Graphs("data.batch", edges={"data.edge_vectors": "data.edge_index"})
    # Energies hold those of single atoms, thousands of eV: where there are forces, errors are measured on these.
    return ace.GroupAction(ace.E3, inputs, outputs, graphs=graphs, beside=("total_energy", "atomic_energy"))
