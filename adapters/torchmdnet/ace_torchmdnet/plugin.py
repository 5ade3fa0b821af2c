"""TorchMD-NET: where ACE goes in, and how E(3) acts on atoms, energies and forces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ace_plugins import adapter as ace

from .command import script

if TYPE_CHECKING:
    from torch import nn


@ace.hookimpl
def ace_upstream() -> ace.Upstream:
    return ace.Upstream("TorchMD-NET", ("torchmdnet.models.model:TorchMD_Net",))


@ace.hookimpl
def ace_layers(model: Any) -> Sequence[ace.Node]:
    from .sites import sites

    return sites(model)


@ace.hookimpl
def ace_branch(site: ace.Node) -> nn.Module:
    from .sites import branch

    return branch(site)


@ace.hookimpl
def ace_group_action(model: Any) -> ace.GroupAction:
    from .actions import action

    return action(model)


@ace.hookimpl
def ace_script(argv: Sequence[str]) -> ace.Script | None:
    return script(argv)


@ace.hookimpl
def ace_example(seed: int, model: nn.Module | None) -> ace.Example:
    from .example import example_for, small_example

    return small_example(seed) if model is None else example_for(model, seed)
