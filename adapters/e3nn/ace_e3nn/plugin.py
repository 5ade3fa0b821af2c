"""Adapter for models built of e3nn modules that no other adapter claims.

It recognises models by their modules, not by class. The module `sites` chooses sites among the e3nn modules of a
model, and the module `actions` derives the group action from its irreps. The branches are ace-plugins' default MLP.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ace_plugins import adapter as ace

if TYPE_CHECKING:
    from torch import nn


@ace.hookimpl
def ace_upstream() -> ace.Upstream:
    return ace.Upstream("models of e3nn modules", recognises=_recognises)


def _recognises(model: nn.Module) -> bool:
    from .sites import has_e3nn

    return has_e3nn(model)


ace_layers = ace.LazyHook("ace_e3nn.sites:find_sites")
ace_group_action = ace.LazyHook("ace_e3nn.actions:group_action")
ace_example = ace.LazyHook("ace_e3nn.example:points_example")
