"""Cost of ACE on MACE, as ratios of training steps on energies and forces. The two sides alternate in one process.

python benchmarks/mace_torch.py        (not named mace.py, which would hide the package)
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from timing import Timed, make_pairs, print_costs
from torch import Tensor

from ace_mace.example import small_model


def make_molecules(count: int, atoms: int, r_max: float) -> dict[str, Tensor]:
    """Return random molecules in the format of MACE's forward, each in a large box."""
    positions, graph, sender, receiver = make_pairs(count, atoms, r_max)
    return {
        "positions": positions,
        "node_attrs": torch.nn.functional.one_hot(torch.randint(3, (len(positions),)), 3).to(positions.dtype),
        "edge_index": torch.stack([sender, receiver]),
        "shifts": torch.zeros(len(sender), 3),
        "unit_shifts": torch.zeros(len(sender), 3),
        "cell": 50 * torch.eye(3).repeat(count, 1),
        "batch": graph,
        "ptr": atoms * torch.arange(count + 1),
    }


def make_step(model: Any, data: dict[str, Tensor]) -> Timed:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, amsgrad=True)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        output = model(dict(data), training=True)
        (output["energy"].square().mean() + 100 * output["forces"].square().mean()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=10.0)
        optimizer.step()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--molecules", type=int, default=5)
    parser.add_argument("--atoms", type=int, default=15)
    parser.add_argument("--hidden", default="16x0e + 16x1o")
    parser.add_argument("--max-ell", type=int, default=2)
    parser.add_argument("--correlation", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    sizes = {"max_ell": options.max_ell, "correlation": options.correlation, "r_max": 4.0, "radial_MLP": [64, 64, 64]}
    plain = small_model(hidden=options.hidden, num_bessel=6, **sizes)
    data = make_molecules(options.molecules, options.atoms, 4.0)
    about = f"{len(data['batch'])} atoms, {data['edge_index'].shape[1]} edges, {options.rounds} rounds"
    print(f"MACE {options.hidden}, l <= {options.max_ell}, {about}")
    print_costs(plain, lambda model: make_step(model, data), options.rounds)


if __name__ == "__main__":
    main()
