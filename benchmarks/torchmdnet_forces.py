"""Cost of ACE on TorchMD-NET, as ratios of training steps on energies and forces. The sides alternate in one process.

python benchmarks/torchmdnet_forces.py --model tensornet
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from timing import Timed, print_costs
from torch import Tensor

from ace_torchmdnet.example import ELEMENTS, molecules, small_model


def make_step(model: Any, data: tuple[Tensor, ...]) -> Timed:
    """Return a training step like that of torchmd-train."""
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
    print_costs(plain, lambda model: make_step(model, data), options.rounds)


if __name__ == "__main__":
    main()
