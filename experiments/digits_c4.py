"""Train a C_4-equivariant network on scikit-learn's handwritten digits, which have an orientation.

    ace-patch compare c4 --metric 'test=its test error {number}' -- experiments/digits_c4.py

A plain script that does not use ACE itself. ``pip install scikit-learn`` brings the data: 1,797 images of 8 x 8 pixels.
A network that is invariant under quarter turns cannot distinguish an upside-down 6 from a 9. ``--turned`` turns
every image by a random number of quarter turns, so that the data have the symmetry of the network.

Prints the validation error (mean cross entropy) after every epoch, and the test error of the best epoch so far.
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import Tensor
from torch.nn.functional import cross_entropy

from ace_c4.net import C4Net


def load(turned: bool, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Return images and labels to train, validate and test on: three, one and one fifth."""
    digits = load_digits()
    random = torch.Generator().manual_seed(seed)
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    if turned:
        turns = torch.randint(4, (len(images),), generator=random).tolist()
        images = torch.stack([torch.rot90(image, turn, (1, 2)) for image, turn in zip(images, turns, strict=True)])
    order = torch.randperm(len(images), generator=random)
    fifth = len(images) // 5
    labels = torch.tensor(digits.target)
    return [(images[part], labels[part]) for part in order.split([len(images) - 2 * fifth, fifth, fifth])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--fields", type=int, default=8)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--turned", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    (images, labels), *held = load(options.turned, options.seed)
    torch.manual_seed(options.seed)
    model = C4Net(options.fields, depth=3, kernel_size=3, out=10)  # one image of scores per digit

    def score(chosen: Tensor) -> Tensor:
        scores: Tensor = model(chosen).mean((2, 3))
        return scores

    optimizer = torch.optim.Adam(model.parameters(), lr=options.lr)
    steps = options.epochs * -(-len(images) // options.batch)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    best = float("inf")
    for epoch in range(1, options.epochs + 1):
        model.train()
        for chosen in torch.randperm(len(images)).split(options.batch):
            optimizer.zero_grad()
            cross_entropy(score(images[chosen]), labels[chosen]).backward()
            optimizer.step()
            schedule.step()
        model.eval()
        with torch.no_grad():
            (answers, truth), (tested, true) = ((score(part), names) for part, names in held)
        now, test = float(cross_entropy(answers, truth)), float(cross_entropy(tested, true))
        if now < best:
            best, best_test, wrong = now, test, float((tested.argmax(1) != true).float().mean())
        print(f"epoch {epoch}: now {now:.6f}, best validation error {best:.6f} its test error {best_test:.6f}")
    print(f"share of wrong answers on the test images: {wrong:.4f}")


if __name__ == "__main__":
    main()
