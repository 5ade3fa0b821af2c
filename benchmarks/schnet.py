"""Cost of ACE on SchNet, as ratios to upstream. The two sides alternate in one process.

tox run -e bench
"""

from __future__ import annotations

import argparse
import copy
import statistics
from typing import Any

import torch
from timing import (
    Timed,
    evaluation,
    land,
    measure_dual_loop,
    measure_in_turns,
    measure_ratio,
    training_step,
    without_dual_loop,
)
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ace_plugins import attach
from ace_schnet.example import paper_model


def make_batch(molecules: int, atoms: int) -> tuple[Tensor, Tensor, Tensor]:
    z = torch.tensor([1, 6, 7, 8, 9])[torch.randint(5, (molecules * atoms,))]
    return z, 2 * torch.randn(molecules * atoms, 3), torch.arange(molecules).repeat_interleave(atoms)


class Bare(nn.Module):
    """The paper's branches alone, without upstream, hooks or dual variables: a lower bound of the cost of ACE."""

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


class Operators(TorchDispatchMode):
    """Counts the operators that torch calls."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return function(*args, **(kwargs or {}))


def print_modes(plain: nn.Module, data: tuple[Tensor, ...], rounds: int) -> None:
    """Print the time of a training step while all branches are there, and its number of operators."""

    def make_step(model: Any) -> Timed:
        # One call updates all parameters, as on a GPU.
        step = training_step(model, data, optimizer=torch.optim.Adam(model.parameters(), lr=1e-4, foreach=True))
        for _ in range(40):  # mode auto measures the branches in every second of the first 32 steps
            step()
        return step

    upstream = make_step(copy.deepcopy(plain))
    with Operators() as operators:
        upstream()
    print(f"operators of a training step, upstream:      {operators.count:6}")
    for mode in ("strict", "resilient", "auto"):
        step = make_step(attach(copy.deepcopy(plain), mode=mode, budget=1_000_000, trace=False))
        with Operators() as operators:
            step()
        ratio = measure_ratio(step, upstream, rounds)
        print(f"training step, {mode:9} / upstream:         {ratio:.4f}, {operators.count} operators")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--molecules", type=int, default=32)
    parser.add_argument("--atoms", type=int, default=18)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    data = make_batch(options.molecules, options.atoms)
    plain = paper_model()
    print(f"SchNet 64/64/6/50, {options.molecules} molecules of {options.atoms} atoms, {options.rounds} rounds")
    for dual, mode in (("sgd", "strict"), ("adam", "strict"), ("adam", "resilient")):
        model: Any = attach(copy.deepcopy(plain), preset="paper", mode=mode, dual_optimizer=dual, trace=False)
        share = measure_dual_loop(training_step(model, data), options.rounds // 2)
        print(f"dual loop, {mode:9} {dual:4}: {share:7.2%} of a training step (goal: at most 1 %)")
    model = attach(copy.deepcopy(plain), preset="paper", trace=False)
    step = training_step(model, data)
    ratio = measure_ratio(step, lambda: step(), options.rounds)
    print(f"noise, training step / training step:        {ratio:.4f}")
    ratio = measure_ratio(step, without_dual_loop(step), options.rounds)
    print(f"training step, with / without the dual loop: {ratio:.4f}")
    ratio = measure_ratio(step, training_step(copy.deepcopy(plain), data), options.rounds)
    print(f"training step, ACE / upstream:               {ratio:.4f}")
    features = torch.randn(options.molecules * options.atoms, 64, requires_grad=True)
    branches = training_step(Bare(), (features, data[1]))
    seconds = measure_in_turns(branches, training_step(copy.deepcopy(plain), data), options.rounds)
    floor = 1 + statistics.median(bare / upstream for bare, upstream in seconds)
    print(f"the same, if only the branches had a cost:   {floor:.4f}")
    landed = attach(copy.deepcopy(plain), mode="strict", budget=40, trace=False)
    step, other = training_step(landed, data), training_step(copy.deepcopy(plain), data)
    land(landed, step, other)
    ratio = measure_ratio(step, other, options.rounds)
    print(f"training step, landed / upstream:            {ratio:.4f} (goal: at most 1.01)")
    print_modes(plain, data, options.rounds)
    ratio = measure_ratio(evaluation(model, data), evaluation(plain, data), 2 * options.rounds)
    print(f"eval, strict / upstream:                     {ratio:.4f} (goal: at most 1.01)")


if __name__ == "__main__":
    main()
