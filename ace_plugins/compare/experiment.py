"""Comparisons that are written down: a TOML file with the adapter, the command, runs, seeds and metrics.

adapter = "segnn"
command = "main.py --dataset=nbody --epochs={epochs} --max_samples={samples}"
epochs = 1000
seeds = 3
needs = "ace-patch data nbody --out nbody/dataset"

[vary]                      # one comparison for each of these, if there is such a table
samples = [1000, 3000]

[runs.off]
[runs.strict]
[runs.slow]
mode = "strict"
horizon = 0.9

[paper]                     # by run; or a table for each value that varies
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
KEYS = ("adapter", "command", "epochs", "seeds", "vary", "runs", "metrics", "paper", "title", "needs", "hours")


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
    label: str = ""
    """What varies in the file, and its value here."""


def read(path: Path, scale: float = 1.0) -> list[Experiment]:
    """The experiments of a file, one for each value of what varies, with this share of their epochs."""
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
    vary = table.get("vary", {})
    if len(vary) > 1 or not all(isinstance(values, list) and values for values in vary.values()):
        raise AceError(f"{path}: vary: expected one name with a list of values, found {vary}")
    name, values = next(iter(vary.items()), ("", [None]))
    if name and f"{{{name}}}" not in command:
        raise AceError(f"{path}: expected {{{name}}} in the command, since it varies")
    try:
        metrics = tuple(Metric(name=key, **told) for key, told in table.get("metrics", {}).items())
        runs, seeds = runs_of(table["runs"]), parse_seeds(str(table.get("seeds", 3)))
    except TypeError as error:
        raise AceError(f"{path}: metrics: {error}; expected pattern, and curve and higher if any") from None
    except AceError as error:
        raise AceError(f"{path}: {error}") from None
    made = []
    for value in values:
        words = tuple(shlex.split(command.replace(f"{{{name}}}", str(value)) if name else command))
        about: dict[str, Any] = {key: table[key] for key in ("title", "needs", "hours") if key in table}
        paper = table.get("paper", {})
        about["paper"] = paper.get(str(value), {}) if any(isinstance(v, dict) for v in paper.values()) else paper
        made.append(Experiment(str(table["adapter"]), words, runs, seeds, metrics, about, name and f"{name} {value}"))
    return made
