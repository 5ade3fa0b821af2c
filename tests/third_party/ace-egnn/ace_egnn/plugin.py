"""Adapter for EGNN_Network of egnn-pytorch.

A layer is called as ``feats, coors = layer(feats, coors, ...)``. It has two outputs, and therefore two sites.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ace_plugins import adapter as ace

FEATS, COORS = 0, 1
"""Indices in the output of a layer."""


@ace.hookimpl
def ace_upstream() -> ace.Upstream:
    return ace.Upstream(title="EGNN (egnn-pytorch)", models=("egnn_pytorch.egnn_pytorch:EGNN_Network",))


@ace.hookimpl
def ace_layers(model: Any) -> Sequence[ace.Node]:
    sites = []
    for number, (_, layer) in enumerate(model.layers):  # the first entry is global attention, which reads features only
        path = f"layers.{number}.1"
        # Features are invariant, and a branch that reads only features cannot break the symmetry. Read the coordinates.
        coors = ace.Tap("coors")
        if layer.node_mlp is not None:
            width = layer.node_mlp[-1].out_features
            sites.append(ace.Site(f"layers.{number}.feats", path, (3,), (width,), reads=coors, output=FEATS))
        if layer.coors_mlp is not None:
            sites.append(ace.Site(f"layers.{number}.coors", path, (3,), (3,), reads=coors, output=COORS))
    return sites


@ace.hookimpl
def ace_group_action() -> ace.GroupAction:
    return ace.GroupAction(ace.E3, inputs={"coors": ace.Positions()}, outputs=(ace.Invariant(), ace.Positions()))


@ace.hookimpl
def ace_example(seed: int) -> ace.Example:
    import torch
    from egnn_pytorch import EGNN_Network

    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = EGNN_Network(num_tokens=8, dim=16, depth=2)
        return ace.Example(model, args=(torch.randint(8, (2, 6)), torch.randn(2, 6, 3)))
