"""Adapter for models with R2Conv layers of escnn.

Every R2Conv is a site. Its branch is a plain convolution with the same channels, size, stride and padding. escnn wraps
tensors together with their field types; branches work on the tensors inside.
"""

from __future__ import annotations

from collections.abc import Sequence
from inspect import signature
from typing import TYPE_CHECKING, Any

from ace_plugins import adapter as ace

if TYPE_CHECKING:
    from torch import nn


def _convolutions(model: nn.Module) -> list[tuple[str, Any]]:
    """Return the R2Conv layers of a model with their paths. They are found by class name, without importing escnn."""
    return [(path, layer) for path, layer in model.named_modules() if path and _is(layer, "R2Conv")]


def _is(module: nn.Module, name: str) -> bool:
    return any(kind.__name__ == name and kind.__module__.startswith("escnn.") for kind in type(module).__mro__)


@ace.hookimpl
def ace_upstream() -> ace.Upstream:
    return ace.Upstream("models of R2Conv layers (escnn)", recognises=lambda model: bool(_convolutions(model)))


@ace.hookimpl
def ace_layers(model: nn.Module) -> Sequence[ace.Node]:
    return [
        ace.Site(
            path,
            shape_in=(layer.in_type.size,),
            shape_out=(layer.out_type.size,),
            reads=ace.Tap("input.tensor"),
            output="tensor",
            axis=1,
        )
        for path, layer in _convolutions(model)
    ]


@ace.hookimpl
def ace_branch(site: ace.Site, model: nn.Module) -> nn.Module:
    layer: Any = model.get_submodule(site.module)
    return ace.Convolution(
        site.width_in,
        site.width_out,
        layer.kernel_size,
        stride=layer.stride,
        padding=layer.padding,
        dilation=layer.dilation,
        # For other padding modes (reflect, replicate) the branch pads with zeros; it need not pad like the layer.
        circular=layer.padding_mode == "circular",
    )


@ace.hookimpl
def ace_group_action(model: nn.Module) -> ace.GroupAction:
    from .fields import FieldLike, field_action, grid_group

    layers = [layer for _, layer in _convolutions(model)]
    # An EquivariantModule has field types. For another model take the types of its first and last escnn layer.
    wrapped = _is(model, "EquivariantModule")
    typed: list[Any] = [module for path, module in model.named_modules() if path and _is(module, "EquivariantModule")]
    ends: tuple[Any, Any] = (model, model) if wrapped else (layers[0], typed[-1])
    first, last = ends
    group, elements = grid_group(layers[0].in_type.gspace)
    into, out = (field_action(kind, elements) for kind in (first.in_type, last.out_type))
    name = next(iter(signature(model.forward).parameters))
    if wrapped:
        return ace.GroupAction(group, {f"{name}.tensor": ace.Grid(of=into)}, outputs={"tensor": ace.Grid(of=out)})
    return ace.GroupAction(group, {name: ace.Grid(of=into)}, outputs=FieldLike(out, last.out_type.size))


ace_example = ace.LazyHook("ace_escnn.example:rotations_example")
