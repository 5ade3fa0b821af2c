"""What the benchmarks of force fields share: molecules to train on, and the ratios that are told."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from timing import Timed, interleaved
from torch import Tensor

from ace_plugins import attach

COMPILING = 5
"""Steps of a side that are not counted: kernels are loaded and TorchScript compiles in the first ones."""


def atoms_and_pairs(count: int, atoms: int, cutoff: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Positions, molecules, and both ends of every pair: atoms at random, as far apart as in a molecule."""
    corners = torch.cartesian_prod(*[torch.arange(3)] * 3)[:atoms]
    positions = 1.3 * corners.repeat(count, 1) + 0.15 * torch.randn(count * atoms, 3)
    graph = torch.arange(count).repeat_interleave(atoms)
    near = (positions[:, None] - positions).norm(dim=-1) < cutoff
    others = ~torch.eye(len(positions), dtype=torch.bool)
    sender, receiver = torch.nonzero((graph[:, None] == graph) & near & others, as_tuple=True)
    return positions, graph, sender, receiver


def tell_costs(plain: Any, trainer: Callable[[Any], Timed], rounds: int) -> None:
    """A training step with ACE beside upstream's, in three settings and once landed."""

    def ratio(step: Timed, other: Timed) -> float:
        for side in (step, other):
            for _ in range(COMPILING):
                side()
        return interleaved(step, other, rounds)

    def beside() -> Timed:
        return trainer(copy.deepcopy(plain))

    print(f"noise, upstream / itself                               : {ratio(beside(), beside()):.4f}", flush=True)
    for mode, frames in (("strict", "auto"), ("strict", "off"), ("resilient", "auto")):
        settings: dict[str, Any] = {"mode": mode, "frames": frames, "budget": 100_000, "trace": False, "tell": False}
        model: Any = attach(copy.deepcopy(plain), **settings)
        found = ratio(trainer(model), beside())
        told = f"{mode}, frames {'on' if model.ace.action else 'off'}"
        print(f"training step, ACE / upstream, {told:22}: {found:.4f} (at most 1.15 wanted)", flush=True)
    landed: Any = attach(copy.deepcopy(plain), mode="strict", budget=40, trace=False, tell=False)
    step, other = trainer(landed), beside()
    while not landed.ace.landed:
        step()
        other()  # as far: late in training numbers are small, and sums of the smallest are slow
    print(f"training step, landed / upstream                       : {ratio(step, other):.4f} (at most 1.02 wanted)")
