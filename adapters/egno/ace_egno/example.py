"""The paper's motion capture model and random moving skeletons."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ace_plugins.adapter import Example

TIMES = 5


def mocap_example(seed: int, **options: Any) -> Example:
    """Return the paper's model and two random skeletons."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return Example(mocap_model(**options), *mocap_batch())


def mocap_model(**options: Any) -> nn.Module:
    """Build the model of upstream's configuration for motion capture: six layers, 128 features, five time steps."""
    from importlib import import_module

    paper = {"n_layers": 6, "in_node_nf": 2, "in_edge_nf": 2, "hidden_nf": 128, "with_v": True, "num_timesteps": TIMES}
    model: nn.Module = import_module("model.egno").EGNO(**{**paper, **options})
    return model


def mocap_batch(skeletons: int = 2, joints: int = 8) -> tuple[tuple[Any, ...], dict[str, Tensor]]:
    """Return args and kwargs of a forward pass: chains of joints, with the features that upstream's training uses."""
    x, v = torch.randn(2, skeletons, joints, 3).cumsum(2)
    mean = x.mean(1, keepdim=True).expand_as(x)
    x, v, mean = (tensor.reshape(-1, 3) for tensor in (x, 0.1 * v, mean))
    pairs = torch.cartesian_prod(torch.arange(joints), torch.arange(joints))
    apart = (pairs[:, 0] - pairs[:, 1]).abs()
    near = (apart == 1) | (apart == 2)
    offsets = joints * torch.arange(skeletons)[:, None, None]
    row, col = (pairs[near] + offsets).flatten(0, 1).T
    kind = apart[near].repeat(skeletons)[:, None].float()
    height = torch.rand(len(x), 1)
    h = torch.cat([v.norm(dim=1, keepdim=True), height], 1)
    edge_fea = torch.cat([kind, (x[row] - x[col]).square().sum(1, keepdim=True)], 1)
    return (x, h, torch.stack([row, col]), edge_fea), {"v": v, "loc_mean": mean}
