from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy
import pytest
import torch
from toy import ADAPTERS

from ace_plugins.plugins.registry import registry
from ace_plugins.report.observers import ANNOUNCER

# Models of this size are fastest on one thread, and tests often share a machine. Subprocesses inherit it.
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")

# What is told of every attached model would drown what tests tell, also when the process ends.
ANNOUNCER.silent = True

# Somebody's test_cls.py is a script, not a test; and third parties have tests of their own.
collect_ignore = ["upstreams", "third_party"]


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Every test draws the same numbers in every run, alone or after others."""
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _runs_in_a_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACE_RUNS", str(tmp_path / "runs"))


@pytest.fixture(autouse=True)
def _no_error_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """pytest sets this after a failed test. A record would take it for an error of the script."""
    monkeypatch.delattr(sys, "last_value", raising=False)


@pytest.fixture(autouse=True)
def _toy_adapters() -> Iterator[None]:
    for name, adapter in ADAPTERS.items():
        registry().add(adapter(), name)
    yield
    for name in ADAPTERS:
        registry().remove(name)
