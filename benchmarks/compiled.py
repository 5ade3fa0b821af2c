"""What ACE costs where both sides are compiled, as ratios: a training step under torch.compile, the sides alternate.

python benchmarks/compiled.py        (the miniatures of the tests without --segnn DIR and --egno DIR)

The first steps of each side compile it, which takes a minute or two; they are not counted. A strict run in the fitted
loop, before its landing and after it, beside upstream.
"""

from __future__ import annotations

import argparse
import copy
import warnings
from pathlib import Path
from typing import Any

import torch
from timing import interleaved, trainer
from torch._dynamo.utils import counters

from ace_plugins import attach
from ace_plugins.plugins.registry import registry
from ace_plugins.testing.importable import make_importable

TESTS = Path(__file__).parents[1] / "tests" / "upstreams"
WARM_UP = 12
"""Steps in which a side is compiled: dynamo takes a second look when shapes or rates turn out to vary."""


def ratio(name: str, rounds: int, backend: str, checkout: Path | None) -> None:
    plugin = registry().adapter(name)
    make_importable(plugin, checkout)
    torch.manual_seed(0)
    example: Any = plugin.call("ace_example", seed=0, model=None)
    plain, args = example.model.train(), example.args
    relaxed = attach(copy.deepcopy(plain), name, mode="strict", budget=10**9, trace=False)
    landed = attach(copy.deepcopy(plain), name, mode="strict", budget=60, trace=False)
    quick = trainer(landed, args)
    while not landed.ace.landed:
        quick()
    steps = {}
    for side, model in (("upstream", plain), ("with branches", relaxed), ("landed", landed)):
        torch._dynamo.reset()
        counters.clear()
        steps[side] = trainer(torch.compile(model, backend=backend), args)
        for _ in range(WARM_UP):
            steps[side]()
        made = sum(counters["stats"].get(key, 0) for key in ("unique_graphs",))
        print(f"{name:8} {side:14} graphs {made}, breaks {sum(counters['graph_break'].values())}", flush=True)
    for side in ("with branches", "landed"):
        found = interleaved(steps[side], steps["upstream"], rounds)
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
    warnings.simplefilter("ignore")
    for name in options.names:
        ratio(name, options.rounds, options.backend, getattr(options, name, None))


if __name__ == "__main__":
    main()
