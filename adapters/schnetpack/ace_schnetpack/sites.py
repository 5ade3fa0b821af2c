"""Sites and branches of SchNetPack models: the layers that mix vector features.

A layer of PaiNN first sums messages and then mixes the scalars q [atoms, 1, F] and the vectors mu [atoms, 3, F] of each
atom. The branches of a layer read mu before the mixing and are added to the outputs of the mixing. Branches never read
positions, so the energy stays invariant under translations. Forces are minus the gradient of the energy, which includes
the branches. Every function of scalars is invariant, so models that have only scalars have no sites.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from ace_plugins import adapter as ace

KNOWN = "PaiNN, SO3net, or FieldSchNet with an external field"


def find_sites(model: Any) -> list[ace.Node]:
    """Return the sites of a model, or raise an AdapterError if it has none."""
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
            f"{kind} has scalar features only, and branches that read only scalars cannot break the symmetry (they do "
            f"not read positions, to keep forces conservative); expected a model with {KNOWN}"
        )
    return found


def make_branch(site: ace.Node) -> nn.Module:
    """Return Linear(d_in, F/2) SiLU Linear(F/2, d_out) without biases, for features [components, F].

    Without biases the output is zero for zero input, so an atom without neighbours keeps the energy that SchNetPack
    gives it. The branch is narrow, since a training step on forces passes through it four times (forward, forces, and
    the gradients of both), and vectors are three times as wide as scalars.
    """
    width = max(1, site.shape_out[-1] // 2)
    first = nn.Linear(site.width_in, width, bias=False)
    second = nn.Linear(width, site.width_out, bias=False)
    flatten, unflatten = nn.Flatten(-len(site.shape_in)), nn.Unflatten(-1, site.shape_out)
    return nn.Sequential(flatten, first, nn.SiLU(), second, unflatten)


def _painn(at: str, painn: Any) -> Iterator[ace.Node]:
    """Yield two sites per layer, q and mu. The last layer has only q, since the energy does not read its vectors."""
    channels = painn.n_atom_basis
    vectors = ace.Vectors(axis=-2)
    for name, path, last in _layers(at, "mixing", painn.mixing):
        reads: dict[str, Any] = {"shape_in": (3, channels), "reads": ace.Tap("mu")}
        yield ace.Site(f"{name}.q", path, shape_out=(1, channels), output=0, acts=(vectors, ace.Invariant()), **reads)
        if not last:
            yield ace.Site(f"{name}.mu", path, shape_out=(3, channels), output=1, acts=(vectors, vectors), **reads)


def _so3net(at: str, net: Any) -> Iterator[ace.Node]:
    """Yield one site per layer: its last linear map, with features [atoms, (lmax + 1)^2, F]."""
    shape = (int(net.lmax) + 1) ** 2, net.n_atom_basis
    for name, path, _ in _layers(at, "mixings3", net.mixings3):
        yield ace.Site(f"{name}.x", path, shape, shape)


def _field_schnet(at: str, net: Any) -> Iterator[ace.Node]:
    """Yield one site per interaction of the scalars with the dipoles [atoms, 3, F] of the first external field."""
    for field in net.external_fields[:1]:
        shapes = (3, net.n_atom_basis), (1, net.n_atom_basis)
        for name, path, _ in _layers(at, "dipole_interaction", net.dipole_interaction):
            yield ace.Site(f"{name}.q", path, *shapes, reads=ace.Tap(f"mu.{field}"))


def _layers(at: str, name: str, layers: Sequence[Any]) -> Iterator[tuple[str, str, bool]]:
    """Yield name, path, and whether it is the last, for each layer. A layer that all steps share is yielded once."""
    if len(layers) > 1 and layers[0] is layers[1]:
        yield "layers", f"{at}{name}.0", False
        return
    for number in range(len(layers)):
        yield f"layer{number}", f"{at}{name}.{number}", number == len(layers) - 1
