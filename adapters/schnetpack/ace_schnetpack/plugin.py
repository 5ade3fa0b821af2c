"""SchNetPack: where ACE goes in, and how E(3) acts on atoms, cells, fields, energies and forces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ace_plugins import adapter as ace

if TYPE_CHECKING:
    from torch import nn

NAME = "schnetpack"


@ace.hookimpl
def ace_upstream() -> ace.Upstream:
    # The whole model, not its representation: only the whole model knows forces.
    return ace.Upstream("SchNetPack", ("schnetpack.model.base:AtomisticModel",))


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
def ace_attached(model: Any) -> None:
    if model.ace.adapter == NAME:
        from .finishing import install

        install()


@ace.hookimpl
def ace_example(seed: int, model: nn.Module | None) -> ace.Example:
    from .example import example_for, small_example

    return small_example(seed) if model is None else example_for(model, seed)
