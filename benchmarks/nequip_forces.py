"""Cost of ACE on NequIP, as ratios of training steps on energies and forces. The two sides alternate in one process.

python benchmarks/nequip_forces.py
"""

from __future__ import annotations

import argparse
import copy
from typing import Any

import torch
from timing import Timed, measure_ratio, print_costs
from torch import Tensor

from ace_nequip.example import batch, small
from ace_plugins import attach


def make_step(model: Any, data: dict[str, Tensor]) -> Timed:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)

    def step() -> None:
        optimizer.zero_grad()
        output = model(data)
        (output["total_energy"].square().mean() + output["forces"].square().mean()).backward()
        optimizer.step()

    return step


def make_evaluation(model: Any, data: dict[str, Tensor]) -> Timed:
    model.eval()  # forces need gradients, so not under no_grad
    return lambda: model(data) and None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--molecules", type=int, default=5)
    parser.add_argument("--atoms", type=int, default=15)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--features", type=int, default=16)
    parser.add_argument("--l-max", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    sizes = {"num_layers": options.layers, "num_features": options.features, "l_max": options.l_max}
    plain = small(model_dtype="float32", parity=False, radial_mlp_width=32, **sizes)
    made = torch.Generator().manual_seed(0)
    data = batch(made, molecules=options.molecules, atoms=options.atoms, within=3.5)
    edges = data["edge_index"].shape[1]
    print(f"NequIP {sizes}, {options.molecules} molecules of {options.atoms} atoms, {edges} edges")
    print_costs(plain, lambda model: make_step(model, data), options.rounds, spectral_norm=True)
    model: Any = attach(copy.deepcopy(plain), mode="strict", trace=False, tell=False)
    ratio = measure_ratio(make_evaluation(model, data), make_evaluation(plain, data), options.rounds)
    print(f"eval, strict / upstream                                : {ratio:.4f} (goal: at most 1.02)")


if __name__ == "__main__":
    main()
