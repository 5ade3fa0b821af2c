"""Checkouts for tests: fresh copies of the miniature upstreams, and of the real ones where these are given."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from ace_plugins import Checkout

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


# What every adapter of a checkout is asked.


def assert_battery(root: Path, adapter: str) -> None:
    code = f"from ace_plugins.testing import check_adapter as check; check({adapter!r}, checkout='.')"
    done = python(root, "-W", "ignore", "-c", code)
    assert done.returncode == 0, done.stderr


def assert_revert_is_whole(root: Path, *patch: str) -> None:
    """Patched twice and reverted: git sees what it saw before."""
    before = git(root, "status", "--porcelain"), git(root, "diff", "--", "*.py")
    for _ in range(2):
        done = ace(root, *patch)
        assert done.returncode == 0, done.stderr
    assert ace(root, "revert").returncode == 0
    assert (git(root, "status", "--porcelain"), git(root, "diff", "--", "*.py")) == before


def assert_commit_is_known(name: str, checkout: Checkout) -> None:
    assert git(given(name), "rev-parse", "HEAD").strip() in checkout.commits


def layouts(mini: Path, name: str, code: str) -> tuple[Any, Any]:
    """What a script that prints JSON last says of the miniature, and of the real one."""
    outputs = []
    for root in (mini, given(name)):
        done = python(root, "-c", textwrap.dedent(code), PYTHONDONTWRITEBYTECODE="1")
        assert done.returncode == 0, done.stderr
        outputs.append(json.loads(done.stdout.splitlines()[-1]))
    return outputs[0], outputs[1]
