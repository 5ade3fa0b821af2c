"""SchNet of PyTorch Geometric: where ACE goes in, and how E(3) acts on it.

``h = h + interaction(h, ...)`` makes every interaction a site. The branch is the paper's: one Linear(3, d) lifts the
positions, then a chain of BatchNorm(d) Linear(d, d), one link per interaction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ace_plugins import adapter as ace

if TYPE_CHECKING:
    import click
    from torch import nn

LIFT = "lift"


@ace.hookimpl
def ace_upstream() -> ace.Upstream:
    return ace.Upstream("SchNet (PyTorch Geometric)", ("torch_geometric.nn.models.schnet:SchNet",))


@ace.hookimpl
def ace_layers(model: Any) -> Sequence[ace.Node]:
    from torch import nn

    width = int(getattr(model, "hidden_channels", 0))
    # Where the positions pass in any case: subclasses like to have forwards of their own, as forward(data).
    graph = isinstance(getattr(model, "interaction_graph", None), nn.Module)
    positions = ace.Tap(0, "interaction_graph") if graph else ace.Tap("pos", "")
    nodes: list[ace.Node] = [ace.Stem(LIFT, positions, (3,), (width,))]
    before = LIFT
    for number in range(len(getattr(model, "interactions", None) or ())):
        name = f"interactions.{number}"
        nodes.append(ace.Site(name, name, (width,), (width,), reads=before))
        before = name
    return nodes


@ace.hookimpl
def ace_branch(site: ace.Node) -> nn.Module:
    return ace.linear(site) if isinstance(site, ace.Stem) else ace.norm_linear(site)


@ace.hookimpl
def ace_group_action() -> ace.GroupAction:
    # The output is invariant with dipole=True too: that is the length of the dipole.
    return ace.GroupAction(ace.E3, {"pos": ace.Positions()}, outputs=ace.Invariant(), graphs=ace.Graphs("batch"))


@ace.hookimpl
def ace_preset() -> Mapping[str, Mapping[str, Any]]:
    # The authors' QM9 runs: dual Adam, its rate from their grid {5e-4, 1e-2, 1e-1}.
    return {"paper": {"dual_optimizer": "adam", "dual_lr": 5e-4}}


@ace.hookimpl
def ace_shims() -> Sequence[ace.AnyShim]:
    from .shims import SHIMS

    return SHIMS


@ace.hookimpl
def ace_example(seed: int) -> ace.Example:
    from .example import molecules_example

    return molecules_example(seed)


@ace.hookimpl
def ace_demo() -> click.Command:
    from .demo.command import demo

    return demo
