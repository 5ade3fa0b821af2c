"""SchNet's default interaction graph, where PyTorch Geometric's own cannot run."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ace_plugins.adapter import Shim

if TYPE_CHECKING:
    from torch import Tensor

MODULE = "torch_geometric.nn.models.schnet"

SHIMS = (
    Shim(
        "radius_graph",
        "SchNet's default neighbour search needs torch-cluster or pyg-lib, which PyPI has no wheel of",
        lambda: _needed(),
        lambda: _supply(),
    ),
)


def _needed() -> bool:
    """Ask PyG's own search to find one pair: what it needs differs between versions, what it raises does not."""
    import torch

    upstream = importlib.import_module(MODULE)
    try:
        upstream.radius_graph(torch.zeros(2, 3), r=1.0, batch=torch.zeros(2, dtype=torch.long))
    except ImportError:
        return True
    return False


def _supply() -> None:
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
    from .neighbours import radius_graph as search

    return search(x, r, batch, max_num_neighbors=max_num_neighbors, loop=loop)
