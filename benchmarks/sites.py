"""Share of a training step that the dual loop takes, for few sites and for many.

tox run -e bench
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch
from timing import measure_dual_loop, training_step
from torch import Tensor, nn

import ace_plugins
from ace_plugins import adapter as ace
from ace_plugins.plugins.registry import registry


class Deep(nn.Module):
    """A network with this many layers of width 64."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


class Adapter:
    """An adapter for `Deep`: every layer is a site."""

    @ace.hookimpl
    def ace_upstream(self) -> ace.Upstream:
        return ace.Upstream("Deep", (f"{__name__}:Deep",))

    @ace.hookimpl
    def ace_layers(self, model: Deep) -> Sequence[ace.Node]:
        return [ace.Site(f"layers.{i}", shape_in=(64,), shape_out=(64,)) for i in range(len(model.layers))]

    @ace.hookimpl
    def ace_branch(self, site: ace.Node) -> nn.Module:
        return ace.linear(site)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    torch.set_num_threads(1)
    registry().add(Adapter(), "deep")
    print("share of the dual loop in a training step (goal: below 1 %)")
    loops: dict[str, dict[str, Any]] = {
        "strict": {"budget": 10**6},
        "resilient": {"budget": 10**6, "mode": "resilient"},
        "paper's loop": {"preset": "none"},
    }
    for sites, rows in ((6, 16_384), (100, 4096), (1000, 512)):
        found = []
        for name, settings in loops.items():
            model = ace_plugins.attach(Deep(sites), adapter="deep", trace=False, **settings)
            step = training_step(model, (torch.randn(rows, 64),))
            found.append(f"{name} {measure_dual_loop(step, options.rounds):.2%}")
        print(f"{sites:5} sites: {', '.join(found)}", flush=True)


if __name__ == "__main__":
    main()
