"""Named sets of settings, as people write them: ``off,strict,mine:horizon=0.1,rho=2x``.

Comparisons that are written down: a TOML file with the adapter, the command, runs, seeds and metrics.

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

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomlkit
from tomlkit.exceptions import TOMLKitError

from ..contract.upstreams import Metric
from ..errors import AceError, ConfigError, one_of
from ..settings.config import KINDS
from .plan import parse_seeds

KNOWN: Mapping[str, Mapping[str, Any]] = {
    "off": {"mode": "off"},
    "strict": {"mode": "strict"},
    "bounded": {"mode": "bounded"},
    "resilient": {"mode": "resilient"},
    "scheduled": {"mode": "scheduled"},
    "paper": {"preset": "paper"},
    "fit": {"preset": "fit"},
}
"""Names that need no settings. ``fit`` is what the adapter does when nothing is said."""
_NAME = re.compile(r"[A-Za-z0-9][\w.+-]*")


def parse_runs(text: str) -> dict[str, dict[str, Any]]:
    """Name -> settings, in the order of the text. A comma that is followed by ``key=value`` goes on with a run."""
    pieces: list[str] = []
    for piece in text.split(","):
        goes_on = "=" in piece and ":" not in piece.partition("=")[0]
        if goes_on and pieces and ":" in pieces[-1]:
            pieces[-1] += f",{piece}"
        else:
            pieces.append(piece.strip())
    runs: dict[str, dict[str, Any]] = {}
    for piece in pieces:
        name, colon, words = piece.partition(":")
        _check_name(name, runs)
        if not colon and name not in KNOWN:
            raise AceError(one_of("run", name, KNOWN, do="or give it settings, as in mine:horizon=0.1,rho=2x"))
        runs[name] = _settings(name, words.split(",")) if colon else dict(KNOWN[name])
    return runs


def runs_of(table: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The same of a table of a file: name -> settings, an empty table where the name says it all."""
    runs: dict[str, dict[str, Any]] = {}
    for name, settings in table.items():
        _check_name(name, runs)
        if not isinstance(settings, Mapping):
            raise AceError(f"run {name!r}: expected a table of settings, found {settings!r}")
        if not settings and name not in KNOWN:
            raise AceError(one_of("run", name, KNOWN, do="or give it settings"))
        _check_keys(name, list(settings))
        runs[name] = dict(settings or KNOWN[name])
    return runs


def _check_name(name: str, runs: Mapping[str, Any]) -> None:
    if not _NAME.fullmatch(name):
        raise AceError(f"run {name!r}: expected a name of letters, digits and . _ + -, then ':' and settings if any")
    if name in runs:
        raise AceError(f"run {name!r} is there twice: expected each name once; call the second one something else")


def _check_keys(name: str, keys: Sequence[str]) -> None:
    for key in keys:
        if key not in (*KINDS, "preset"):
            raise AceError(f"run {name!r}: " + one_of("setting", key, [*KINDS, "preset"]))


def _settings(run: str, words: Sequence[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for word in words:
        key, equals, text = word.partition("=")
        key, text = key.strip(), text.strip()
        if not equals or not text:
            raise AceError(f"run {run!r}: expected key=value, found {word!r}")
        _check_keys(run, [key])
        if key in found:
            raise AceError(f"run {run!r}: {key} is there twice")
        try:
            found[key] = text if key == "preset" else KINDS[key].parse(text)
        except ValueError:
            raise ConfigError(f"run {run!r}: {key} {text!r}: expected {KINDS[key].expected}") from None
    return found


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
