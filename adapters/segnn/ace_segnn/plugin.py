"""Adapter for SEGNN and SEConv of Steerable-E3-GNN.

A layer of SEGNN updates its nodes by ``update_layer_2(update_layer_1(cat(x, message)))``. Both update layers are
sites. The branch of each is the default MLP of ace-plugins, applied to the input of the update layer. A layer of
SEConv, which the paper does not cover, updates its nodes by a gate of the message; that gate is its site.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ace_plugins import adapter as ace

from .upstream import CHECKOUT, METRICS, MODELS


@ace.hookimpl
def ace_upstream() -> ace.Upstream:
    return ace.Upstream("SEGNN (Steerable-E3-GNN)", MODELS, CHECKOUT)


@ace.hookimpl
def ace_layers(model: Any) -> Sequence[ace.Node]:
    sites = []
    for number, layer in enumerate(model.layers):
        convolution = hasattr(layer, "irreps_g")
        for name in ("gate",) if convolution else ("update_layer_1", "update_layer_2"):
            into, out = layer.irreps_g if convolution else getattr(layer, name).irreps_in1, layer.hidden_irreps
            acts = ace.Irreps(into), ace.Irreps(out)
            sites.append(ace.Site(f"layers.{number}.{name}", shape_in=(into.dim,), shape_out=(out.dim,), acts=acts))
    return sites


@ace.hookimpl
def ace_group_action(model: Any) -> ace.GroupAction:
    layer = model.layers[0]
    message = getattr(layer, "message_layer_1", None) or layer.message_layer
    last = model.post_pool2 if model.task == "graph" else model.pre_pool2
    inputs = {
        "graph.x": ace.Irreps(model.embedding_layer.irreps_in1),
        "graph.pos": ace.Positions(),
        "graph.edge_attr": ace.Irreps(message.irreps_in2),
        "graph.node_attr": ace.Irreps(model.embedding_layer.irreps_in2),
    }
    graphs = ace.Graphs("graph.batch", edges={"graph.edge_attr": "graph.edge_index"})
    return ace.GroupAction(ace.E3, inputs, outputs=ace.Irreps(last.irreps_out), graphs=graphs)


@ace.hookimpl
def ace_preset() -> Mapping[str, Mapping[str, Any]]:
    return {
        # The authors' runs: dual Adam, with rates from their grids for N-body and QM9.
        "paper": {"dual_optimizer": "adam", "dual_lr": 8e-4},
        "qm9": {"dual_optimizer": "adam", "dual_lr": 1e-2},
    }


@ace.hookimpl
def ace_script(argv: Sequence[str]) -> ace.Script | None:
    return ace.Script.with_option(argv, CHECKOUT.scripts, "--epochs", default=1000, metrics=METRICS)


ace_shims = ace.LazyHook("ace_segnn.shims:SHIMS")
ace_example = ace.LazyHook("ace_segnn.example:nbody_example")
ace_datasets = ace.LazyHook("ace_segnn.data.nbody:DATASETS")
