"""Cost of ACE on VN-DGCNN, as ratios to upstream; with --train, accuracies with missing points.

tox run -e bench-vn -- --checkout DIR                     the cost (without --checkout: of the miniature of the tests)
tox run -e bench-vn -- --checkout DIR --train             synthetic shapes, with all and with few of their points

--train runs upstream's script in copies of the checkout, on the CPU, on the shapes of `ace-patch data shapes`.
"""

from __future__ import annotations

import argparse
import copy
import os
import re
import shutil
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from timing import Timed, evaluation, measure_ratio, training_step

from ace_plugins import attach
from ace_plugins.patch.shims import REPAIRS
from ace_plugins.plugins.registry import registry
from ace_plugins.testing.kit import make_importable
from ace_vn_dgcnn.data import shapes
from ace_vn_dgcnn.example import shapes_model

MINIATURE = Path(__file__).parents[1] / "tests" / "upstreams" / "vn_dgcnn"
RUNS = {"upstream": ["--mode=off"], "strict": ["--mode=strict"]}


def print_cost(rounds: int, threads: int, clouds: int, points: int) -> None:
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    plain = shapes_model(n_knn=20)
    batch = (torch.randn(clouds, 3, points),)
    print(f"VN-DGCNN, {clouds} clouds of {points} points, 20 neighbours, {rounds} rounds, {threads} threads")
    model = attach(copy.deepcopy(plain), "vn_dgcnn", preset="paper", trace=False)
    ratio = measure_ratio(make_step(model, batch), make_step(copy.deepcopy(plain), batch), rounds)
    print(f"training step, strict / upstream:  {ratio:.3f}")
    for mode in ("strict", "bounded"):
        model = attach(copy.deepcopy(plain), "vn_dgcnn", preset="paper", mode=mode, trace=False)
        ratio = measure_ratio(evaluation(model, batch), evaluation(copy.deepcopy(plain), batch), rounds)
        print(f"eval, {mode:7} / upstream:          {ratio:.3f}")


def make_step(model: Any, batch: tuple[Any, ...]) -> Timed:
    """Return a training step with the default optimizer of upstream's script."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9, weight_decay=1e-4)
    return training_step(model, batch, optimizer=optimizer)


def train_once(checkout: Path, folder: Path, name: str, drop: float, epochs: int, points: int) -> list[float]:
    """Run upstream's script once and return its test accuracies per epoch."""
    root = folder / f"{name}-{drop}"
    shutil.copytree(checkout, root, ignore=shutil.ignore_patterns(".git", "__pycache__", "data", "log"))
    data = root / "data" / "modelnet40_normal_resampled"
    shapes.generate(data, classes=8, train=24, test=12, points=points, drop=drop)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("ACE_")} | {"OMP_NUM_THREADS": "1"}
    left = max(1, round(points * (1 - drop)))
    options = f"--model vn_dgcnn_cls --rot so3 --num_point {left} --n_knn {min(20, left)} --batch_size 8".split()
    for command in (
        ["-m", "ace_plugins", "vn_dgcnn", "--cpu", *RUNS[name]],
        ["train_cls.py", *options, "--epoch", str(epochs), "--log_dir", "bench", "--optimizer", "Adam"],
    ):
        done = subprocess.run([sys.executable, *command], cwd=root, env=environment, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return [float(found) for found in re.findall(r"^Test Instance Accuracy: ([\d.]+)", done.stdout, re.MULTILINE)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkout", type=Path, help="folder of the real upstream")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--clouds", type=int, default=8)
    parser.add_argument("--points", type=int, default=300)
    parser.add_argument("--train", action="store_true", help="train upstream and strict on shapes with missing points")
    parser.add_argument("--drops", type=float, nargs="+", default=[0.0, 0.85])
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    plugin = registry().adapter("vn_dgcnn")
    checkout = (options.checkout or MINIATURE).resolve()
    if options.train:
        print("test accuracy on rotated shapes, per epoch")
        with tempfile.TemporaryDirectory() as made:
            for drop in options.drops:
                for name in RUNS:
                    found = train_once(checkout, Path(made), name, drop, options.epochs, options.points)
                    print(f"drop {drop:4.0%} {name:9}", " ".join(f"{accuracy:.3f}" for accuracy in found))
        return
    make_importable(plugin, checkout)
    REPAIRS.apply(plugin, "cpu")
    print_cost(options.rounds, options.threads, options.clouds, options.points)


if __name__ == "__main__":
    main()
