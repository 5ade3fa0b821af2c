"""A small PaiNN, and a batch of a random molecule and a random crystal."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ace_plugins.adapter import Example

CUTOFF = 3.5
ELEMENTS = (1, 6, 8)


def example(seed: int, model: Any) -> Example:
    """Return a small model and a batch, or a batch for this model."""
    return small_example(seed) if model is None else example_for(model, seed)


def small_example(seed: int, kind: str = "PaiNN", **options: Any) -> Example:
    """Return a small model and a batch in float64."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return Example(small_model(kind, **options).double(), (_in(torch.float64, batch(CUTOFF)),))


def example_for(model: Any, seed: int) -> Example:
    """Return the model with a random batch that has the model's cutoff and dtype."""
    cutoff = next((float(part.cutoff) for part in model.modules() if hasattr(part, "cutoff")), CUTOFF)
    kind = next((weight.dtype for weight in model.parameters() if weight.is_floating_point()), torch.float32)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return Example(model, (_in(kind, batch(cutoff)),))


def small_model(kind: str = "PaiNN", *, stress: bool = True, output_modules: Any = None, **options: Any) -> Any:
    """Build a model of energies, forces and stress with three layers of 8 features."""
    from schnetpack import atomistic, nn, representation
    from schnetpack.model import NeuralNetworkPotential

    settings: dict[str, Any] = {
        "n_atom_basis": 8,
        "n_interactions": 3,
        "radial_basis": nn.GaussianRBF(n_rbf=6, cutoff=CUTOFF),
        "cutoff_fn": nn.CosineCutoff(CUTOFF),
        **({"lmax": 2} if kind == "SO3net" else {}),
        **options,
    }
    strained = [atomistic.Strain()] if stress else []
    made = getattr(representation, kind)(**settings)
    energy = atomistic.Atomwise(n_in=settings["n_atom_basis"], output_key="energy")
    return NeuralNetworkPotential(
        representation=made,
        input_modules=[*strained, atomistic.PairwiseDistances()],
        output_modules=output_modules or [energy, atomistic.Forces(calc_stress=stress)],
    )


def batch(cutoff: float, *, atoms: int = 6) -> dict[str, Tensor]:
    """Draw a molecule, and a crystal in a skewed cell, in the format of SchNetPack's data loader."""
    # The molecule gets a box, because the stress needs a volume; no periodic image is within the cutoff.
    molecule = _structure(min(1.2, 0.4 * cutoff) * _corners(atoms), 20.0 * cutoff * torch.eye(3), cutoff)
    crystal = _structure(0.5 * cutoff * _corners(4), cutoff * (1.3 * torch.eye(3) + 0.1 * torch.randn(3, 3)), cutoff)
    sizes = torch.tensor([len(part["_positions"]) for part in (molecule, crystal)])
    for name in ("_idx_i", "_idx_j"):
        crystal[name] += sizes[0]
    return {
        **{name: torch.cat([molecule[name], crystal[name]]) for name in molecule},
        "_idx": torch.arange(2),
        "_n_atoms": sizes,
        "_atomic_numbers": torch.tensor(ELEMENTS)[torch.arange(int(sizes.sum())) % len(ELEMENTS)],
        "_pbc": torch.tensor([False, True]).repeat_interleave(3),
        "_idx_m": torch.arange(2).repeat_interleave(sizes),
    }


def _in(kind: torch.dtype, data: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.to(kind) if value.is_floating_point() else value for name, value in data.items()}


def _corners(count: int) -> Tensor:
    """Return corners of the unit cube, slightly displaced."""
    corners = torch.cartesian_prod(*[torch.arange(2)] * 3)[:count].to(torch.get_default_dtype())
    return corners + 0.1 * torch.randn(count, 3)


def _structure(positions: Tensor, cell: Tensor, cutoff: float) -> dict[str, Tensor]:
    """Return a structure with all pairs within the cutoff. The cell is so large that nearest images suffice."""
    next_to = torch.arange(-1, 2)
    images = torch.cartesian_prod(next_to, next_to, next_to).to(positions.dtype)
    length = (positions[None, :, None] + images @ cell - positions[:, None, None]).norm(dim=-1)
    center, neighbour, image = torch.nonzero((length < cutoff) & (length > 1e-6), as_tuple=True)
    between = {"_idx_i": center, "_idx_j": neighbour, "_offsets": images[image] @ cell}
    return {"_positions": positions, "_cell": cell[None], **between}
