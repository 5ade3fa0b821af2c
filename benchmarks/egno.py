"""Cost of ACE on EGNO, as ratios to upstream; with --train, its errors on motion capture.

tox run -e bench-egno -- --checkout DIR                    the cost (without --checkout: of the miniature of the tests)
tox run -e bench-egno -- --checkout DIR --train            upstream, strict and resilient on the run data, 60 epochs

--train runs upstream's script in copies of the checkout, with its configuration except for epochs and seed.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from timing import evaluation, measure_ratio, training_step

from ace_egno import example
from ace_plugins import attach, read_trace
from ace_plugins.plugins.registry import registry
from ace_plugins.testing.kit import make_importable

MINIATURE = Path(__file__).parents[1] / "tests" / "upstreams" / "egno"
RUNS = {
    "upstream": ["--mode=off"],
    "strict": ["--mode=strict"],
    "resilient": ["--mode=resilient"],
    "paper": ["--preset=paper"],
}
"""Options of `ace-patch egno`."""


def print_cost(rounds: int, threads: int) -> None:
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    plain = example.mocap_model()
    args, kwargs = example.mocap_batch(12, joints=31)
    print(f"EGNO of the paper's motion capture runs, 12 skeletons of 31 joints, {rounds} rounds, {threads} threads")
    for mode in ("resilient", "strict"):
        model = attach(copy.deepcopy(plain), "egno", preset="paper", mode=mode, trace=False)
        sides = (training_step(m, args, kwargs) for m in (model, copy.deepcopy(plain)))
        print(f"training step, {mode:9} / upstream:  {measure_ratio(*sides, rounds):.3f}")
    for mode in ("resilient", "strict"):
        model = attach(copy.deepcopy(plain), "egno", preset="paper", mode=mode, trace=False)
        sides = (evaluation(m, args, kwargs) for m in (model, copy.deepcopy(plain)))
        print(f"eval, {mode:9} / upstream:           {measure_ratio(*sides, rounds):.3f}")


def train_once(checkout: Path, folder: Path, name: str, seed: int, epochs: int, steps: int) -> dict[str, Any]:
    """Run upstream's script once, in a copy of the checkout, and return its errors."""
    root = folder / f"{name}-{seed}"
    shutil.copytree(checkout, root, ignore=shutil.ignore_patterns(".git", "__pycache__"))
    patch = [*RUNS[name], f"--error-every={steps // 8}"]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("ACE_")}
    run([sys.executable, "-m", "ace_plugins", "egno", *patch], root, environment)
    settings = json.loads((root / "configs" / "config_mocap_no.json").read_text())
    # One more epoch, since upstream evaluates after epochs 0, 5, 10, ...
    settings |= {"epochs": epochs + 1, "seed": seed, "case": "run"}
    (root / "bench.json").write_text(json.dumps(settings))
    script = [sys.executable, "main_mocap_no.py", "--config_by_file", "bench.json", "--outf", "out"]
    run(script, root, {**environment, "OMP_NUM_THREADS": "1"})
    found = json.loads((root / "out" / settings["exp_name"] / "loss.json").read_text())
    best = min(range(len(found["val loss"])), key=found["val loss"].__getitem__)
    runs = list((root / ".ace" / "runs").iterdir()) if name != "upstream" else []
    errors = [line["error"]["relative"] for each in runs for line in read_trace(each) if "error" in line]
    return {
        "val": found["val loss"][best],
        "test": found["test loss"][best],
        "epoch": found["eval epoch"][best],
        "last val": found["val loss"][-1],
        "errors": errors,
    }


def run(command: list[str], folder: Path, environment: dict[str, str]) -> None:
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command[1:])} failed:\n{done.stderr[-2000:]}")


def train(checkout: Path, names: list[str], epochs: int, seeds: list[int], processes: int) -> None:
    data = checkout / "motion" / "dataset" / "motion_run.pkl"
    if not data.is_file():
        sys.exit(f"{data}: not found; expected the run data of upstream's repository")
    steps = 16 * epochs  # 200 samples in batches of 12, the last one dropped
    with tempfile.TemporaryDirectory() as made, ThreadPoolExecutor(processes) as pool:
        jobs = {
            (name, seed): pool.submit(train_once, checkout, Path(made), name, seed, epochs, steps)
            for seed in seeds
            for name in names
        }
        found = {key: job.result() for key, job in jobs.items()}
    print(f"CMU motion capture, subject 9, run: {epochs} epochs ({steps:,} steps), MSE of the deployed model")
    head = f"{'':10} {'seed':>4} {'best val':>9} {'its test':>9} {'epoch':>6} {'last val':>9}"
    print(f"{head}  equivariance error, relative")
    for (name, seed), outcome in found.items():
        errors = " ".join(f"{error:.2g}" for error in outcome["errors"])
        numbers = f"{outcome['val']:9.3f} {outcome['test']:9.3f} {outcome['epoch']:6d} {outcome['last val']:9.3f}"
        print(f"{name:10} {seed:4d} {numbers}  {errors}")
    tests = {name: [found[name, seed]["test"] for seed in seeds] for name in names}
    for name in names[1:]:
        better = sum(ours < theirs for ours, theirs in zip(tests[name], tests["upstream"], strict=True))
        ratio = statistics.mean(tests[name]) / statistics.mean(tests["upstream"])
        print(
            f"{name}: mean test MSE {statistics.mean(tests[name]):.3f}, {ratio:.2f} times upstream's "
            f"{statistics.mean(tests['upstream']):.3f}; lower in {better} of {len(seeds)} seeds"
        )
    if len(seeds) < 3:
        print("Few seeds: the differences may be chance.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkout", type=Path, help="folder of the real upstream")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--train", action="store_true", help="train upstream, strict and resilient on the run data")
    parser.add_argument(
        "--runs", nargs="+", choices=list(RUNS), default=["strict", "resilient"], help="in addition to upstream"
    )
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--processes", type=int, default=2, help="concurrent runs, each on one thread")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.train:
        if options.checkout is None:
            parser.error("--train needs --checkout, which has the data")
        names = ["upstream", *(name for name in options.runs if name != "upstream")]
        train(options.checkout.resolve(), names, options.epochs, options.seeds, options.processes)
        return
    make_importable(registry().adapter("egno"), options.checkout or MINIATURE)
    print_cost(options.rounds, options.threads)


if __name__ == "__main__":
    main()
