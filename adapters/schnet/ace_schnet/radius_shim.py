"""SchNet's default interaction graph, where PyTorch Geometric's own cannot run."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from .neighbours import radius_graph as search

MODULE = "torch_geometric.nn.models.schnet"


def needed() -> bool:
    """Ask PyG's own search to find one pair: what it needs differs between versions, what it raises does not."""
    upstream = importlib.import_module(MODULE)
    try:
        upstream.radius_graph(torch.zeros(2, 3), r=1.0, batch=torch.zeros(2, dtype=torch.long))
    except ImportError:
        return True
    return False


def supply() -> None:
    """Put the pure-PyTorch search where SchNet looks its own up, and nowhere else."""
    upstream: Any = importlib.import_module(MODULE)
    upstream.radius_graph = radius_graph


def radius_graph(
    x: Tensor,
    r: float,
    batch: Tensor | None = None,
    loop: bool = False,
    max_num_neighbors: int = 32,
    **options: Any,
) -> Tensor:
    """PyG's signature. Past ``max_num_neighbors`` the nearest are kept, where torch-cluster keeps any."""
    return search(x, r, batch, max_num_neighbors=max_num_neighbors, loop=loop)
