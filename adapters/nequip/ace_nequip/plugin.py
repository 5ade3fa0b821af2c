"""NequIP: where ACE goes in, and how E(3) acts on atoms, cells, energies and forces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ace_plugins import adapter as ace

if TYPE_CHECKING:
    from torch import nn


@ace.hookimpl
def ace_upstream() -> ace.Upstream:
    return ace.Upstream("NequIP", ("nequip.nn.graph_model:GraphModel",))


@ace.hookimpl
def ace_layers(model: Any) -> Sequence[ace.Node]:
    from .sites import sites

    return sites(model)


@ace.hookimpl
def ace_branch(site: ace.Node) -> nn.Module:
    from .branch import branch

    return branch(site)


@ace.hookimpl
def ace_group_action(model: Any) -> ace.GroupAction:
    from .action import action

    return action(model)


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
    from .example import molecules_example

    return molecules_example(seed)
