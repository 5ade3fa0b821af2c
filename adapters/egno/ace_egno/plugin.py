"""Adapter for EGNO.

A layer maps positions x and features h to new positions and features; both outputs are sites. The branch of x reads
the positions that enter the layer, after one linear map that all layers share. The branches of h form a chain that
starts at the input of the embedding: each reads the output of the one before, and the i-th is added at layer i.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ace_plugins import adapter as ace

from .upstream import CHECKOUT

if TYPE_CHECKING:
    from torch import nn

X, H = 0, 2
"""Indices of x and h in the output (x, v, h) of a layer."""


@ace.hookimpl
def ace_upstream() -> ace.Upstream:
    return ace.Upstream("EGNO", ("model.egno:EGNO",), CHECKOUT)


@ace.hookimpl
def ace_layers(model: Any) -> Sequence[ace.Node]:
    width = model.hidden_nf
    # These stems need no bound: the branches that read them start with BatchNorm, which removes the scale.
    nodes: list[ace.Node] = [
        ace.Stem("lift_x", None, (3,), (3,), bounded=False),
        ace.Stem("lift_h", ace.Tap(0, "embedding"), (model.embedding.in_features,), (width,), bounded=False),
    ]
    before = "lift_h"
    for i in range(len(model.layers)):
        layer = f"layers.{i}"
        nodes.append(ace.Site(f"{layer}.x", layer, (3,), (3,), reads=ace.Tap("x"), through="lift_x", output=X))
        nodes.append(ace.Site(f"{layer}.h", layer, (width,), (width,), reads=before, output=H))
        before = f"{layer}.h"
    return nodes


@ace.hookimpl
def ace_branch(site: ace.Node, model: Any) -> nn.Module:
    from torch.nn import Linear, Sequential, SiLU

    if isinstance(site, ace.Stem):
        return ace.linear(site)
    if site.output == H:
        return ace.norm_linear(site)
    width = model.hidden_nf
    return Sequential(ace.Norm(3), Linear(3, width), SiLU(), ace.Norm(width), Linear(width, 3))


@ace.hookimpl
def ace_group_action() -> ace.GroupAction:
    inputs = {"x": ace.Positions(), "v": ace.Vectors(), "loc_mean": ace.Positions()}
    # There is no batch vector, but no edge connects two samples. Layers repeat all nodes for each time step.
    graphs = ace.Graphs("x", linked="edge_index", repeated=True)
    # The third output, h, is not used by any script.
    return ace.GroupAction(ace.SE3, inputs, outputs=(ace.Positions(), ace.Vectors(), None), graphs=graphs)


@ace.hookimpl
def ace_preset() -> Mapping[str, Mapping[str, Any]]:
    # As in the authors' runs on motion capture: branches are bounded and stay in the model.
    return {
        "paper": {
            "mode": "resilient",
            "spectral_norm": True,
            "dual_optimizer": "adam",
            "dual_lr": 2e-4,
            "error_every": 100,
        }
    }


ace_script = ace.LazyHook("ace_egno.command:script")
ace_shims = ace.LazyHook("ace_egno.shims:SHIMS")
ace_example = ace.LazyHook("ace_egno.example:mocap_example")
ace_datasets = ace.LazyHook("ace_egno.data.mocap:DATASETS")
