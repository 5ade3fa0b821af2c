"""Vector neurons: where ACE goes in, and how SO(3) acts on them.

A layer ``VNLinearLeakyReLU`` maps its vector channels twice, to features and to the directions its nonlinearity goes
by. Both maps are sites, and both branches read the layer's input: an affine map of all channels of a point, which
mixes x, y and z.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from inspect import signature
from typing import TYPE_CHECKING, Any

from ace_plugins import adapter as ace

from .upstream import CHECKOUT, METRICS, MODELS

if TYPE_CHECKING:
    import click
    from torch import nn

LAYER, MAPS = "VNLinearLeakyReLU", ("map_to_feat", "map_to_dir")


@ace.hookimpl
def ace_upstream() -> ace.Upstream:
    models = tuple(f"models.{name}:get_model" for name in MODELS)
    return ace.Upstream("VN-DGCNN and VN-PointNet (vnn)", models, CHECKOUT)


@ace.hookimpl
def ace_layers(model: Any) -> Sequence[ace.Node]:
    sites = []
    for path, layer in model.named_modules():
        for name in MAPS if type(layer).__name__ == LAYER else ():
            linear = getattr(layer, name)
            shapes = (linear.in_features, 3), (linear.out_features, 3)
            sites.append(ace.Site(f"{path}.{name}", f"{path}.{name}", *shapes, reads=ace.Tap("x", path)))
    return sites


@ace.hookimpl
def ace_branch(site: ace.Node, model: Any) -> nn.Module:
    from .branch import VectorLinear

    path = site.name.rpartition(".")[0]
    # Graphs have a point beside each of its neighbours, and the last layers a mean beside each point.
    repeats = model.get_submodule(path).dim == 5 or path.endswith("std_feature.vn1")
    return VectorLinear(site.width_in, site.width_out, repeats=repeats)


@ace.hookimpl
def ace_group_action(model: Any) -> ace.GroupAction:
    points = next(iter(signature(model.forward).parameters))
    # Logits, of the shape or of each point, and a second output that upstream leaves empty.
    return ace.GroupAction(
        ace.SO3, {points: ace.Vectors(axis=1)}, outputs=(ace.Invariant(), None), graphs=ace.Graphs(points)
    )


@ace.hookimpl
def ace_preset() -> Mapping[str, Mapping[str, Any]]:
    # From the authors' grid for ModelNet40, beside upstream's SGD.
    return {"paper": {"dual_optimizer": "adam", "dual_lr": 1e-4}}


@ace.hookimpl
def ace_script(argv: Sequence[str]) -> ace.Script | None:
    return ace.Script.with_option(argv, CHECKOUT.scripts, "--epoch", default=250, metrics=METRICS)


@ace.hookimpl
def ace_shims() -> Sequence[ace.AnyShim]:
    from .shims import SHIMS

    return SHIMS


@ace.hookimpl
def ace_example(seed: int) -> ace.Example:
    from .example import shapes_example

    return shapes_example(seed)


@ace.hookimpl
def ace_datasets() -> Mapping[str, click.Command]:
    from .data.shapes import shapes

    return {"shapes": shapes}
