"""EGNO: where ACE goes in, and how SE(3) acts on it.

A layer takes positions x and features h, and gives both; each is a site. The branch of x reads the positions that
enter the layer, through one linear map that all layers share. The branches of h are a chain, fed from what the
embedding reads: its i-th link is added at layer i.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ace_plugins import adapter as ace

from .upstream import CHECKOUT

if TYPE_CHECKING:
    from torch import nn

X, H = 0, 2
"""Where a layer's (x, v, h) has them."""


@ace.hookimpl
def ace_upstream() -> ace.Upstream:
    return ace.Upstream("EGNO", ("model.egno:EGNO",), CHECKOUT)


@ace.hookimpl
def ace_layers(model: Any) -> Sequence[ace.Node]:
    width = model.hidden_nf
    # Not bounded: what reads them begins with BatchNorm, for which scale is nothing.
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
    # No script reads the features that come out with them.
    return ace.GroupAction(ace.SE3, inputs, outputs=(ace.Positions(), ace.Vectors(), None))


@ace.hookimpl
def ace_preset() -> Mapping[str, Mapping[str, Any]]:
    # The authors' runs on motion capture: branches of bounded scale, which stay in the model; dual Adam.
    always = {"mode": "resilient", "spectral_norm": True, "error_every": 100}
    # What brings 60 epochs on the run data to a relative equivariance error below 0.25.
    return {
        "fit": {**always, "rho": "2.5x", "gamma_init": 1.0},
        "paper": {**always, "dual_optimizer": "adam", "dual_lr": 2e-4},
    }


@ace.hookimpl
def ace_script(argv: Sequence[str]) -> ace.Script | None:
    from .command import script

    return script(argv)


@ace.hookimpl
def ace_shims() -> Sequence[ace.AnyShim]:
    from .shims import SHIMS

    return SHIMS


@ace.hookimpl
def ace_example(seed: int) -> ace.Example:
    from .example import mocap_example

    return mocap_example(seed)
