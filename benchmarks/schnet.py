"""What ACE costs on SchNet, as ratios: the two sides alternate in one process, so noise meets both.

tox run -e bench
"""

from __future__ import annotations

import argparse
import copy
import statistics
from typing import Any

import torch
from timing import Timed, clock, evaluator, in_turns, interleaved, trainer
from torch import Tensor, nn

from ace_plugins import attach
from ace_plugins.engine.state import LIVE
from ace_plugins.engine.step import STEPS
from ace_schnet.example import paper_model


def batch(molecules: int, atoms: int) -> tuple[Tensor, Tensor, Tensor]:
    z = torch.tensor([1, 6, 7, 8, 9])[torch.randint(5, (molecules * atoms,))]
    return z, 2 * torch.randn(molecules * atoms, 3), torch.arange(molecules).repeat_interleave(atoms)


class Bare(nn.Module):
    """The paper's branches written by hand, without upstream, hooks or duals: no plugin can cost less than they do."""

    def __init__(self, width: int = 64, sites: int = 6) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(sites))
        self.lift = nn.Linear(3, width)
        self.links = nn.ModuleList(nn.Sequential(nn.BatchNorm1d(width), nn.Linear(width, width)) for _ in range(sites))

    def forward(self, features: Tensor, pos: Tensor) -> Tensor:
        x = self.lift(pos)
        for gamma, link in zip(self.gamma.unbind(), self.links, strict=True):
            x = link(x)
            features = torch.addcmul(features, gamma, x)
        return features


def switched(model: Any, step: Timed, on: bool) -> Timed:
    """The step with or without the dual loop: the optimizer hooks pass by a process without live models."""

    def run() -> None:
        (LIVE.aces.add if on else LIVE.aces.discard)(model.ace)
        step()

    return run


def share_of_hooks(model: Any, data: tuple[Tensor, Tensor, Tensor], rounds: int) -> float:
    """Time inside the dual loop's two hooks over the time of the whole step: no noise of the step itself."""
    inside: list[float] = []
    before, after = STEPS.before_step, STEPS.after_step
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    shares = []
    for _ in range(rounds):
        optimizer.zero_grad()
        begin = clock()
        model(*data).square().mean().backward()
        optimizer.step()
        whole = clock() - begin
        # The same two calls again, alone: what they do does not depend on the model's size.
        begin = clock()
        before(optimizer, (optimizer,), {})
        after(optimizer, (optimizer,), {})
        inside.append(clock() - begin)
        shares.append(inside[-1] / whole)
    return statistics.median(shares)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--molecules", type=int, default=32)
    parser.add_argument("--atoms", type=int, default=18)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    data = batch(options.molecules, options.atoms)
    plain = paper_model()
    print(f"SchNet 64/64/6/50, {options.molecules} molecules of {options.atoms} atoms, {options.rounds} rounds")
    for dual, mode in (("sgd", "strict"), ("adam", "strict"), ("adam", "resilient")):
        model: Any = attach(copy.deepcopy(plain), preset="paper", mode=mode, dual_optimizer=dual, trace=False)
        step = trainer(model, data)
        step()
        share = share_of_hooks(model, data, options.rounds // 2)
        print(f"dual loop, {mode:9} {dual:4}: {share:7.2%} of a training step (at most 1 % wanted)")
    model = attach(copy.deepcopy(plain), preset="paper", trace=False)
    step = trainer(model, data)
    on, off = switched(model, step, True), switched(model, step, False)
    ratio = interleaved(on, switched(model, step, True), options.rounds)
    print(f"noise, a training step against itself:       {ratio:.4f}")
    ratio = interleaved(on, off, options.rounds)
    LIVE.aces.add(model.ace)
    print(f"training step, with / without the dual loop: {ratio:.4f}")
    ratio = interleaved(step, trainer(copy.deepcopy(plain), data), options.rounds)
    print(f"training step, ACE / upstream:               {ratio:.4f}")
    features = torch.randn(options.molecules * options.atoms, 64, requires_grad=True)
    branches = trainer(Bare(), (features, data[1]))
    seconds = in_turns(branches, trainer(copy.deepcopy(plain), data), options.rounds)
    floor = 1 + statistics.median(bare / upstream for bare, upstream in seconds)
    print(f"the same, if only branches cost anything:    {floor:.4f}")
    landed = attach(copy.deepcopy(plain), mode="strict", budget=40, trace=False)
    step = trainer(landed, data)
    beside = trainer(copy.deepcopy(plain), data)
    while not landed.ace.landed:
        step()
        beside()  # as far: late in training numbers are small, and sums of the smallest are slow
    ratio = interleaved(step, beside, options.rounds)
    print(f"training step, landed / upstream:            {ratio:.4f} (at most 1.01 wanted)")
    ratio = interleaved(evaluator(model, data), evaluator(plain, data), 2 * options.rounds)
    print(f"eval, strict / upstream:                     {ratio:.4f} (at most 1.01 wanted)")


if __name__ == "__main__":
    main()
