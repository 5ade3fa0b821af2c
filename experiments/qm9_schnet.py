"""Train SchNet (PyTorch Geometric) on QM9. A plain script that does not use ACE itself.

    ace-patch run schnet --mode off -- experiments/qm9_schnet.py --target alpha --epochs 12 --molecules 3000

Prints the validation error after every epoch, and the test error of the best epoch so far. Without ``ace-patch``,
PyTorch Geometric needs pyg-lib for its neighbour search.

``--field F`` adds the energy of fixed charges in a uniform electric field along z, standardised and times F, to the
standardised target. The field breaks the symmetry under rotations, which plain SchNet has.
"""

from __future__ import annotations

import argparse

import torch
from torch.nn.functional import l1_loss
from torch_geometric.nn import SchNet

from ace_schnet.demo import qm9, training


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
        task = training.add_field(task, options.field)
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
