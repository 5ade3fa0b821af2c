"""Train SchNet (PyTorch Geometric) on QM9. A plain script that does not use ACE itself.

    ace-patch run schnet --mode off -- experiments/qm9_schnet.py --target alpha --epochs 12 --molecules 3000

Prints the validation error after every epoch, and the test error of the best epoch so far. Without ``ace-patch``,
PyTorch Geometric needs pyg-lib for its neighbour search.

``--field F`` adds the energy of fixed charges in a uniform electric field along z, standardised and times F, to the
standardised target. The field breaks the symmetry under rotations, which plain SchNet has.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import l1_loss
from torch_geometric.nn import SchNet

from ace_schnet.demo import qm9, training

CHARGES = {1: 0.2, 6: -0.1, 7: -0.4, 8: -0.5, 9: -0.3}
"""Charge of an atom in the field, by atomic number, in elementary charges."""


def add_field(task: training.Task, strength: float) -> training.Task:
    """Return the task with the energy of its molecules in a field along z added to the target."""
    data = task.data
    molecule = torch.arange(len(data), device=data.z.device).repeat_interleave(data.sizes)
    charges = torch.tensor([CHARGES.get(number, 0.0) for number in range(10)], device=data.z.device)

    def total(values: Tensor) -> Tensor:
        return torch.zeros(len(data), device=data.z.device).index_add_(0, molecule, values)

    height = data.pos[:, 2] - (total(data.pos[:, 2]) / data.sizes)[molecule]
    energy = total(charges[data.z] * height)
    energy = (energy - energy[task.train].mean()) / energy[task.train].std()
    return replace(task, data=replace(data, y=data.y + strength * energy))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="alpha")
    parser.add_argument("--molecules", type=int, default=130_831)
    parser.add_argument("--epochs", type=int, default=500)
    parser.add_argument("--batch", type=int, default=100)
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--field", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    task = training.standardise(qm9.load(options.molecules, options.target, options.seed), device)
    if options.field:
        task = add_field(task, options.field)
    torch.manual_seed(options.seed)
    model = SchNet(options.width, options.width, options.layers, 50, cutoff=10.0).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=options.lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.epochs)
    best = float("inf")
    for epoch in range(1, options.epochs + 1):
        model.train()
        for chosen in task.train[torch.randperm(len(task.train), device=device)].split(options.batch):
            z, pos, batch, y = task.data.batch(chosen)
            optimizer.zero_grad()
            l1_loss(model(z, pos, batch).squeeze(-1), y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        schedule.step()
        model.eval()
        validation, test = (training.evaluate(model, task, part) for part in (task.validation, task.test))
        print(f"epoch {epoch} validation MAE {validation:.6f} now {test:.6f}", flush=True)
        if validation < best:
            best = validation
            print(f"best validation MAE {validation:.6f} its test MAE {test:.6f}", flush=True)


if __name__ == "__main__":
    main()
