"""Cost of ACE on SEGNN, as ratios to upstream, and of the import line at the start of a script. The sides alternate.

tox run -e bench-segnn -- --checkout DIR        (without --checkout: the miniature of the tests)
"""

from __future__ import annotations

import argparse
import copy
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import numpy as np
import torch
from timing import Timed, evaluation, measure_in_turns, measure_ratio, training_step

from ace_plugins import attach
from ace_plugins.plugins.registry import registry
from ace_plugins.testing.kit import make_importable
from ace_segnn.data import nbody
from ace_segnn.example import nbody_batch, nbody_model

MINIATURE = Path(__file__).parents[1] / "tests" / "upstreams" / "segnn"


def make_script(folder: Path, name: str, source: str) -> Timed:
    (folder / name).write_text(source)
    return lambda: subprocess.run([sys.executable, name], cwd=folder, check=True) and None


def measure_start(rounds: int) -> None:
    """Print what the import line adds to an empty script, and to one that imports torch."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        (folder / "ace.toml").write_text('adapter = "segnn"\n')
        for what, body, turns in (("an empty script", "", rounds), ("import torch", "import torch\n", rounds // 4)):
            line = make_script(folder, "marked.py", f"import ace_plugins.activate\n{body}")
            times = measure_in_turns(line, make_script(folder, "plain.py", body), turns, time.perf_counter)
            added = statistics.median(1000 * (one - two) for one, two in times)
            ratio = statistics.median(one / two for one, two in times)
            print(f"start of {what:16} patched / plain: {ratio:.3f} ({added:+.0f} ms)")


def measure_generator(checkout: Path) -> None:
    """Print how much faster our N-body generator is than upstream's."""
    code = "import sys; sys.path.insert(0, sys.argv[1]); from synthetic_sim import ChargedParticlesSim as S\n"
    code += "import numpy as np, time; s = S(noise_var=0., n_balls=5, vel_norm=.5); np.random.seed(0)\n"
    code += "t = time.perf_counter(); [s.sample_trajectory(5000, 100) for _ in range(40)]\n"
    code += "print((time.perf_counter() - t) / 40)"
    ratios = []
    for _ in range(3):
        words = [sys.executable, "-W", "ignore", "-c", code, str(checkout / "nbody" / "dataset")]
        theirs = float(subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()[-1])
        begin = time.perf_counter()
        nbody.sample(1000, np.random.RandomState(0))
        ratios.append(1000 * theirs / (time.perf_counter() - begin))
    print(f"1,000 trajectories, upstream / ours:          {statistics.median(ratios):.0f} (goal: at least 50)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkout", type=Path, help="folder of the real upstream")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--graphs", type=int, default=100)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    measure_start(2 * options.rounds)
    make_importable(registry().adapter("segnn"), options.checkout or MINIATURE)
    plain = nbody_model()
    batch = (nbody_batch(options.graphs),)
    print(f"SEGNN of the paper's N-body runs, {options.graphs} graphs, {options.rounds} rounds")
    for mode in ("strict", "resilient"):
        model = attach(copy.deepcopy(plain), preset="paper", mode=mode, trace=False)
        ratio = measure_ratio(training_step(model, batch), training_step(copy.deepcopy(plain), batch), options.rounds)
        print(f"training step, {mode:9} / upstream:           {ratio:.3f}")
    model = attach(copy.deepcopy(plain), mode="strict", trace=False)
    ratio = measure_ratio(evaluation(model, batch), evaluation(copy.deepcopy(plain), batch), options.rounds)
    print(f"eval, strict / upstream:                      {ratio:.3f}")
    if options.checkout:
        measure_generator(options.checkout)


if __name__ == "__main__":
    main()
