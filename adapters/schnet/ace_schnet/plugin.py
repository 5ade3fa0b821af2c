"""Adapter for SchNet of PyTorch Geometric.

Every interaction is a site: ``h = h + interaction(h, ...)``. The branches are those of the paper: Linear(3, d)
maps the positions to d features, then a chain of BatchNorm(d) Linear(d, d) follows, one of them per interaction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ace_plugins import adapter as ace

if TYPE_CHECKING:
    from torch import nn

LIFT = "lift"


@ace.hookimpl
def ace_upstream() -> ace.Upstream:
    return ace.Upstream("SchNet (PyTorch Geometric)", ("torch_geometric.nn.models.schnet:SchNet",))


@ace.hookimpl
def ace_layers(model: Any) -> Sequence[ace.Node]:
    from torch import nn

    width = int(getattr(model, "hidden_channels", 0))
    # Read positions at the interaction graph, because subclasses may have another forward, such as forward(data).
    graph = isinstance(getattr(model, "interaction_graph", None), nn.Module)
    positions = ace.Tap(0, "interaction_graph") if graph else ace.Tap("pos", "")
    nodes: list[ace.Node] = [ace.Stem(LIFT, positions, (3,), (width,))]
    before = LIFT
    for number in range(len(getattr(model, "interactions", None) or ())):
        name = f"interactions.{number}"
        nodes.append(ace.Site(name, shape_in=(width,), shape_out=(width,), reads=before))
        before = name
    return nodes


@ace.hookimpl
def ace_branch(site: ace.Node) -> nn.Module:
    return ace.linear(site) if isinstance(site, ace.Stem) else ace.norm_linear(site)


@ace.hookimpl
def ace_group_action() -> ace.GroupAction:
    # With dipole=True the output is the length of the dipole, which is invariant too.
    return ace.GroupAction(ace.E3, {"pos": ace.Positions()}, outputs=ace.Invariant(), graphs=ace.Graphs("batch"))


@ace.hookimpl
def ace_preset() -> Mapping[str, Mapping[str, Any]]:
    # The authors' QM9 runs: dual Adam, with a rate from their grid {5e-4, 1e-2, 1e-1}.
    return {"paper": {"dual_optimizer": "adam", "dual_lr": 5e-4}}


ace_shims = ace.LazyHook("ace_schnet.shims:SHIMS")
ace_example = ace.LazyHook("ace_schnet.example:molecules_example")
ace_demo = ace.LazyHook("ace_schnet.demo.command:demo")
