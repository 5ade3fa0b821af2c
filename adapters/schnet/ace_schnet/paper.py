"""The SchNet of the paper's QM9 runs: 127,553 parameters, 153,543 with ACE."""

from __future__ import annotations

from torch_geometric.nn import SchNet

from .neighbours import RadiusGraph


def schnet() -> SchNet:
    return SchNet(
        hidden_channels=64,
        num_filters=64,
        num_interactions=6,
        num_gaussians=50,
        cutoff=10.0,
        interaction_graph=RadiusGraph(10.0),
    )
