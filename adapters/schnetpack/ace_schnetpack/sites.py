"""Where ACE goes into a model of SchNetPack: where features with a direction are mixed.

A layer of PaiNN first gathers messages and then mixes the scalars q [atoms, 1, F] and the vectors mu [atoms, 3, F] of
every atom. The branches of a layer read mu as it enters the mixing, and are added to what comes out of it. Branches
never see positions: translations change nothing, and what is differentiated for the forces is one energy, branches
included. Of scalars every function is invariant, so models that have nothing else have no place for a branch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ace_plugins import adapter as ace

KNOWN = "PaiNN, SO3net, or FieldSchNet with an external field"


def sites(model: Any) -> list[ace.Node]:
    from schnetpack.representation import FieldSchNet, PaiNN, SO3net

    kinds = {PaiNN: _painn, SO3net: _so3net, FieldSchNet: _field_schnet}
    found = [
        site
        for path, module in model.named_modules()
        for kind, look in kinds.items()
        if isinstance(module, kind)
        for site in look(f"{path}." if path else "", module)
    ]
    if not found:
        kind = type(getattr(model, "representation", model)).__name__
        raise ace.AdapterError(
            f"{kind} has no features with a direction that a branch could read, and branches do not read positions, "
            f"so that forces stay conservative and the net force zero; expected a model with {KNOWN}"
        )
    return found


def _painn(at: str, painn: Any) -> Iterator[ace.Node]:
    """In the last layer only what its scalars become: the energy does not read the vectors after it."""
    channels = painn.n_atom_basis
    turns = ace.Vectors(axis=-2)
    for name, path, last in _layers(at, "mixing", painn.mixing):
        reads: dict[str, Any] = {"shape_in": (3, channels), "reads": ace.Tap("mu")}
        yield ace.Site(f"{name}.q", path, shape_out=(1, channels), output=0, acts=(turns, ace.Invariant()), **reads)
        if not last:
            yield ace.Site(f"{name}.mu", path, shape_out=(3, channels), output=1, acts=(turns, turns), **reads)


def _so3net(at: str, net: Any) -> Iterator[ace.Node]:
    """The last linear map of every layer, on features [atoms, (lmax + 1)^2, F]."""
    shape = (int(net.lmax) + 1) ** 2, net.n_atom_basis
    for name, path, _ in _layers(at, "mixings3", net.mixings3):
        yield ace.Site(f"{name}.x", path, shape, shape)


def _field_schnet(at: str, net: Any) -> Iterator[ace.Node]:
    """What the dipoles of atoms [atoms, 3, F], one for every kind of field, do to their scalars."""
    for field in net.external_fields[:1]:
        shapes = (3, net.n_atom_basis), (1, net.n_atom_basis)
        for name, path, _ in _layers(at, "dipole_interaction", net.dipole_interaction):
            yield ace.Site(f"{name}.q", path, *shapes, reads=ace.Tap(f"mu.{field}"))


def _layers(at: str, name: str, layers: Sequence[Any]) -> Iterator[tuple[str, str, bool]]:
    """What people call a layer, its path, and whether it is the last. Shared layers are one, called several times."""
    if len(layers) > 1 and layers[0] is layers[1]:
        yield "layers", f"{at}{name}.0", False
        return
    for number in range(len(layers)):
        yield f"layer{number}", f"{at}{name}.{number}", number == len(layers) - 1
