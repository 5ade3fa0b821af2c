"""Steerable-E3-GNN: where ACE goes in, and how E(3) acts on it.

A layer of SEGNN updates its nodes by ``update_layer_2(update_layer_1(cat(x, message)))``; both are sites, and their
branches read what they read. A layer of SEConv, which the paper leaves out, updates by a gate of the message: that
gate is its site.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ace_plugins import Example, Site, Upstream, hookimpl

from .upstream import CHECKOUT

if TYPE_CHECKING:
    import click
    from torch import nn

    from ace_plugins import Config
    from ace_plugins.actions import GroupAction
    from ace_plugins.contract.data import AnyShim, Node


@hookimpl
def ace_upstream() -> Upstream:
    return Upstream(
        title="SEGNN (Steerable-E3-GNN)",
        models=("models.segnn.segnn:SEGNN", "models.segnn.seconv:SEConv"),
        checkout=CHECKOUT,
    )


@hookimpl
def ace_layers(model: Any) -> Sequence[Node]:
    sites = []
    for number, layer in enumerate(model.layers):
        convolution = hasattr(layer, "irreps_g")
        for name in ("gate",) if convolution else ("update_layer_1", "update_layer_2"):
            module = getattr(layer, name)
            irreps_in = layer.irreps_g if convolution else module.irreps_in1
            path = f"layers.{number}.{name}"
            sites.append(Site(path, path, (irreps_in.dim,), (layer.hidden_irreps.dim,)))
    return sites


@hookimpl
def ace_branch(site: Node, config: Config) -> nn.Module:
    from ace_plugins.engine.branches import mlp

    return mlp(site)


@hookimpl
def ace_group_action(model: Any) -> GroupAction:
    from ace_plugins.actions import E3, GroupAction, Irreps, Positions

    layer = model.layers[0]
    message = getattr(layer, "message_layer_1", None) or layer.message_layer
    last = model.post_pool2 if model.task == "graph" else model.pre_pool2
    return GroupAction(
        E3,
        inputs={
            "graph.x": Irreps(model.embedding_layer.irreps_in1),
            "graph.pos": Positions(),
            "graph.edge_attr": Irreps(message.irreps_in2),
            "graph.node_attr": Irreps(model.embedding_layer.irreps_in2),
        },
        outputs=Irreps(last.irreps_out),
    )


@hookimpl
def ace_preset() -> Mapping[str, Mapping[str, Any]]:
    return {
        # The authors' runs: dual Adam, at rates from their grids for N-body and QM9.
        "paper": {"dual_optimizer": "adam", "dual_lr": 8e-4},
        "qm9": {"dual_optimizer": "adam", "dual_lr": 1e-2},
        # For budgets of a few thousand steps, on which the paper's loop still swings when the run ends.
        "short": {
            "dual_optimizer": "sgd",
            "dual_lr": "1x",
            "gamma_lr": 4.0,
            "augmented": 5.0,
            "spectral_norm": True,
        },
    }


@hookimpl
def ace_shims() -> Sequence[AnyShim]:
    from .shims import SHIMS

    return SHIMS


@hookimpl
def ace_example(seed: int) -> Example:
    from .example import nbody_example

    return nbody_example(seed)


@hookimpl
def ace_datasets() -> Mapping[str, click.Command]:
    from .nbody import nbody

    return {"nbody": nbody}
