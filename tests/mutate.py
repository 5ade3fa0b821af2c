"""Mutation tests of the engine: change one line at a time, and report the changes that no test notices.

    python tests/mutate.py [--mutants 60] [--seed 0] [--module loop] [--fail-under 0.6]

`tox run -e mutate` calls this. It uses cosmic-ray's mutations, one per sampled line, on a copy of the repository. A
first run of the engine's tests with coverage finds the tests that execute each line; a mutant is tested against the
fastest of these, in a forked process, so that torch is imported only once. mutmut is not used: it calls all functions
through wrappers, which changes signatures and graphs that the engine inspects.
"""

from __future__ import annotations

import argparse
import ast
import itertools
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
from typing import Any

import pytest
import torch  # noqa: F401  (for the forked processes)
from cosmic_ray.commands.init import init
from cosmic_ray.mutating import mutate_code, use_mutation
from cosmic_ray.plugins import get_operator
from cosmic_ray.work_db import WorkDB, use_db
from cosmic_ray.work_item import MutationSpec
from coverage import CoverageData

ROOT = Path(__file__).resolve().parents[1]
ENGINE = Path("ace_plugins", "engine")
COPIED = ("ace_plugins", "adapters", "tests", "docs", "pyproject.toml", "README.md")
SECONDS = (5.0, 60.0)
"""Limits of the recorded duration of the tests that a mutant is tested against: at first, and if it survives these."""
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
    order = sorted(lines)
    draw.shuffle(order)
    chosen = []
    for line in order:
        mutation = draw.choice(sorted(lines[line], key=lambda each: (each.operator_name, each.occurrence)))
        if len(chosen) < count and is_valid(mutation):
            chosen.append(mutation)
    return sorted(chosen, key=lambda each: (each.module_path, each.start_pos))


def operator_of(mutation: MutationSpec) -> Any:
    """Create cosmic-ray's operator of a mutation."""
    return get_operator(mutation.operator_name)(**mutation.operator_args)


def is_valid(mutation: MutationSpec) -> bool:
    """Return False for a mutation that is not valid Python, such as ``&`` for the ``*`` in a signature."""
    code = Path(mutation.module_path).read_text(encoding="utf-8")
    try:
        ast.parse(mutate_code(code, operator_of(mutation), mutation.occurrence) or "")
    except SyntaxError:
        return False
    return True


def tests_of(mutation: MutationSpec, data: CoverageData, durations: dict[str, float]) -> list[str]:
    """Return the tests that execute the mutated line, fastest first; for a line executed on import, all tests."""
    lines = data.contexts_by_lineno(str(Path(mutation.module_path).resolve()))
    row = mutation.start_pos[0]
    # Coverage may record only the first line of a statement.
    contexts = next((lines[line] for line in range(row, max(row - 10, 0), -1) if lines.get(line)), [])
    found = {context.partition("|")[0] for context in contexts if context} & durations.keys()
    if not found and contexts:
        found = set(durations)
    return sorted(found, key=lambda name: (durations[name], name))


def within(tests: list[str], durations: dict[str, float], seconds: float) -> list[str]:
    """Return the first tests, as many as fit into a time, and at least one."""
    total = list(itertools.accumulate(durations[test] for test in tests))
    return tests[: max(1, sum(each <= seconds for each in total))]


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
    parser.add_argument("--fail-under", type=float, default=0.6, help="share of mutants that the tests must notice")
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
        if notices(within(sorted(durations, key=durations.__getitem__), durations, SECONDS[0])):
            raise SystemExit("the tests fail in a forked process without a mutation")
        for number, mutation in enumerate(mutants, 1):
            tests = tests_of(mutation, data, durations)
            with use_mutation(mutation.module_path, operator_of(mutation), mutation.occurrence) as (before, after):
                noticed = bool(tests) and any(notices(within(tests, durations, limit)) for limit in SECONDS)
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
