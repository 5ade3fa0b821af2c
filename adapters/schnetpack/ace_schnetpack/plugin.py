"""Adapter for PaiNN, SO3net and FieldSchNet of SchNetPack. Sites and action are in other modules."""

from __future__ import annotations

from typing import Any

from ace_plugins import adapter as ace


@ace.hookimpl
def ace_upstream() -> ace.Upstream:
    # ACE patches the whole model, not its representation, since only the whole model computes forces.
    return ace.Upstream("SchNetPack", ("schnetpack.model.base:AtomisticModel",))


ace_layers = ace.LazyHook("ace_schnetpack.sites:find_sites")
ace_branch = ace.LazyHook("ace_schnetpack.sites:make_branch")
ace_group_action = ace.LazyHook("ace_schnetpack.action:group_action")
ace_script = ace.LazyHook("ace_schnetpack.command:script")
ace_shims = ace.LazyHook("ace_schnetpack.shims:SHIMS")
ace_example = ace.LazyHook("ace_schnetpack.example:example")


@ace.hookimpl
def ace_attached(model: Any) -> None:
    from .finishing import install

    install(model)
