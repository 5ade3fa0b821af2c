"""Comparisons that are written down: a TOML file with the adapter, the command, runs, seeds and metrics.

adapter = "segnn"
command = "main.py --dataset=nbody --epochs={epochs} --max_samples=3000"
epochs = 1000
seeds = 3
needs = "ace-patch data nbody --out nbody/dataset"

[runs.off]
[runs.strict]
[runs.slow]
mode = "strict"
horizon = 0.9

[paper]
off = "5.6"
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomlkit
from tomlkit.exceptions import TOMLKitError

from ..contract.upstreams import Metric
from ..errors import AceError, one_of
from .plan import parse_seeds
from .runs import runs_of

EPOCHS, HERE = "{epochs}", "{here}"
KEYS = ("adapter", "command", "epochs", "seeds", "runs", "metrics", "paper", "title", "needs", "hours")


@dataclass(frozen=True)
class Experiment:
    """What a file says."""

    adapter: str
    words: tuple[str, ...]
    runs: dict[str, dict[str, Any]]
    seeds: tuple[int, ...]
    metrics: tuple[Metric, ...]
    about: Mapping[str, Any]
    """Title, what it needs, and the paper's figures by run."""


def read(path: Path, scale: float = 1.0) -> Experiment:
    """The experiment of a file, with this share of its epochs."""
    try:
        table = tomlkit.parse(path.read_text(encoding="utf-8")).unwrap()
    except OSError as error:
        raise AceError(f"{path} cannot be read: {error.strerror or error}") from None
    except (TOMLKitError, UnicodeDecodeError) as error:
        raise AceError(f"{path} is no TOML: {error}") from None
    for key in table:
        if key not in KEYS:
            raise AceError(f"{path}: " + one_of("key", str(key), KEYS))
    for key in ("adapter", "command", "runs"):
        if key not in table:
            raise AceError(f"{path}: expected {key!r}, as in the files of experiments/; found {', '.join(table)}")
    command, epochs = str(table["command"]), table.get("epochs")
    if (EPOCHS in command) != (epochs is not None):
        raise AceError(f"{path}: expected epochs and {EPOCHS} in the command, or neither")
    if scale != 1.0 and epochs is None:
        raise AceError(f"{path}: it has no epochs that could be scaled; leave out --budget-scale")
    if epochs is not None:
        if not isinstance(epochs, int) or epochs < 1:
            raise AceError(f"{path}: expected epochs of at least 1, found {epochs!r}")
        command = command.replace(EPOCHS, str(max(1, round(scale * epochs))))
    command = command.replace(HERE, shlex.quote(str(path.resolve().parent)))
    try:
        metrics = tuple(Metric(name=name, **told) for name, told in table.get("metrics", {}).items())
        return Experiment(
            str(table["adapter"]),
            tuple(shlex.split(command)),
            runs_of(table["runs"]),
            parse_seeds(str(table.get("seeds", 3))),
            metrics,
            {key: table[key] for key in ("title", "needs", "hours", "paper") if key in table},
        )
    except TypeError as error:
        raise AceError(f"{path}: metrics: {error}; expected pattern, and curve and higher if any") from None
    except AceError as error:
        raise AceError(f"{path}: {error}") from None
