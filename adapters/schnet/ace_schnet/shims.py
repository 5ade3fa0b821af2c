"""Compatibility shim: replaces SchNet's default neighbour search where that of PyTorch Geometric (PyG) cannot run."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ace_plugins.adapter import Shim

if TYPE_CHECKING:
    from torch import Tensor

MODULE = "torch_geometric.nn.models.schnet"


def _is_needed() -> bool:
    """Return whether PyG's search fails for two atoms. It is tried, because its requirements depend on the version."""
    import torch

    upstream = importlib.import_module(MODULE)
    try:
        upstream.radius_graph(torch.zeros(2, 3), r=1.0, batch=torch.zeros(2, dtype=torch.long))
    except ImportError:
        return True
    return False


def _apply() -> None:
    """Replace the search in the module of SchNet and nowhere else."""
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
    """Find neighbours, with the signature of PyG's function. Only the nearest ``max_num_neighbors`` are kept."""
    from .neighbours import radius_graph as search

    return search(x, r, batch, max_num_neighbors=max_num_neighbors, loop=loop)


SHIMS = (
    Shim(
        "radius_graph",
        "SchNet's default neighbour search needs torch-cluster or pyg-lib, which have no wheels on PyPI",
        _is_needed,
        _apply,
    ),
)
