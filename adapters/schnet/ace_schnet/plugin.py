"""SchNet of PyTorch Geometric: where ACE goes in, and how E(3) acts on it.

``h = h + interaction(h, ...)`` makes every interaction a site. The branch is the paper's: one Linear(3, d)
lifts the positions, then a chain of BatchNorm(d) Linear(d, d), one link per interaction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ace_plugins import Example, Shim, Site, Stem, Tap, Upstream, hookimpl

if TYPE_CHECKING:
    import click
    from torch import nn

    from ace_plugins import Config
    from ace_plugins.actions import GroupAction
    from ace_plugins.contract.data import Node

LIFT = "lift"


@hookimpl
def ace_upstream() -> Upstream:
    return Upstream(
        title="SchNet (PyTorch Geometric)",
        models=("torch_geometric.nn.models.schnet:SchNet",),
    )


@hookimpl
def ace_layers(model: Any) -> Sequence[Node]:
    from torch import nn

    interactions = getattr(model, "interactions", None) or ()
    width = int(getattr(model, "hidden_channels", 0))
    # Where the positions pass in any case: subclasses like to have forwards of their own, as forward(data).
    graph = isinstance(getattr(model, "interaction_graph", None), nn.Module)
    positions = Tap(0, "interaction_graph") if graph else Tap("pos", "")
    nodes: list[Node] = [Stem(LIFT, positions, (3,), (width,))]
    before = LIFT
    for number in range(len(interactions)):
        name = f"interactions.{number}"
        nodes.append(Site(name, module=name, shape_in=(width,), shape_out=(width,), reads=before))
        before = name
    return nodes


@hookimpl
def ace_branch(site: Node, config: Config) -> nn.Module:
    from ace_plugins.engine.branches import linear, norm_linear

    return linear(site) if isinstance(site, Stem) else norm_linear(site)


@hookimpl
def ace_group_action(model: nn.Module) -> GroupAction:
    from ace_plugins.actions import E3, GroupAction, Invariant, Positions

    # The output is invariant with dipole=True too: that is the length of the dipole.
    return GroupAction(E3, inputs={"pos": Positions()}, outputs=Invariant())


@hookimpl
def ace_preset() -> Mapping[str, Mapping[str, Any]]:
    return {
        # The authors' QM9 runs: dual Adam, its rate from their grid {5e-4, 1e-2, 1e-1}.
        "paper": {"dual_optimizer": "adam", "dual_lr": 5e-4},
        # For budgets of a few thousand steps, on which the paper's loop still swings when the run ends.
        "short": {
            "dual_optimizer": "sgd",
            "dual_lr": "1x",
            "gamma_lr": 10.0,
            "augmented": 5.0,
            "spectral_norm": True,
        },
    }


@hookimpl
def ace_shims() -> Sequence[Shim]:
    from .radius_shim import needed, supply

    return [
        Shim(
            name="radius_graph",
            reason="SchNet's default neighbour search needs torch-cluster or pyg-lib, which PyPI has no wheel of",
            needed=needed,
            apply=supply,
        )
    ]


@hookimpl
def ace_example(seed: int) -> Example:
    import torch

    from .paper import schnet

    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = schnet()
        sizes = torch.tensor([9, 12, 5, 17])
        batch = torch.arange(len(sizes)).repeat_interleave(sizes)
        z = torch.tensor([1, 6, 7, 8, 9])[torch.randint(5, (len(batch),))]
        pos = 2.0 * torch.randn(len(batch), 3)
    return Example(model, (z, pos, batch))


@hookimpl
def ace_demo() -> click.Command:
    from .demo import demo

    return demo
