"""Adapter for TorchMD-NET. Its sites and group action are in other modules of this package."""

from __future__ import annotations

from ace_plugins import adapter as ace


@ace.hookimpl
def ace_upstream() -> ace.Upstream:
    return ace.Upstream("TorchMD-NET", ("torchmdnet.models.model:TorchMD_Net",))


ace_layers = ace.LazyHook("ace_torchmdnet.sites:find_sites")
ace_branch = ace.LazyHook("ace_torchmdnet.sites:make_branch")
ace_group_action = ace.LazyHook("ace_torchmdnet.actions:group_action")
ace_script = ace.LazyHook("ace_torchmdnet.command:script")
ace_example = ace.LazyHook("ace_torchmdnet.example:example")
