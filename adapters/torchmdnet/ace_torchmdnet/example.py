"""A small TorchMD-NET model, and two molecules in a batch made from a seed instead of data."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ace_plugins import Example

ELEMENTS = (1, 6, 8)
CUTOFF = 4.0


def small_example(seed: int, **options: Any) -> Example:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = small_model(**options)
        return Example(model, molecules(ELEMENTS, _dtype(model)))


def example_for(model: Any, seed: int) -> Example:
    """A batch in the precision of a model, of elements that it has embeddings for."""
    most = model.representation_model.max_z if hasattr(model.representation_model, "max_z") else ELEMENTS[-1] + 1
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return Example(model, molecules(tuple(n for n in ELEMENTS if n < most), _dtype(model)))


def small_model(model: str = "equivariant-transformer", **options: Any) -> Any:
    """By the names of torchmd-train's options; on forces, unless said otherwise."""
    from torchmdnet.models.model import create_model

    settings: dict[str, Any] = {
        "model": model,
        "embedding_dimension": 16,
        "num_layers": 2,
        "num_rbf": 8,
        "rbf_type": "expnorm",
        "trainable_rbf": False,
        "activation": "silu",
        "attn_activation": "silu",
        "num_heads": 4,
        "distance_influence": "both",
        "neighbor_embedding": True,
        "aggr": "add",
        "equivariance_invariance_group": "O(3)",
        "cutoff_lower": 0.0,
        "cutoff_upper": CUTOFF,
        "max_z": 10,
        "max_num_neighbors": 32,
        "precision": 32,
        "output_model": "Scalar",
        "reduce_op": "add",
        "prior_model": None,
        "atom_filter": -1,
        "derivative": True,
    }
    return create_model({**settings, **options})


def molecules(elements: tuple[int, ...], dtype: torch.dtype, *, count: int = 2, atoms: int = 6) -> tuple[Tensor, ...]:
    """z, pos and batch as the forward takes them: points of a lattice, a little off; drawn from torch's stream."""
    lattice = torch.cartesian_prod(*[torch.arange(3)] * 3)
    places = torch.cat([lattice[torch.randperm(len(lattice))[:atoms]] for _ in range(count)])
    pos = 1.3 * places + 0.15 * torch.randn(count * atoms, 3)
    z = torch.tensor(elements)[torch.arange(count * atoms) % len(elements)]
    return z, pos.to(dtype), torch.arange(count).repeat_interleave(atoms)


def _dtype(model: Any) -> torch.dtype:
    return next(model.parameters()).dtype
