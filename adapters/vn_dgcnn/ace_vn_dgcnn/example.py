"""The paper's classifier and two random point clouds."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import torch
from torch import nn

from ace_plugins.adapter import Example

POINTS, NEIGHBOURS, KINDS = 32, 5, 16


def shapes_example(seed: int, name: str = "vn_dgcnn_cls", **options: Any) -> Example:
    """Return one of upstream's models and two random clouds of points."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = shapes_model(name, **options)
        points = torch.randn(2, 3, POINTS)
        kinds = (torch.eye(KINDS)[:2, None],) if name.endswith("partseg") else ()
        return Example(model, (points, *kinds))


def shapes_model(name: str = "vn_dgcnn_cls", *, pooling: str = "mean", n_knn: int = NEIGHBOURS) -> nn.Module:
    """Build a model in the same way as upstream's scripts."""
    from importlib import import_module

    args = Namespace(n_knn=n_knn, pooling=pooling)
    model: nn.Module = import_module(f"models.{name}").get_model(args, normal_channel=False)
    return model
