"""Copies of upstreams for tests: the miniatures, and the real ones if checkouts are given."""

from __future__ import annotations

import inspect
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ace_plugins.adapter import Checkout
from ace_plugins.testing import CHECKS

MINIATURES = Path(__file__).parent / "upstreams"
MADE = "__pycache__/\n*.npy\n*.npz\n*.pkl\nexp_results/\n"
"""Files that scripts and tests create, which git should ignore."""


def miniature(name: str, folder: Path) -> Path:
    """Copy a miniature into a git repository, like a user's clone."""
    root = folder / name
    shutil.copytree(MINIATURES / name, root, ignore=shutil.ignore_patterns("__pycache__"))
    git(root, "init", "-q")
    (root / ".git" / "info" / "exclude").write_text(MADE)
    git(root, "add", "-A")
    git(root, "-c", "user.name=x", "-c", "user.email=x@localhost", "commit", "-q", "-m", "upstream")
    return root


def real(name: str, folder: Path) -> Path:
    """Copy the checkout that ``ACE_UPSTREAM_<NAME>`` names, or skip the test if the variable is not set."""
    root = folder / name
    shutil.copytree(given(name), root, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    with (root / ".git" / "info" / "exclude").open("a") as exclude:
        exclude.write(MADE)
    return root


def given(name: str) -> Path:
    variable = f"ACE_UPSTREAM_{name.upper()}"
    if not os.environ.get(variable):
        pytest.skip(f"needs a checkout of the real upstream: set {variable} to its folder")
    return Path(os.environ[variable])


def git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def python(root: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run ``python main.py ...`` in that folder."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("ACE_")}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=root,
        env={**env, "COLUMNS": "100", "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=600,
    )


def ace(root: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run ``ace-patch ...`` in that folder."""
    return python(root, "-m", "ace_plugins", *arguments, **environment)


def fresh(root: Path) -> Path:
    """Undo what earlier tests did to the checkout, except for its data."""
    changed = git(root, "diff", "--name-only", "--diff-filter=M").split()
    if changed:  # large files may be missing from a clone
        git(root, "checkout", "-q", "--", *changed)
    (root / "ace.toml").unlink(missing_ok=True)
    shutil.rmtree(root / ".ace", ignore_errors=True)
    return root


# Functions that run together in one process, since their imports take seconds.

ASKED = """from __future__ import annotations
import json, traceback
{sources}
answers = {{}}
for question in ({names},):
    try:
        answers[question.__name__] = [question(), ""]
    except Exception:
        answers[question.__name__] = [None, traceback.format_exc()]
print("\\n" + json.dumps(answers))
"""


class Answers:
    """Results of the functions. Reading the result of one that failed fails the test with its traceback."""

    def __init__(self, results: dict[str, tuple[Any, str]]) -> None:
        self.results = results

    def __call__(self, question: Callable[..., Any]) -> Any:
        answer, failure = self.results[question.__name__]
        if failure:
            pytest.fail(failure, pytrace=False)
        return answer


def ask(root: Path, *questions: Callable[..., Any]) -> Answers:
    """Call these functions in one new process in that folder. They return JSON values.

    Only their source is passed on, so each imports what it needs.
    """
    code = ASKED.format(
        sources="\n".join(map(inspect.getsource, questions)), names=", ".join(each.__name__ for each in questions)
    )
    done = python(root, "-W", "ignore", "-c", code, PYTHONDONTWRITEBYTECODE="1")
    assert done.returncode == 0, done.stderr
    return Answers(json.loads(done.stdout.splitlines()[-1]))


def assert_same_layout(mini: Path, name: str, layout: Callable[..., Any]) -> None:
    """Assert that the miniature has all names, signatures, keys and shapes of the real upstream."""
    mine, theirs = (ask(root, layout)(layout) for root in (mini, given(name)))
    assert {key: mine.get(key) for key in theirs} == theirs


# Assertions for every adapter of a checkout.


def assert_healthy(report: dict[str, Any], before: int, after: int) -> None:
    """Assert that doctor finds these parameter counts, a symmetry that only branches break, and no failed check."""
    assert (report["parameters_before"], report["parameters_after"]) == (before, after)
    assert report["error_at_0"]["relative"] < 1e-4
    assert report["error_at_1"]["relative"] > 1e-3
    assert report["problems"] == []
    assert report["checks"] == list(CHECKS)


def assert_revert_is_whole(root: Path, *patch: str) -> None:
    """Assert that patching twice and reverting leaves no difference that git sees."""
    before = git(root, "status", "--porcelain"), git(root, "diff", "--", "*.py")
    for _ in range(2):
        done = ace(root, *patch)
        assert done.returncode == 0, done.stderr
    assert git(root, "diff", "--", "*.py") != before[1]
    assert ace(root, "revert").returncode == 0
    assert (git(root, "status", "--porcelain"), git(root, "diff", "--", "*.py")) == before


def assert_commit_is_known(name: str, checkout: Checkout) -> None:
    assert git(given(name), "rev-parse", "HEAD").strip() in checkout.commits
