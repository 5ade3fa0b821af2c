"""Adapter for VN-DGCNN and VN-PointNet of vnn (vector neurons).

A layer ``VNLinearLeakyReLU`` applies two linear maps to its vector channels: one gives features, the other gives the
directions of the nonlinearity. Both maps are sites, and both branches read the layer's input. A branch is an affine
map of all channels of a point, which mixes x, y and z.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from inspect import signature
from typing import TYPE_CHECKING, Any

from ace_plugins import adapter as ace

from .upstream import CHECKOUT, METRICS, MODELS

if TYPE_CHECKING:
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
            into, out = (linear.in_features, 3), (linear.out_features, 3)
            sites.append(ace.Site(f"{path}.{name}", shape_in=into, shape_out=out, reads=ace.Tap("x", path)))
    return sites


@ace.hookimpl
def ace_branch(site: ace.Node, model: Any) -> nn.Module:
    from .branch import VectorLinear

    path = site.name.rpartition(".")[0]
    # Graph layers repeat a point for each of its neighbours, and the last layers repeat the mean for each point.
    repeats = model.get_submodule(path).dim == 5 or path.endswith("std_feature.vn1")
    return VectorLinear(site.width_in, site.width_out, repeats=repeats)


@ace.hookimpl
def ace_group_action(model: Any) -> ace.GroupAction:
    points = next(iter(signature(model.forward).parameters))
    # The first output contains logits, per shape or per point. Upstream does not use the second output.
    outputs = (ace.Invariant(), None)
    return ace.GroupAction(ace.SO3, {points: ace.Vectors(axis=1)}, outputs, graphs=ace.Graphs(points))


@ace.hookimpl
def ace_preset() -> Mapping[str, Mapping[str, Any]]:
    # The rate is from the authors' grid for ModelNet40, where the model is trained with upstream's SGD.
    return {"paper": {"dual_optimizer": "adam", "dual_lr": 1e-4}}


@ace.hookimpl
def ace_script(argv: Sequence[str]) -> ace.Script | None:
    return ace.Script.with_option(argv, CHECKOUT.scripts, "--epoch", default=250, metrics=METRICS)


ace_shims = ace.LazyHook("ace_vn_dgcnn.shims:SHIMS")
ace_example = ace.LazyHook("ace_vn_dgcnn.example:shapes_example")
ace_datasets = ace.LazyHook("ace_vn_dgcnn.data.shapes:DATASETS")
