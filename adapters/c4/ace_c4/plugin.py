"""Adapter for C4Net.

Every convolution is a site. Its branch is a plain convolution of the same size, without the constraint that its kernel
comes in four rotations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ace_plugins import adapter as ace

if TYPE_CHECKING:
    from torch import nn


@ace.hookimpl
def ace_upstream() -> ace.Upstream:
    return ace.Upstream("C4Net (quarter turns of images, plain PyTorch)", ("ace_c4.net:C4Net",))


@ace.hookimpl
def ace_layers(model: Any) -> Sequence[ace.Node]:
    return [
        ace.Site(f"layers.{number}", shape_in=(layer.channels_in,), shape_out=(layer.channels_out,), axis=1)
        for number, layer in enumerate(model.layers)
    ]


@ace.hookimpl
def ace_branch(site: ace.Site, model: Any) -> nn.Module:
    size = model.get_submodule(site.module).kernel_size
    return ace.Convolution(site.width_in, site.width_out, size, padding=size // 2)


@ace.hookimpl
def ace_group_action() -> ace.GroupAction:
    return ace.GroupAction(ace.Cyclic(4), {"image": ace.Grid()}, outputs=ace.Grid())


@ace.hookimpl
def ace_example(seed: int) -> ace.Example:
    import torch

    from .net import C4Net

    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = C4Net(fields=2, depth=2, kernel_size=3)
        return ace.Example(model, (torch.randn(3, 1, 9, 9),))


ace_demo = ace.LazyHook("ace_c4.demo.command:demo")
