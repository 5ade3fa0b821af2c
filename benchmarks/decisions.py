"""Measure how often mode auto decides wrongly, on synthetic data that are known to be symmetric or broken.

    python benchmarks/decisions.py --seeds 20

A false alarm is a run on symmetric data that keeps a branch. A miss is a run on broken data in which resilient mode
lowers upstream's error by 10 % or more, and auto keeps no branch. The last columns are geometric means of test errors.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from clouds import CloudAdapter, start

from ace_plugins.plugins.registry import registry

TASKS = {
    "symmetric, 200 samples": (200, 0.0),
    "symmetric, 2,000 samples": (2000, 0.0),
    "weakly broken, 2,000 samples": (2000, 0.1),
    "weakly broken, 200 samples": (200, 0.1),
    "strongly broken, 200 samples": (200, 1.0),
    "strongly broken, 2,000 samples": (2000, 1.0),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--first", type=int, default=100, help="first seed")
    parser.add_argument("--steps", type=int, default=1000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    registry().add(CloudAdapter(), "cloud")
    print("| task | runs that keep a branch | false alarms | misses | auto / upstream | resilient / upstream |")
    print("|---|---|---|---|---|---|")
    for title, (samples, strength) in TASKS.items():
        kept = misses = 0
        ratios: dict[str, list[float]] = {"auto": [], "resilient": []}
        for seed in range(options.first, options.first + options.seeds):
            plain = start(samples, strength, seed, options.steps).train().test()
            for mode, found in ratios.items():
                run = start(samples, strength, seed, options.steps, mode=mode).train()
                found.append(run.test() / plain)
                if mode == "auto":
                    keeps = bool(run.model.ace.duals.evidence.kept_sites)
            kept += keeps
            misses += bool(strength) and not keeps and ratios["resilient"][-1] <= 0.9
        means = [math.exp(sum(map(math.log, found)) / len(found)) for found in ratios.values()]
        alarms = "" if strength else f"{kept} of {options.seeds}"
        missed = f"{misses} of {options.seeds}" if strength else ""
        line = [title, f"{kept} of {options.seeds}", alarms, missed, *(f"{mean:.3f}" for mean in means)]
        print(f"| {' | '.join(line)} |", flush=True)


if __name__ == "__main__":
    main()
