"""Checkouts for tests: fresh copies of the miniature upstreams, and of the real ones where these are given."""

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
from ace_plugins.testing import CHECKS, name_of

MINIATURES = Path(__file__).parent / "upstreams"
MADE = "__pycache__/\n*.npy\n*.npz\n*.pkl\nexp_results/\n"
"""What running makes, and tests put there: nothing a user would commit."""


def miniature(name: str, folder: Path) -> Path:
    """A copy that git knows, as a user's clone."""
    root = folder / name
    shutil.copytree(MINIATURES / name, root, ignore=shutil.ignore_patterns("__pycache__"))
    git(root, "init", "-q")
    (root / ".git" / "info" / "exclude").write_text(MADE)
    git(root, "add", "-A")
    git(root, "-c", "user.name=x", "-c", "user.email=x@localhost", "commit", "-q", "-m", "upstream")
    return root


def real(name: str, folder: Path) -> Path:
    """A copy of the checkout that ``ACE_UPSTREAM_<NAME>`` names; the test is skipped where it names none."""
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
    """``python main.py ...`` in that folder, as a user types it."""
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
    """``ace-patch ...`` in that folder."""
    return python(root, "-m", "ace_plugins", *arguments, **environment)


def fresh(root: Path) -> Path:
    """The checkout as git has it, whatever an earlier test did to it. The data stays."""
    changed = git(root, "diff", "--name-only", "--diff-filter=M").split()
    if changed:  # large files may be absent from a clone, and stay so
        git(root, "checkout", "-q", "--", *changed)
    (root / "ace.toml").unlink(missing_ok=True)
    shutil.rmtree(root / ".ace", ignore_errors=True)
    return root


# Questions that one process answers: what they import costs seconds.

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
    """What each question returned. Asking for one that failed fails the test, with its traceback."""

    def __init__(self, told: dict[str, tuple[Any, str]]) -> None:
        self.told = told

    def __call__(self, question: Callable[..., Any]) -> Any:
        answer, failure = self.told[question.__name__]
        if failure:
            pytest.fail(failure, pytrace=False)
        return answer


def ask(root: Path, *questions: Callable[..., Any]) -> Answers:
    """Call these functions one after the other in a process of their own in that folder; they return what JSON knows.

    Only their source goes there, so each imports what it needs.
    """
    code = ASKED.format(
        sources="\n".join(map(inspect.getsource, questions)), names=", ".join(each.__name__ for each in questions)
    )
    done = python(root, "-W", "ignore", "-c", code, PYTHONDONTWRITEBYTECODE="1")
    assert done.returncode == 0, done.stderr
    return Answers(json.loads(done.stdout.splitlines()[-1]))


def assert_same_layout(mini: Path, name: str, layout: Callable[..., Any]) -> None:
    """The miniature has the names, signatures, keys and shapes of the real one; it may have more."""
    mine, theirs = (ask(root, layout)(layout) for root in (mini, given(name)))
    assert {key: mine.get(key) for key in theirs} == theirs


# What every adapter of a checkout is asked.


def assert_healthy(told: dict[str, Any], before: int, after: int) -> None:
    """What doctor tells: the parameters without and with ACE, a symmetry that the branches alone break, and that all
    checks of the test kit hold."""
    assert (told["parameters_before"], told["parameters_after"]) == (before, after)
    assert told["error_at_0"]["relative"] < 1e-4
    assert told["error_at_1"]["relative"] > 1e-3
    assert told["problems"] == []
    assert told["checks"] == [name_of(check) for check in CHECKS]


def assert_revert_is_whole(root: Path, *patch: str) -> None:
    """Patched twice and reverted: git sees what it saw before."""
    before = git(root, "status", "--porcelain"), git(root, "diff", "--", "*.py")
    for _ in range(2):
        done = ace(root, *patch)
        assert done.returncode == 0, done.stderr
    assert git(root, "diff", "--", "*.py") != before[1]
    assert ace(root, "revert").returncode == 0
    assert (git(root, "status", "--porcelain"), git(root, "diff", "--", "*.py")) == before


def assert_commit_is_known(name: str, checkout: Checkout) -> None:
    assert git(given(name), "rev-parse", "HEAD").strip() in checkout.commits
