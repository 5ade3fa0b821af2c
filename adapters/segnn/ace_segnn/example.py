"""The paper's N-body model and random graphs of five charged particles."""

from __future__ import annotations

from typing import Any

import torch
from e3nn.o3 import Irreps, spherical_harmonics
from torch import Tensor
from torch_geometric.data import Data

from ace_plugins.adapter import Example

PARTICLES = 5


def nbody_example(seed: int, name: str = "SEGNN", **options: Any) -> Example:
    """Return the paper's model and three random graphs."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return Example(nbody_model(name, **options), (nbody_batch(),))


def nbody_model(name: str = "SEGNN", *, layers: int = 4, norm: str = "none", **options: Any) -> Any:
    """Build a model with lmax_h = 1, lmax_attr = 1 and 64 hidden features (32x0e+32x1o)."""
    from importlib import import_module

    model = getattr(import_module(f"models.segnn.{name.lower()}"), name)
    attributes = Irreps.spherical_harmonics(1)
    return model(
        Irreps("2x1o + 1x0e"),
        Irreps("32x0e + 32x1o"),
        Irreps("1x1o"),
        attributes,
        attributes,
        num_layers=layers,
        norm=norm,
        task="node",
        additional_message_irreps=Irreps("2x0e"),
        **options,
    )


def nbody_batch(graphs: int = 3) -> Data:
    """Return fully connected graphs with the features that upstream's N-body training computes."""
    pos, vel = torch.randn(2, PARTICLES * graphs, 3)
    charges = torch.randint(0, 2, (PARTICLES * graphs, 1)) * 2.0 - 1
    start, end = _pairs(graphs)
    relative = pos[start] - pos[end]
    edge_attr = _harmonics(relative)
    mean = torch.zeros(len(pos), edge_attr.shape[1]).index_add(0, end, edge_attr) / (PARTICLES - 1)
    return Data(
        x=torch.cat([pos - pos.mean(0), vel, vel.norm(dim=1, keepdim=True)], 1),
        pos=pos,
        edge_index=torch.stack([start, end]),
        edge_attr=edge_attr,
        node_attr=mean + _harmonics(vel),
        batch=torch.arange(graphs).repeat_interleave(PARTICLES),
        additional_message_features=torch.cat([relative.norm(dim=1, keepdim=True), charges[start] * charges[end]], 1),
    )


def _harmonics(vectors: Tensor) -> Tensor:
    made: Tensor = spherical_harmonics(Irreps.spherical_harmonics(1), vectors, normalize=True, normalization="integral")
    return made


def _pairs(graphs: int) -> tuple[Tensor, Tensor]:
    one = torch.cartesian_prod(torch.arange(PARTICLES), torch.arange(PARTICLES))
    one = one[one[:, 0] != one[:, 1]]
    every = (one + PARTICLES * torch.arange(graphs)[:, None, None]).flatten(0, 1)
    return every[:, 0], every[:, 1]
