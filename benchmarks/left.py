"""Measure how often `symmetry_left` is right, with models trained on synthetic data of known symmetry.

    python benchmarks/left.py --seeds 10

The point clouds of tests/clouds.py are symmetric under O(3). A function added to the target reduces the symmetry to the
rotations about a random axis (and the mirrors that contain it), to one mirror in a random plane, or to nothing. Clouds
that are symmetric under E(3) get gravity and a floor, perpendicular to a random axis. C4Net turns images of squares
into rectangles, which leaves half turns. An answer is right if it names these subgroups and no others, with an axis
within 5 degrees.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from clouds import CloudAdapter, break_symmetry, start
from torch import nn

from ace_c4.demo import training as c4
from ace_plugins import symmetry_left
from ace_plugins.plugins.registry import registry
from ace_plugins.symmetry.left import SymmetryLeft
from ace_plugins.symmetry.subgroups import angle_between

C4_EPOCHS = 30
NAMES = {
    "none": [],
    "axis": ["rotations about", "reflections in planes that contain it"],
    "mirror": ["the reflection in the plane"],
    "nothing": [],
    "floor": ["rotations about", "reflections in planes that contain it", "translations perpendicular to it"],
    "rectangle": ["rotations by 180 degrees"],
}


def is_right(left: SymmetryLeft, kind: str, axis: list[float]) -> bool:
    """Return whether the answer names the subgroups under which the data are symmetric, and no others."""
    kept = left.kept
    named = len(kept) == len(NAMES[kind]) and all(map(str.startswith, [each.name for each in kept], NAMES[kind]))
    whole = (not left.subgroups) == (kind == "none")
    return named and whole and all(angle_between(each.axis, axis) < 5 for each in kept if each.axis)


def train(kind: str, seed: int, samples: int, mode: str) -> tuple[nn.Module, list[Any], list[float]]:
    """Return a model trained on data of this kind, batches of the test set, and the true axis."""
    if kind == "rectangle":
        image = c4.start(mode, {"mode": mode}, "rectangle", C4_EPOCHS, seed)
        list(c4.train([image], C4_EPOCHS))
        return image.model, [(x,) for x in image.data.test.inputs.split(8)], []
    run = start(samples, 0.0, seed, 1000, centred=kind == "floor", mode=mode)
    run.task, axis = break_symmetry(run.task, kind, seed)
    run.train()
    return run.model, [(x,) for x in run.task.x_test[:512].split(64)], axis.tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first", type=int, default=100, help="first seed")
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--mode", default="auto")
    parser.add_argument("--only", nargs="*", choices=NAMES, help="kinds of data; default: all")
    options = parser.parse_args()
    torch.set_num_threads(1)
    registry().add(CloudAdapter(), "cloud")
    print("| data keep | right | largest angle to the true axis | seconds per answer |\n|---|---|---|---|")
    for kind in options.only or NAMES:
        right, angles, seconds = 0, [0.0], 0.0
        for seed in range(options.first, options.first + options.seeds):
            model, batches, axis = train(kind, seed, options.samples, options.mode)
            begun = time.process_time()
            left = symmetry_left(model, batches)
            seconds += time.process_time() - begun
            good = is_right(left, kind, axis)
            right += good
            angles += [angle_between(each.axis, axis) for each in left.kept if each.axis]
            if not good:
                print(f"seed {seed}, {kind}: {left.sentence}", file=sys.stderr)
        row = [kind, f"{right} of {options.seeds}", f"{max(angles):.1f} degrees" if max(angles) else ""]
        print(f"| {' | '.join([*row, f'{seconds / options.seeds:.1f}'])} |", flush=True)


if __name__ == "__main__":
    main()
