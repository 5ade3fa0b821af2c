"""Models built of e3nn modules, whoever wrote them: where ACE goes in, and how E(3) acts on them.

No class is named: the adapter looks at a model that no other adapter claims. `sites` says which of its e3nn modules
are sites, `actions` how the group acts on the model, which follows from the irreps that the model tells. The branches
are the host's MLP.
"""

from __future__ import annotations

from collections.abc import Sequence
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


@ace.hookimpl
def ace_layers(model: nn.Module) -> Sequence[ace.Node]:
    from .sites import sites_of

    return sites_of(model)


@ace.hookimpl
def ace_group_action(model: nn.Module) -> ace.GroupAction:
    from .actions import action_of

    return action_of(model)


@ace.hookimpl
def ace_example(seed: int) -> ace.Example:
    from .example import points_example

    return points_example(seed)
