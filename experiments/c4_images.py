"""Train a C4-equivariant network to turn a square into another shape. A plain script that does not use ACE itself.

    ace-patch compare c4 --metric 'test=its test error {number}' -- experiments/c4_images.py --target rectangle

Prints the validation error after every epoch, and the test error of the best epoch so far. A square keeps the symmetry
under quarter turns. A rectangle and the asymmetric shape break it.
"""

from __future__ import annotations

import argparse

import torch
from torch.nn.functional import mse_loss

from ace_c4.demo.shapes import TARGETS, draw
from ace_c4.net import C4Net


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", choices=TARGETS, default="square")
    parser.add_argument("--images", type=int, default=256)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    train, validation, test = (
        draw(count, options.target, 3 * options.seed + part) for part, count in enumerate((options.images, 256, 256))
    )
    torch.manual_seed(options.seed)
    model = C4Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=options.lr)
    steps = options.epochs * -(-options.images // options.batch)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    best = float("inf")
    for epoch in range(options.epochs):
        model.train()
        for chosen in torch.randperm(len(train)).split(options.batch):
            loss = mse_loss(model(train.inputs[chosen]), train.targets[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        model.eval()
        with torch.no_grad():
            now, tested = (float(mse_loss(model(part.inputs), part.targets)) for part in (validation, test))
        if now < best:
            best, chosen_test = now, tested
        print(f"epoch {epoch + 1}: now {now:.6f}, best validation error {best:.6f}, its test error {chosen_test:.6f}")


if __name__ == "__main__":
    main()
