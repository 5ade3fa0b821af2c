"""EGNO: where ACE goes in, and how SE(3) acts on it.

A layer takes positions x and features h, and gives both; each is a site. The branch of x reads the positions that
enter the layer, through one linear map that all layers share. The branches of h are a chain, fed from what the
embedding reads: its i-th link is added at layer i.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ace_plugins import Example, Site, Stem, Tap, Upstream, hookimpl

from .upstream import CHECKOUT

if TYPE_CHECKING:
    from torch import nn

    from ace_plugins.actions import GroupAction
    from ace_plugins.contract.data import AnyShim, Node

X, H = 0, 2
"""Where a layer's (x, v, h) has them."""


@hookimpl
def ace_upstream() -> Upstream:
    return Upstream(title="EGNO", models=("model.egno:EGNO",), checkout=CHECKOUT)


@hookimpl
def ace_layers(model: Any) -> Sequence[Node]:
    width = model.hidden_nf
    # Not bounded: what reads them begins with BatchNorm, for which scale is nothing.
    nodes: list[Node] = [
        Stem("lift_x", None, (3,), (3,), bounded=False),
        Stem("lift_h", Tap(0, "embedding"), (model.embedding.in_features,), (width,), bounded=False),
    ]
    before = "lift_h"
    for i in range(len(model.layers)):
        layer = f"layers.{i}"
        nodes.append(Site(f"{layer}.x", layer, (3,), (3,), reads=Tap("x"), through="lift_x", output=X))
        nodes.append(Site(f"{layer}.h", layer, (width,), (width,), reads=before, output=H))
        before = f"{layer}.h"
    return nodes


@hookimpl
def ace_branch(site: Node, model: Any) -> nn.Module:
    from torch.nn import Linear, Sequential, SiLU

    from ace_plugins.engine.branches import Norm, linear, norm_linear

    if isinstance(site, Stem):
        return linear(site)
    if site.output == H:
        return norm_linear(site)
    width = model.hidden_nf
    return Sequential(Norm(3), Linear(3, width), SiLU(), Norm(width), Linear(width, 3))


@hookimpl
def ace_group_action() -> GroupAction:
    from ace_plugins.actions import SE3, GroupAction, Positions, Vectors

    return GroupAction(
        SE3,
        inputs={"x": Positions(), "v": Vectors(), "loc_mean": Positions()},
        # No script reads the features that come out with them.
        outputs=(Positions(), Vectors(), None),
    )


@hookimpl
def ace_preset() -> Mapping[str, Mapping[str, Any]]:
    return {
        # The authors' runs on motion capture: branches of bounded scale, which stay in the model; dual Adam.
        "paper": {
            "mode": "resilient",
            "dual_optimizer": "adam",
            "dual_lr": 2e-4,
            "spectral_norm": True,
            "error_every": 100,
        },
        # For budgets of a thousand steps or so, in which the authors' lambda hardly begins to pull.
        "short": {
            "mode": "resilient",
            "dual_optimizer": "sgd",
            "dual_lr": "10x",
            "gamma_lr": 4.0,
            "spectral_norm": True,
            "error_every": 100,
        },
    }


@hookimpl
def ace_shims() -> Sequence[AnyShim]:
    from .shims import SHIMS

    return SHIMS


@hookimpl
def ace_example(seed: int) -> Example:
    from .example import mocap_example

    return mocap_example(seed)
