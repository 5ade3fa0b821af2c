"""Long runs, kills and malformed input, many times over: ``tox run -e soak``.

Three parts, each with figures at its end (``--only`` chooses one):

- ``steps``: a small model trains with ACE and a trace. Prints the growth of the process's memory and the trace's size.
- ``kills``: a training that saves checkpoints, ``ace-patch segnn`` and ``revert`` in a clone, and a comparison are each
  killed (SIGKILL) at random times, ``--kills`` times, and continued. Their results must be bit-identical to those
  without a kill.
- ``inputs``: the property tests of tests/fuzz with ``--inputs`` random inputs.

Exits with 1 if a result differs, or if memory or the trace has grown beyond its bound.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

TESTS = Path(__file__).parents[1] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "fuzz")]

from toy import ADAPTERS, Layered  # noqa: E402

from ace_plugins import attach, project, run_comparison  # noqa: E402
from ace_plugins.checkout.patching import plan_patch, plan_revert  # noqa: E402
from ace_plugins.plugins.registry import registry  # noqa: E402
from ace_plugins.report.trace import LINES, MOST_LINES  # noqa: E402

WARM_UP = 20_000  # steps before memory is measured for the first time
GROWTH = 32  # MiB that the process may grow by after that
TRAINING, SAVED = 300, 10  # steps of the training that is killed; steps between two of its checkpoints
SCRIPT = """
import os, random
random.seed(5)
mode = os.environ["ACE_RUN"].partition('"mode": "')[2].partition('"')[0]
for epoch in range(3):
    print("test", random.random() * (0.5 if mode == "strict" else 1.0))
"""


def say(text: str) -> None:
    print(text, flush=True)


def resident() -> float:
    """Return the memory of this process in MiB: now where the system has /proc, else the largest so far."""
    with contextlib.suppress(OSError):
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def soak_steps(steps: int, folder: Path) -> bool:
    """Train for many steps; return whether memory and the trace stayed within their bounds."""
    os.environ["ACE_RUNS"] = str(folder / "runs")
    torch.manual_seed(0)
    model = attach(Layered(layers=1), "layered", mode="auto", loop="paced", budget=steps)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batch = torch.randn(32, 3)
    warm = peak = 0.0
    longest, largest = 0, 0
    begin = time.perf_counter()
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        (model(batch) - 1).square().mean().backward()
        optimizer.step()
        if step % 5_000 == 0 or step == steps:
            content = next((folder / "runs").glob(f"*/{LINES}")).read_bytes()
            longest, largest = max(longest, content.count(b"\n")), max(largest, len(content))
            del content
            warm = warm if step > WARM_UP else resident()
            peak = max(peak, resident())
        if step % 10_000 == 0:
            say(f"  {step:,} steps, {resident():.0f} MiB, trace {longest:,} lines, {time.perf_counter() - begin:.0f} s")
    project(model)
    say(
        f"steps: {steps:,}; memory {warm:.0f} MiB after {min(WARM_UP, steps):,} steps, at most {peak:.0f} MiB later "
        f"(+{peak - warm:.1f}); trace at most {longest:,} lines and {largest / 2**20:.1f} MiB"
    )
    return peak - warm <= GROWTH and longest <= MOST_LINES


def run_killed(work: Callable[[], object], after: float | None) -> bool:
    """Run ``work`` in a forked process, and kill it after this time in seconds. Return whether it ended before."""
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    until = None if after is None else time.perf_counter() + after
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            break
        if until is not None and time.perf_counter() >= until:
            os.kill(child, signal.SIGKILL)
            until = None
        time.sleep(0.0005)
    if os.WIFEXITED(status) and os.WEXITSTATUS(status):
        raise SystemExit(f"{getattr(work, '__name__', work)} failed with {status}")
    return os.WIFEXITED(status)


def soak_kills(
    name: str,
    kills: int,
    work: Callable[[Path], object],
    read: Callable[[Path], Any],
    folder: Path,
    *,
    once: bool = False,
) -> bool:
    """Kill ``work(place)`` at random times and continue it, until it was killed this often in total.

    Args:
        name: What is killed.
        kills: Number of kills.
        work: Does all that is left to do in a folder.
        read: Returns the result in a folder, compared bit by bit with that of a folder without kills.
        folder: Folder for all files.
        once: Whether ``work`` is continued without another kill, because it repeats all its work.

    Returns:
        Whether all results were the same.
    """
    begin = time.perf_counter()
    run_killed(functools.partial(work, folder / name / "whole"), None)
    duration = time.perf_counter() - begin
    expected = read(folder / name / "whole")
    made = results = equal = 0
    while made < kills:
        place = folder / name / "killed"
        while not run_killed(functools.partial(work, place), random.uniform(0, duration)):
            made += 1
            if made % 50 == 0:
                say(f"  {name}: {made} kills, {time.perf_counter() - begin:.0f} s")
            if once or made == kills:
                run_killed(functools.partial(work, place), None)
                break
        results += 1
        equal += read(place) == expected
        shutil.rmtree(place)
    say(f"kills of a {name}: {made}; {equal} of {results} results are bit-identical to the one without a kill")
    return equal == results


def train(place: Path) -> None:
    """Train from the last checkpoint in this folder on, and save one every few steps."""
    place.mkdir(parents=True, exist_ok=True)
    os.environ["ACE_RUNS"] = str(place / "runs")
    torch.manual_seed(0)
    model = attach(Layered().double(), "layered", mode="auto", loop="paced", budget=TRAINING)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    first, saved = 0, place / "checkpoint.pt"
    if saved.exists():
        first, state, moments = torch.load(saved, weights_only=True)
        model.load_state_dict(state)
        optimizer.load_state_dict(moments)
    for step in range(first, TRAINING):
        batch = torch.randn(16, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        (model(batch) - batch.sum(-1, keepdim=True)).square().mean().backward()
        optimizer.step()
        if (step + 1) % SAVED == 0:
            torch.save((step + 1, model.state_dict(), optimizer.state_dict()), place / "new.pt")
            os.replace(place / "new.pt", saved)


def read_training(place: Path) -> Any:
    steps, state, moments = torch.load(place / "checkpoint.pt", weights_only=True)
    plain = {key: value.numpy().tobytes() if isinstance(value, torch.Tensor) else value for key, value in state.items()}
    return steps, plain, [[bytes(v.numpy().tobytes()) for v in each.values()] for each in moments["state"].values()]


def patch(place: Path) -> None:
    """Patch a clone, change a setting, and revert it, several times. The last command patches."""
    if not place.exists():
        fresh = place.with_name("fresh")
        shutil.rmtree(fresh, ignore_errors=True)
        shutil.copytree(TESTS / "upstreams" / "segnn", fresh, ignore=shutil.ignore_patterns("__pycache__"))
        fresh.rename(place)
    plugin = registry().adapter("segnn")
    for _ in range(3):
        plan_patch(place, plugin, {"mode": "resilient"}).apply()
        plan_revert(place, purge=True).apply()
        plan_patch(place, plugin, {}).apply()


def read_folder(place: Path) -> dict[str, bytes]:
    """Return the content of all files, also of hidden ones that a kill may leave behind."""
    return {str(path.relative_to(place)): path.read_bytes() for path in place.rglob("*") if path.is_file()}


def compare(place: Path) -> None:
    """Compare two modes on a script, in the folder of an earlier comparison that was killed, if any."""
    project = place.parent / "project"
    project.mkdir(parents=True, exist_ok=True)
    if not (project / "train.py").exists():
        (project / "train.py").write_text(SCRIPT)
    os.chdir(project)
    with open(os.devnull, "w") as nothing, contextlib.redirect_stderr(nothing):
        found = run_comparison(
            "schnet", ["train.py"], runs="off,strict", seeds=2, metrics=["test=test {number}"], jobs=1, out=place
        )
    (place / "values.json").write_text(json.dumps([run["values"] for run in found.to_dict()["runs"]]))


def soak_inputs(inputs: int) -> bool:
    """Run the property tests of tests/fuzz with about equally many random inputs each, and count them."""
    os.environ["ACE_FUZZ"] = str(-(-inputs // 7))
    import test_inputs

    counts, failed = Counter[str](), []
    tests = {name: test for name, test in vars(test_inputs).items() if name.startswith("test_")}
    assert len(tests) == 7, "one seventh of the inputs for each test"
    for name, test in tests.items():

        @functools.wraps(test.hypothesis.inner_test)
        def counted(*args: Any, name: str = name, inner: Any = test.hypothesis.inner_test, **kwargs: Any) -> None:
            counts[name] += 1
            inner(*args, **kwargs)

        test.hypothesis.inner_test = counted
        begin = time.perf_counter()
        try:
            test()
        except Exception:
            traceback.print_exc()
            failed.append(name)
        say(f"  {name}: {counts[name]:,} inputs, {time.perf_counter() - begin:.0f} s")
    say(f"inputs: {counts.total():,}; {len(failed)} of {len(tests)} properties failed {', '.join(failed)}".rstrip())
    return not failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1_000_000, help="training steps (default: %(default)s)")
    parser.add_argument("--kills", type=int, default=200, help="kills of each kind (default: %(default)s)")
    parser.add_argument("--inputs", type=int, default=50_000, help="random inputs (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the times of kills (default: %(default)s)")
    parser.add_argument("--only", choices=("steps", "training", "patch", "comparison", "inputs"), help="one part")
    options = parser.parse_args()
    torch.set_num_threads(1)
    random.seed(options.seed)
    os.environ["ACE_QUIET"] = "1"
    for name, adapter in ADAPTERS.items():
        registry().add(adapter(), name)
    with tempfile.TemporaryDirectory() as where:
        folder = Path(where)
        parts: dict[str, Callable[[], bool]] = {
            "steps": lambda: soak_steps(options.steps, folder),
            "training": lambda: soak_kills("training", options.kills, train, read_training, folder),
            "patch": lambda: soak_kills("patch", options.kills, patch, read_folder, folder, once=True),
            "comparison": lambda: soak_kills(
                "comparison", options.kills, compare, lambda place: (place / "values.json").read_text(), folder
            ),
            "inputs": lambda: soak_inputs(options.inputs),
        }
        good = [part() for name, part in parts.items() if options.only in (None, name)]
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
