"""A small TorchMD-NET model, and a batch of two random molecules."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ace_plugins.adapter import Example

MODELS = ("equivariant-transformer", "tensornet")
ELEMENTS = (1, 6, 8)
CUTOFF = 4.0


def example(seed: int, model: Any) -> Example:
    """Return a small model and a batch, or a batch for this model."""
    return small_example(seed) if model is None else example_for(model, seed)


def small_example(seed: int, **options: Any) -> Example:
    """Return an Equivariant Transformer, or for odd seeds a TensorNet, so that checks cover both."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = small_model(MODELS[seed % 2], **options)
    return example_for(model, seed)


def example_for(model: Any, seed: int) -> Example:
    """Return the model with a random batch that has the model's elements and dtype."""
    most = min(part.num_embeddings for part in model.modules() if isinstance(part, torch.nn.Embedding))
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        elements = tuple(number for number in ELEMENTS if number < most)
        return Example(model, molecules(elements, next(model.parameters()).dtype))


def small_model(model: str = MODELS[0], **options: Any) -> Any:
    """Build a model of energies and forces. Options have the names of the options of torchmd-train."""
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
    """Draw molecules (z, pos, batch) with atoms near the points of a lattice."""
    lattice = torch.cartesian_prod(*[torch.arange(3)] * 3)
    places = torch.cat([lattice[torch.randperm(len(lattice))[:atoms]] for _ in range(count)])
    pos = 1.3 * places + 0.15 * torch.randn(count * atoms, 3)
    z = torch.tensor(elements)[torch.arange(count * atoms) % len(elements)]
    return z, pos.to(dtype), torch.arange(count).repeat_interleave(atoms)
