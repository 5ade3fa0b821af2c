"""Mutation tests of the engine: change one line at a time, and report the changes that no test notices.

    python tests/mutate.py [--mutants 60] [--seed 0] [--module loop] [--fail-under 0.8]

`tox run -e mutate` calls this. It uses cosmic-ray's mutations, one per sampled line, on a copy of the repository. A
first run of the engine's tests with coverage finds the tests that execute each line; a mutant is tested against the
fastest of these, in a forked process, so that torch is imported only once. mutmut is not used: it calls all functions
through wrappers, which changes signatures and graphs that the engine inspects.
"""

from __future__ import annotations

import argparse
import ast
import multiprocessing
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import torch  # noqa: F401  (for the forked processes)
from cosmic_ray.commands.init import init
from cosmic_ray.mutating import use_mutation
from cosmic_ray.plugins import get_operator
from cosmic_ray.work_db import WorkDB, use_db
from cosmic_ray.work_item import MutationSpec
from coverage import CoverageData

ROOT = Path(__file__).resolve().parents[1]
ENGINE = Path("ace_plugins", "engine")
COPIED = ("ace_plugins", "adapters", "tests", "docs", "pyproject.toml", "README.md")
SECONDS = 6.0
"""Limit of the recorded duration of the tests that one mutant is tested against."""
TIMEOUT = 300.0
"""Seconds after which a mutant counts as noticed, because its tests do not end."""
OPTIONS = ["-q", "-p", "no:cacheprovider"]
EQUIVALENT = ("Is_Eq", "IsNot_NotEq", "Eq_Is", "NotEq_IsNot")
"""Replacements of comparison operators that rarely change behaviour."""


def copy_repository(target: Path) -> None:
    """Copy what the tests need, without caches."""
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(
                ROOT / name, target / name, ignore=shutil.ignore_patterns("__pycache__", ".*", "*.egg-info")
            )
        else:
            shutil.copy2(ROOT / name, target / name)


def measure(folder: Path) -> tuple[CoverageData, dict[str, float]]:
    """Run the engine's tests once, and return their coverage by test and the durations of those that pass."""
    options = ["--cov=ace_plugins/engine", "--cov-context=test", "--cov-report=", "--junitxml=results.xml"]
    command = [sys.executable, "-m", "pytest", *OPTIONS, *options, "tests/engine"]
    subprocess.run(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    data = CoverageData(str(folder / ".coverage"))
    data.read()
    durations = {}
    for case in ElementTree.parse(folder / "results.xml").iter("testcase"):
        name = f"{case.attrib['classname'].replace('.', '/')}.py::{case.attrib['name']}"
        if len(case):
            print(f"left out, because it does not pass without a mutation: {name}")
        else:
            durations[name] = float(case.attrib["time"])
    return data, durations


def annotations(path: Path) -> list[tuple[int, int, int, int]]:
    """Return the positions of all type annotations, which are not evaluated and need no mutations."""
    nodes: list[ast.expr | None] = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.AnnAssign, ast.arg)):
            nodes.append(node.annotation)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            nodes.append(node.returns)
    return [(n.lineno, n.col_offset, n.end_lineno or 0, n.end_col_offset or 0) for n in nodes if n is not None]


def sample(folder: Path, count: int, seed: int, only: str) -> list[MutationSpec]:
    """Choose `count` lines of the engine and one mutation for each, by `seed`."""
    modules = [ENGINE / path.name for path in sorted((folder / ENGINE).glob("*.py")) if only in path.stem]
    left_out = {str(path): annotations(folder / path) for path in modules}
    lines: dict[tuple[str, int], list[MutationSpec]] = {}
    with use_db(str(folder / "mutants.sqlite"), WorkDB.Mode.create) as database:
        init(modules, database, {})
        for item in database.work_items:
            (mutation,) = item.mutations
            place, row = str(mutation.module_path), mutation.start_pos[0]
            inside = any((a, b) <= mutation.start_pos and mutation.end_pos <= (c, d) for a, b, c, d in left_out[place])
            if not inside and not mutation.operator_name.endswith(EQUIVALENT):
                lines.setdefault((place, row), []).append(mutation)
    draw = random.Random(seed)
    chosen = draw.sample(sorted(lines), min(count, len(lines)))
    key = lambda mutation: (mutation.operator_name, mutation.occurrence)  # noqa: E731
    return [draw.choice(sorted(lines[line], key=key)) for line in sorted(chosen)]


def tests_of(mutation: MutationSpec, data: CoverageData, durations: dict[str, float]) -> list[str]:
    """Return the fastest tests that execute the mutated line; for a line executed on import, the fastest of all."""
    path = str(Path(mutation.module_path).resolve())
    contexts = data.contexts_by_lineno(path).get(mutation.start_pos[0], [])
    found = {context.partition("|")[0] for context in contexts if context} & durations.keys()
    if not found and contexts:
        found = set(durations)
    chosen, total = [], 0.0
    for test in sorted(found, key=lambda name: (durations[name], name)):
        total += durations[test]
        if chosen and total > SECONDS:
            break
        chosen.append(test)
    return chosen


def notices(tests: list[str]) -> bool:
    """Run tests in a forked process, and return True if one fails or they do not end."""
    process = multiprocessing.get_context("fork").Process(target=_run_tests, args=(tests,))
    process.start()
    process.join(TIMEOUT)
    if process.is_alive():
        process.kill()
        process.join()
    return process.exitcode != 0


def _run_tests(tests: list[str]) -> None:
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    sys.exit(int(pytest.main([*OPTIONS, "-x", *tests])))


def main() -> int:
    """Test the sampled mutants, print the survivors, and return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--mutants", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--module", default="", help="only modules with this in their name")
    parser.add_argument("--fail-under", type=float, default=0.8, help="share of mutants that the tests must notice")
    options = parser.parse_args()
    survivors = 0
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch).resolve()
        copy_repository(folder)
        os.chdir(folder)
        # The copy comes before the installed package, and no bytecode of one mutant is used for the next.
        sys.path.insert(0, str(folder))
        sys.dont_write_bytecode = True
        os.environ.update(PYTHONPATH=str(folder), PYTHONDONTWRITEBYTECODE="1", OMP_NUM_THREADS="1")
        begin = time.monotonic()
        data, durations = measure(folder)
        print(f"{len(durations)} tests in {time.monotonic() - begin:.0f} s", flush=True)
        mutants = sample(folder, options.mutants, options.seed, options.module)
        for number, mutation in enumerate(mutants, 1):
            tests = tests_of(mutation, data, durations)
            operator = get_operator(mutation.operator_name)(**mutation.operator_args)
            with use_mutation(mutation.module_path, operator, mutation.occurrence) as (before, after):
                noticed = bool(tests) and notices(tests)
            outcome = "noticed" if noticed else "SURVIVED"
            print(f"{number}/{len(mutants)} {outcome} {mutation.module_path}:{mutation.start_pos[0]}", flush=True)
            if not noticed:
                survivors += 1
                changed = zip(before.splitlines(), (after or "").splitlines(), strict=False)
                old, new = next(((a, b) for a, b in changed if a != b), ("", ""))
                print(
                    f"    - {old.strip()}\n    + {new.strip()}\n    ({len(tests)} tests execute this line)", flush=True
                )
    share = 1 - survivors / max(len(mutants), 1)
    print(f"{len(mutants) - survivors} of {len(mutants)} mutants noticed ({share:.0%})")
    return int(share < options.fail_under)


if __name__ == "__main__":
    sys.exit(main())
