"""How E(3) acts on what a model of SchNetPack is given and gives: dicts of tensors, some of which come and go."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ace_plugins import adapter as ace


@dataclass(frozen=True)
class Stress(ace.Tensors):
    """Stress [graphs, 3, 3]. SchNetPack divides by the volume of the cell with its sign, which reflections change."""

    def act_on_last(self, element: ace.Rigid, x: Tensor) -> Tensor:
        turned: Tensor = element.multiply(element.sign * element.matrix, element.multiply(element.matrix, x).mT)
        return turned.mT


INPUTS: dict[str, ace.Action] = {
    "inputs._positions": ace.Positions(),
    "inputs._cell?": ace.Vectors(),  # its rows are lattice vectors
    "inputs._offsets?": ace.Vectors(),  # of the cell that the neighbour is in, for every pair of atoms
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
"""What the module Response derives from an energy, as far as it is known here how that turns."""


def action(model: Any) -> ace.GroupAction:
    outputs: dict[str, ace.Action] = {}
    for module in model.modules():
        outputs.update(_outputs(module))
    given = list(model.model_outputs or outputs)
    unknown = sorted(name for name in given if name not in outputs)
    if unknown:
        raise ace.AdapterError(
            f"how the group acts on the output{'s' if len(unknown) > 1 else ''} {', '.join(unknown)} of this "
            f"{type(model).__name__} is not known to adapter 'schnetpack'; known are those of Atomwise, Forces, "
            f"DipoleMoment, Polarizability, energies, and of Response {', '.join(RESPONSES)}"
        )
    known = {name: outputs[name] for name in given}
    still = [name for name, how in known.items() if isinstance(how, ace.Invariant)]
    # Energies may hold those of single atoms, thousands of eV: where there are forces, errors are measured on these.
    return ace.GroupAction(_group(model), INPUTS, known, graphs=GRAPHS, beside=still)


def _outputs(module: Any) -> Mapping[str, ace.Action]:
    """What an output module gives, and how that turns."""
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
    """Without translations where an output is a moment about the origin, which the data puts at the centre of mass.

    Without reflections for magnetic fields, which FieldSchNet multiplies with vectors that are none of their kind.
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
