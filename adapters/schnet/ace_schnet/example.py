"""The SchNet of the paper's QM9 runs (127,553 parameters, 153,543 with ACE) and a batch of random molecules."""

from __future__ import annotations

import torch
from torch_geometric.nn import SchNet

from ace_plugins.adapter import Example

from .neighbours import RadiusGraph


def paper_model() -> SchNet:
    """Return the paper's model, with a neighbour search that needs no optional package."""
    return SchNet(
        hidden_channels=64,
        num_filters=64,
        num_interactions=6,
        num_gaussians=50,
        cutoff=10.0,
        interaction_graph=RadiusGraph(10.0),
    )


def molecules_example(seed: int) -> Example:
    """Return the paper's model and four random molecules."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = paper_model()
        sizes = torch.tensor([9, 12, 5, 17])
        batch = torch.arange(len(sizes)).repeat_interleave(sizes)
        z = torch.tensor([1, 6, 7, 8, 9])[torch.randint(5, (len(batch),))]
        pos = 2.0 * torch.randn(len(batch), 3)
    return Example(model, (z, pos, batch))
