"""The action of E(3) on the inputs and outputs of a TorchMD-NET model, and on the features of a TensorNet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ace_plugins import adapter as ace

PERIODIC = (
    "TorchMD-NET accepts box vectors in one orientation only, so a periodic system cannot be rotated; "
    "train it with frames = 'off'; 'audit' and 'averaged' need systems without a box"
)


@dataclass(frozen=True)
class TensorFeatures(ace.Tensors):
    """The action on features [n, 3, 3, F] of a TensorNet, whose antisymmetric part transforms like a vector.

    The inversion changes the sign of this part. It does not change that of a tensor of rank 2.
    """

    axes: tuple[int, int] = (-3, -2)

    def act_on_last(self, element: Any, x: Tensor) -> Tensor:
        odd = (x - x.mT) / 2
        reflected = element.sign * element.matrix
        turned: Tensor = element.multiply(reflected, element.multiply(element.matrix, odd).mT).mT
        return super().act_on_last(element, x - odd) + turned


@dataclass(frozen=True)
class Box(ace.Action):
    """The action on the box of a periodic system: always raises an AdapterError, because boxes cannot be rotated."""

    def act(self, element: Any, x: Tensor) -> Tensor:
        raise ace.AdapterError(PERIODIC)


def group_action(model: Any) -> ace.GroupAction:
    """Return the action, or raise an AdapterError for a model with fixed box vectors."""
    network = model.representation_model
    if getattr(network.distance, "use_periodic", False):
        raise ace.AdapterError(f"box_vecs: {PERIODIC}")
    group = ace.SE3 if getattr(network, "equivariance_invariance_group", "O(3)") == "SO(3)" else ace.E3
    vector = type(model.output_model).__name__ == "EquivariantVectorOutput"
    outputs = ace.Vectors() if vector else ace.Invariant(), ace.Vectors() if model.derivative else None
    # Energies include the constants of single atoms. If there are forces, errors are measured on the forces.
    return ace.GroupAction(
        group, {"pos": ace.Positions(), "box": Box()}, outputs, graphs=ace.Graphs("batch"), beside=("0",)
    )
