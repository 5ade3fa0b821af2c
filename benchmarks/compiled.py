"""Cost of ACE under torch.compile, as ratios of training steps. Both sides are compiled and alternate in one process.

python benchmarks/compiled.py        (with the miniatures of the tests, unless --segnn DIR and --egno DIR are given)

Measures a strict run in the paced loop before and after landing. The first steps of each side compile it, which takes
a minute or two; they are not measured.
"""

from __future__ import annotations

import argparse
import copy
import warnings
from pathlib import Path
from typing import Any

import torch
from schnet import make_batch
from timing import measure_ratio, training_step
from torch._dynamo.utils import counters

from ace_egno.example import mocap_batch, mocap_model
from ace_plugins import attach, status
from ace_plugins.plugins.registry import registry
from ace_plugins.testing.kit import make_importable
from ace_schnet.example import paper_model
from ace_segnn.example import nbody_batch, nbody_model

TESTS = Path(__file__).parents[1] / "tests" / "upstreams"
WARM_UP = 12
"""Steps in which a side is compiled: dynamo compiles again when shapes or rates turn out to vary."""


def make_task(name: str) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Return the paper's model, and the forward arguments for a batch of the paper's size."""
    torch.manual_seed(0)
    if name == "schnet":
        return paper_model(), make_batch(32, 18), {}
    if name == "segnn":
        return nbody_model(), (nbody_batch(100),), {}
    args, kwargs = mocap_batch(12, joints=31)
    return mocap_model(), args, kwargs


def print_ratios(name: str, rounds: int, backend: str, checkout: Path | None) -> None:
    make_importable(registry().adapter(name), checkout)
    plain, args, kwargs = make_task(name)
    relaxed = attach(copy.deepcopy(plain), name, mode="strict", budget=10**9, trace=False)
    landed = attach(copy.deepcopy(plain), name, mode="strict", budget=60, trace=False)
    step = training_step(landed, args, kwargs)
    while not status(landed).landed:
        step()
    steps = {}
    for side, model in (("upstream", plain), ("with branches", relaxed), ("landed", landed)):
        counters.clear()
        steps[side] = training_step(torch.compile(model, backend=backend), args, kwargs)
        for _ in range(WARM_UP):
            steps[side]()
        graphs, breaks = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
        print(f"{name:8} {side:14} graphs {graphs}, breaks {breaks}", flush=True)
    for side in ("with branches", "landed"):
        found = measure_ratio(steps[side], steps["upstream"], rounds)
        print(f"{name:8} {side:14} compiled / compiled upstream: {found:.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=["schnet", "segnn", "egno"])
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--segnn", type=Path, default=TESTS / "segnn")
    parser.add_argument("--egno", type=Path, default=TESTS / "egno")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch._dynamo.config.recompile_limit = 64  # three models of one class
    warnings.simplefilter("ignore")
    for name in options.names:
        print_ratios(name, options.rounds, options.backend, getattr(options, name, None))


if __name__ == "__main__":
    main()
