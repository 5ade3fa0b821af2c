"""What ACE costs on TorchMD-NET with forces, as ratios: the two sides alternate in one process, so noise meets both.

python benchmarks/torchmdnet_forces.py --model tensornet
"""

from __future__ import annotations

import argparse
import copy
from typing import Any

import torch
from timing import Timed, interleaved
from torch import Tensor

from ace_plugins import attach
from ace_torchmdnet.example import ELEMENTS, molecules, small_model


def trainer(model: Any, data: tuple[Tensor, ...]) -> Timed:
    """A training step on energies and forces, as torchmd-train makes it."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        energy, forces = model(data[0], data[1].clone(), data[2])
        (energy.square().mean() + 10 * forces.square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="equivariant-transformer")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--molecules", type=int, default=5)
    parser.add_argument("--atoms", type=int, default=15)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--channels", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    sizes = {"num_layers": options.layers, "embedding_dimension": options.channels, "num_rbf": 32, "num_heads": 8}
    plain = small_model(options.model, **sizes)
    data = molecules(ELEMENTS, torch.float32, count=options.molecules, atoms=options.atoms)
    print(f"{options.model} {sizes}, {options.molecules} molecules of {options.atoms} atoms, {options.rounds} rounds")

    def beside() -> Timed:
        return trainer(copy.deepcopy(plain), data)

    def warm(*sides: Timed) -> None:
        for side in sides:
            for _ in range(5):  # kernels are loaded in the first ones
                side()

    step, other = beside(), beside()
    warm(step, other)
    print(f"noise, upstream / itself:                  {interleaved(step, other, options.rounds):.4f}", flush=True)
    for mode, frames in (("strict", "auto"), ("strict", "off"), ("resilient", "auto")):
        settings: dict[str, Any] = {"mode": mode, "frames": frames, "budget": 100_000, "trace": False, "tell": False}
        model: Any = attach(copy.deepcopy(plain), spectral_norm=mode == "resilient", **settings)
        step, other = trainer(model, data), beside()
        warm(step, other)
        ratio = interleaved(step, other, options.rounds)
        told = f"{mode}, frames {'on' if model.ace.action else 'off'}"
        print(f"training step, {told:21} / upstream: {ratio:.4f} (at most 1.15 wanted)", flush=True)
    landed: Any = attach(copy.deepcopy(plain), mode="strict", budget=40, trace=False, tell=False)
    step, other = trainer(landed, data), beside()
    while not landed.ace.landed:
        step()
        other()  # as far: late in training numbers are small, and sums of the smallest are slow
    warm(step, other)
    ratio = interleaved(step, other, options.rounds)
    print(f"training step, landed                / upstream: {ratio:.4f} (at most 1.02 wanted)")


if __name__ == "__main__":
    main()
