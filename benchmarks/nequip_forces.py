"""What ACE costs on NequIP with forces, as ratios: the two sides alternate in one process, so noise meets both.

python benchmarks/nequip_forces.py
"""

from __future__ import annotations

import argparse
import copy
from typing import Any

import torch
from timing import Timed, interleaved
from torch import Tensor

from ace_nequip.example import batch, small
from ace_plugins import attach


def trainer(model: Any, data: dict[str, Tensor]) -> Timed:
    """A training step on energies and forces, which goes twice through the model."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)

    def step() -> None:
        optimizer.zero_grad()
        output = model(data)
        (output["total_energy"].square().mean() + output["forces"].square().mean()).backward()
        optimizer.step()

    return step


def evaluator(model: Any, data: dict[str, Tensor]) -> Timed:
    model.eval()

    def run() -> None:
        model(data)

    return run


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
    step = trainer(copy.deepcopy(plain), data)
    ratio = interleaved(step, trainer(copy.deepcopy(plain), data), options.rounds)
    print(f"noise, upstream against itself:   {ratio:.4f}")
    for mode in ("strict", "resilient"):
        model: Any = attach(copy.deepcopy(plain), mode=mode, spectral_norm=mode == "resilient", trace=False, tell=False)
        ratio = interleaved(trainer(model, data), trainer(copy.deepcopy(plain), data), options.rounds)
        print(f"training step, {mode:9} / upstream: {ratio:.4f} (at most 1.15 wanted)")
    landed: Any = attach(copy.deepcopy(plain), mode="strict", budget=40, trace=False, tell=False)
    step, beside = trainer(landed, data), trainer(copy.deepcopy(plain), data)
    while not landed.ace.landed:
        step()
        beside()
    ratio = interleaved(step, beside, options.rounds)
    print(f"training step, landed / upstream: {ratio:.4f} (at most 1.02 wanted)")
    model = attach(copy.deepcopy(plain), mode="strict", trace=False, tell=False)
    ratio = interleaved(evaluator(model, data), evaluator(plain, data), options.rounds)
    print(f"eval, strict / upstream:          {ratio:.4f} (at most 1.02 wanted)")


if __name__ == "__main__":
    main()
