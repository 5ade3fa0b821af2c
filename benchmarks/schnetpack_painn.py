"""What ACE costs on PaiNN of SchNetPack, as ratios: a training step on energies and forces, the two sides in turns in
one process.

python benchmarks/schnetpack_painn.py
"""

from __future__ import annotations

import argparse
import copy
from typing import Any

import torch
from timing import Timed, interleaved
from torch import Tensor

from ace_plugins import attach, patched
from ace_schnetpack.example import small_model


def molecules(count: int, atoms: int, cutoff: float) -> dict[str, Tensor]:
    """As SchNetPack's loader gives them: atoms at random, as far apart as in a molecule."""
    corners = torch.cartesian_prod(*[torch.arange(3)] * 3)[:atoms]
    positions = 1.3 * corners.repeat(count, 1) + 0.15 * torch.randn(count * atoms, 3)
    graph = torch.arange(count).repeat_interleave(atoms)
    near = (positions[:, None] - positions).norm(dim=-1) < cutoff
    others = ~torch.eye(len(positions), dtype=torch.bool)
    center, neighbour = torch.nonzero((graph[:, None] == graph) & near & others, as_tuple=True)
    return {
        "_positions": positions,
        "_atomic_numbers": torch.tensor([1, 6, 8])[torch.randint(3, (len(positions),))],
        "_idx_i": center,
        "_idx_j": neighbour,
        "_offsets": torch.zeros(len(center), 3),
        "_cell": torch.zeros(count, 3, 3),
        "_idx_m": graph,
        "_n_atoms": torch.full((count,), atoms),
    }


def trainer(model: Any, data: dict[str, Tensor]) -> Timed:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        output = model({name: value.detach() for name, value in data.items()})
        (0.01 * output["energy"].square().mean() + 0.99 * output["forces"].square().mean()).backward()
        optimizer.step()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--molecules", type=int, default=10)
    parser.add_argument("--atoms", type=int, default=15)
    parser.add_argument("--features", type=int, default=64)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--cutoff", type=float, default=5.0)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    patched("schnetpack").undo()  # for the repairs that SchNetPack needs to be imported
    torch.manual_seed(0)
    data = molecules(options.molecules, options.atoms, options.cutoff)
    sizes = {"n_atom_basis": options.features, "n_interactions": options.layers}
    from schnetpack.nn import CosineCutoff, GaussianRBF

    radial = {"radial_basis": GaussianRBF(20, options.cutoff), "cutoff_fn": CosineCutoff(options.cutoff)}
    plain = small_model(stress=False, **sizes, **radial)
    about = f"{len(data['_idx_m'])} atoms, {len(data['_idx_i'])} pairs, {options.rounds} rounds"
    print(f"PaiNN, {options.layers} layers of {options.features} features, {about}")

    def beside() -> Timed:
        return trainer(copy.deepcopy(plain), data)

    for mode, frames in (("strict", "auto"), ("strict", "off"), ("resilient", "auto")):
        settings: dict[str, Any] = {"mode": mode, "frames": frames, "budget": 100_000, "trace": False}
        model: Any = attach(copy.deepcopy(plain), **settings)
        ratio = interleaved(trainer(model, data), beside(), options.rounds)
        told = f"{mode}, frames {'on' if model.ace.action else 'off'}"
        print(f"training step, ACE / upstream, {told:22}: {ratio:.4f} (at most 1.15 wanted)", flush=True)
    landed: Any = attach(copy.deepcopy(plain), mode="strict", budget=40, trace=False)
    step, other = trainer(landed, data), beside()
    while not landed.ace.landed:
        step()
        other()  # as far: late in training numbers are small, and sums of the smallest are slow
    ratio = interleaved(step, other, options.rounds)
    print(f"training step, landed / upstream                       : {ratio:.4f} (at most 1.02 wanted)")


if __name__ == "__main__":
    main()
