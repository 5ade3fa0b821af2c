"""The action of E(3) on the inputs and outputs of a NequIP model, which are dicts of tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ace_plugins import adapter as ace


@dataclass(frozen=True)
class PerGraph(ace.Tensors):
    """The action on stress and virial [graphs, 3, 3]. Without a cell NequIP returns an empty tensor for the stress."""

    def act(self, element: Any, x: Tensor) -> Tensor:
        return super().act(element, x) if x.numel() else x


def group_action(model: Any) -> ace.GroupAction:
    """Return the action on the input and output dicts. Keys that end in "?" may be missing from them."""
    inputs = {
        "data.pos": ace.Positions(),
        "data.cell?": ace.Vectors(),  # its rows are lattice vectors
        "data.edge_cell_shift?": ace.Invariant(),  # whole numbers of lattice vectors
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
    # Energies include those of single atoms, thousands of eV. If there are forces, errors are measured on the forces.
    return ace.GroupAction(ace.E3, inputs, outputs, graphs=graphs, beside=("total_energy", "atomic_energy"))
