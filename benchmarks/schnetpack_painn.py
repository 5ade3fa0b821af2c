"""Cost of ACE on PaiNN of SchNetPack, as ratios of training steps on energies and forces.

The two sides alternate in one process.

python benchmarks/schnetpack_painn.py
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from timing import Timed, make_pairs, print_costs
from torch import Tensor

from ace_plugins import patched
from ace_schnetpack.example import small_model


def make_molecules(count: int, atoms: int, cutoff: float) -> dict[str, Tensor]:
    """Return random molecules in the format of SchNetPack's data loader."""
    positions, graph, center, neighbour = make_pairs(count, atoms, cutoff)
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


def make_step(model: Any, data: dict[str, Tensor]) -> Timed:
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
    patched("schnetpack").undo()  # applies the shims that make SchNetPack importable
    torch.manual_seed(0)
    data = make_molecules(options.molecules, options.atoms, options.cutoff)
    sizes = {"n_atom_basis": options.features, "n_interactions": options.layers}
    from schnetpack.nn import CosineCutoff, GaussianRBF

    radial = {"radial_basis": GaussianRBF(20, options.cutoff), "cutoff_fn": CosineCutoff(options.cutoff)}
    plain = small_model(stress=False, **sizes, **radial)
    about = f"{len(data['_idx_m'])} atoms, {len(data['_idx_i'])} pairs, {options.rounds} rounds"
    print(f"PaiNN, {options.layers} layers of {options.features} features, {about}")
    print_costs(plain, lambda model: make_step(model, data), options.rounds)


if __name__ == "__main__":
    main()
