"""A small network that comes with e3nn, and a batch of random points."""

from __future__ import annotations

import torch

from ace_plugins.adapter import Example

POINTS = 6


def points_example(seed: int, graphs: int = 3) -> Example:
    """Return a network of two convolutions, and graphs with two scalars and a vector per node."""
    from e3nn.nn.models.v2106.gate_points_networks import SimpleNetwork

    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = SimpleNetwork(
            "2x0e + 1x1o",
            "1x0e + 1x1o",
            max_radius=3.0,
            num_neighbors=POINTS - 1.0,
            num_nodes=float(POINTS),
            mul=4,
            layers=1,
            lmax=1,
        )
        data = {
            "pos": torch.randn(POINTS * graphs, 3),
            "x": torch.randn(POINTS * graphs, 5),
            "batch": torch.arange(graphs).repeat_interleave(POINTS),
        }
        return Example(model, (data,))
