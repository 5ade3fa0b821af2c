"""What the dual loop costs beside a training step, for few sites and for many: its two optimizer hooks, as a share.

tox run -e bench
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

import ace_plugins
from ace_plugins import adapter as ace
from ace_plugins.engine.step import STEPS
from ace_plugins.plugins.registry import registry


class Deep(nn.Module):
    """So many layers of width 64."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


class Adapter:
    @ace.hookimpl
    def ace_upstream(self) -> ace.Upstream:
        return ace.Upstream("Deep", (f"{__name__}:Deep",))

    @ace.hookimpl
    def ace_layers(self, model: Deep) -> Sequence[ace.Node]:
        return [ace.Site(f"layers.{i}", f"layers.{i}", (64,), (64,)) for i in range(len(model.layers))]

    @ace.hookimpl
    def ace_branch(self, site: ace.Node) -> nn.Module:
        return ace.linear(site)


def share(model: Any, rows: int, rounds: int) -> float:
    """Processor time of the two hooks over that of the whole step."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    x = torch.randn(rows, 64)
    hooks = [0.0]
    before, after = STEPS.before_step, STEPS.after_step

    def timed(hook: Any) -> Any:
        def run(*args: Any) -> Any:
            begin = time.process_time()
            try:
                return hook(*args)
            finally:
                hooks[-1] += time.process_time() - begin

        return run

    home = importlib.import_module("torch.optim.optimizer")
    pre, post = home._global_optimizer_pre_hooks, home._global_optimizer_post_hooks
    kept = dict(pre), dict(post)
    for table, hook in ((pre, before), (post, after)):
        for key in [key for key, known in table.items() if known == hook]:
            table[key] = timed(hook)
    shares = []
    for _ in range(rounds):
        hooks.append(0.0)
        begin = time.process_time()
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        shares.append(hooks[-1] / (time.process_time() - begin))
    for table, old in zip((pre, post), kept, strict=True):
        table.update(old)
    return statistics.median(shares[2:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    torch.set_num_threads(1)
    registry().add(Adapter(), "deep")
    print("dual loop's share of a training step (below 1 % wanted)")
    loops: list[dict[str, Any]] = [{"budget": 10**6}, {"budget": 10**6, "mode": "resilient"}, {"preset": "none"}]
    for sites, rows in ((6, 16_384), (100, 4096), (1000, 512)):
        found = []
        for settings in loops:
            model = ace_plugins.attach(Deep(sites), adapter="deep", trace=False, **settings)
            found.append(share(model, rows, options.rounds))
        print(f"{sites:5} sites: strict {found[0]:.2%}, resilient {found[1]:.2%}, printed {found[2]:.2%}", flush=True)


if __name__ == "__main__":
    main()
