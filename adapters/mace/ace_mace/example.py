"""A small MACE, and a batch of a random molecule and a random crystal."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ace_plugins.adapter import Example

ELEMENTS = (1, 6, 8)
R_MAX = 3.5


def example(seed: int, model: Any) -> Example:
    """Return a small model and a batch, or a batch for this model."""
    return small_example(seed) if model is None else example_for(model, seed)


def small_example(seed: int, name: str = "ScaleShiftMACE", **options: Any) -> Example:
    """Return a small model and a batch."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return Example(
            small_model(name, **options), (batch(ELEMENTS, R_MAX),), {"training": True, "compute_stress": True}
        )


def example_for(model: Any, seed: int) -> Example:
    """Return the model with a random batch that has the model's elements, cutoff and dtype."""
    elements = tuple(int(number) for number in model.atomic_numbers)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        made = batch(elements, float(model.r_max))
    data = {name: value.to(model.r_max.dtype) if value.is_floating_point() else value for name, value in made.items()}
    return Example(model, (data,), {"compute_stress": True})


def small_model(name: str = "ScaleShiftMACE", *, hidden: str = "8x0e + 8x1o", **options: Any) -> Any:
    """Build a model with two layers and three elements."""
    import mace.modules as modules  # before e3nn: it makes the version of e3nn that MACE requires importable
    import numpy as np
    from e3nn.o3 import Irreps

    layer = modules.interaction_classes["RealAgnosticResidualInteractionBlock"]
    shifted = {"atomic_inter_scale": 1.0, "atomic_inter_shift": 0.0} if name == "ScaleShiftMACE" else {}
    settings: dict[str, Any] = {
        "r_max": R_MAX,
        "num_bessel": 4,
        "num_polynomial_cutoff": 5,
        "max_ell": 2,
        "interaction_cls": layer,
        "interaction_cls_first": layer,
        "num_interactions": 2,
        "num_elements": len(ELEMENTS),
        "hidden_irreps": Irreps(hidden),
        "MLP_irreps": Irreps("8x0e"),
        "gate": torch.nn.functional.silu,
        "atomic_energies": np.array([-1.0, -3.0, -2.0]),
        "avg_num_neighbors": 6.0,
        "atomic_numbers": list(ELEMENTS),
        "correlation": 2,
        "radial_MLP": [16, 16],
        **shifted,
        **options,
    }
    return getattr(modules, name)(**settings)


def batch(elements: tuple[int, ...], r_max: float, *, atoms: int = 6) -> dict[str, Tensor]:
    """Draw a random molecule, and a crystal in a skewed cell, as the input dict of MACE's forward."""
    # Like MACE's own reader, put the molecule into a box so large that no periodic image is within the cutoff.
    molecule = _structure(min(1.2, 0.4 * r_max) * _corners(atoms), 20.0 * r_max * torch.eye(3), r_max)
    crystal = _structure(0.5 * r_max * _corners(4), r_max * (1.3 * torch.eye(3) + 0.1 * torch.randn(3, 3)), r_max)
    sizes = torch.tensor([len(part["positions"]) for part in (molecule, crystal)])
    kinds = torch.arange(int(sizes.sum())) % len(elements)
    crystal["edge_index"] += sizes[0]
    return {
        **{name: torch.cat([molecule[name], crystal[name]], 1 if name == "edge_index" else 0) for name in molecule},
        "node_attrs": torch.nn.functional.one_hot(kinds, len(elements)).to(torch.get_default_dtype()),
        "batch": torch.arange(2).repeat_interleave(sizes),
        "ptr": torch.cat([torch.zeros(1, dtype=torch.long), sizes.cumsum(0)]),
    }


def _corners(count: int) -> Tensor:
    """Return corners of the unit cube, slightly displaced."""
    corners = torch.cartesian_prod(*[torch.arange(2)] * 3)[:count].to(torch.get_default_dtype())
    return corners + 0.1 * torch.randn(count, 3)


def _structure(positions: Tensor, cell: Tensor, r_max: float) -> dict[str, Tensor]:
    """Return a structure with all pairs within the cutoff. The cell is so large that nearest images suffice."""
    next_to = torch.arange(-1, 2)
    images = torch.cartesian_prod(next_to, next_to, next_to).to(positions.dtype)
    length = (positions[None, :, None] + images @ cell - positions[:, None, None]).norm(dim=-1)
    sender, receiver, image = torch.nonzero((length < r_max) & (length > 1e-6), as_tuple=True)
    between = {"edge_index": torch.stack([sender, receiver]), "unit_shifts": images[image]}
    return {"positions": positions, "cell": cell, **between, "shifts": images[image] @ cell}
