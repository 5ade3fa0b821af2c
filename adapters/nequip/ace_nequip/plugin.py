"""Adapter for NequIP. Its sites and group action are in other modules of this package."""

from __future__ import annotations

from ace_plugins import adapter as ace


@ace.hookimpl
def ace_upstream() -> ace.Upstream:
    return ace.Upstream("NequIP", ("nequip.nn.graph_model:GraphModel",))


ace_layers = ace.LazyHook("ace_nequip.sites:find_sites")
ace_branch = ace.LazyHook("ace_nequip.sites:make_branch")
ace_group_action = ace.LazyHook("ace_nequip.action:group_action")
ace_script = ace.LazyHook("ace_nequip.command:script")
ace_shims = ace.LazyHook("ace_nequip.shims:SHIMS")
ace_example = ace.LazyHook("ace_nequip.example:molecules_example")
