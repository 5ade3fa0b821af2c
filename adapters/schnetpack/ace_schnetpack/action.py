"""The action of E(3) on the inputs and outputs of a SchNetPack model, which are dicts of tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ace_plugins import adapter as ace


@dataclass(frozen=True)
class Stress(ace.Tensors):
    """The action on stress [graphs, 3, 3]. Reflections flip its sign: SchNetPack divides by the signed cell volume."""

    def act_on_last(self, element: ace.Rigid, x: Tensor) -> Tensor:
        turned: Tensor = element.multiply(element.sign * element.matrix, element.multiply(element.matrix, x).mT)
        return turned.mT


INPUTS: dict[str, ace.Action] = {
    "inputs._positions": ace.Positions(),
    "inputs._cell?": ace.Vectors(),  # its rows are lattice vectors
    "inputs._offsets?": ace.Vectors(),  # from an atom's cell to that of its neighbour, for each pair of atoms
    "inputs.electric_field?": ace.Vectors(),
    "inputs.magnetic_field?": ace.PseudoVectors(),
    "inputs.nuclear_magnetic_moments?": ace.PseudoVectors(),
}
GRAPHS = ace.Graphs("inputs._idx_m", edges={"inputs._offsets": "inputs._idx_i"})
RESPONSES: dict[str, ace.Action] = {
    "forces": ace.Vectors(),
    "stress": Stress(),
    "dipole_moment": ace.Vectors(),
    "polarizability": ace.Tensors(),
}
"""Mapping from outputs of the module Response to the action on them."""


def group_action(model: Any) -> ace.GroupAction:
    """Return the action; raise an AdapterError if an output has no known action. Keys with "?" may be missing."""
    outputs: dict[str, ace.Action] = {}
    for module in model.modules():
        outputs.update(_outputs(module))
    given = list(model.model_outputs or outputs)
    unknown = sorted(name for name in given if name not in outputs)
    if unknown:
        raise ace.AdapterError(
            f"{type(model).__name__}: adapter 'schnetpack' has no group action for {', '.join(unknown)}; "
            "it supports outputs of Atomwise, Forces, DipoleMoment, Polarizability and energy modules, and these of "
            f"Response: {', '.join(RESPONSES)}"
        )
    known = {name: outputs[name] for name in given}
    invariant = [name for name, how in known.items() if isinstance(how, ace.Invariant)]
    # Energies may include those of single atoms, thousands of eV. If there are forces, errors are measured on these.
    return ace.GroupAction(_group(model), INPUTS, known, graphs=GRAPHS, beside=invariant)


def _outputs(module: Any) -> Mapping[str, ace.Action]:
    """Return a mapping from the outputs of an output module to the actions on them."""
    from schnetpack import atomistic

    if isinstance(module, atomistic.Forces):
        stress = {module.stress_key: Stress()} if module.calc_stress else {}
        return {module.force_key: ace.Vectors(), **stress}
    if isinstance(module, atomistic.DipoleMoment):
        dipole = ace.Invariant() if module.predict_magnitude else ace.Vectors()
        return {module.charges_key: ace.Invariant(), module.dipole_key: dipole}
    if isinstance(module, atomistic.Polarizability):
        return {module.polarizability_key: ace.Tensors()}
    if isinstance(module, atomistic.Response):
        return {name: RESPONSES[name] for name in module.model_outputs if name in RESPONSES}
    energies = atomistic.Atomwise, atomistic.Aggregation, atomistic.EnergyCoulomb, atomistic.EnergyEwald
    return dict.fromkeys(module.model_outputs, ace.Invariant()) if isinstance(module, energies) else {}


def _group(model: Any) -> ace.Group:
    """Return the symmetry group of a model.

    The group has no translations if an output is a moment about the origin. It has no reflections if there is a
    magnetic field: that is a pseudovector, and FieldSchNet multiplies it with vectors.
    """
    from schnetpack import atomistic, representation

    parts = list(model.modules())
    moments = any(isinstance(part, (atomistic.DipoleMoment, atomistic.Polarizability)) for part in parts)
    magnetic = any(
        isinstance(part, representation.FieldSchNet) and "magnetic_field" in part.external_fields for part in parts
    )
    if magnetic:
        return ace.SO3 if moments else ace.SE3
    return ace.O3 if moments else ace.E3
