"""Parse the runs, seeds and metrics of a comparison, given as options or in an experiment file.

An experiment file is TOML::

    adapter = "segnn"
    command = "main.py --dataset=nbody --epochs={epochs} --max_samples={samples}"
    epochs = 1000
    seeds = 3
    needs = "ace-patch data nbody --out nbody/dataset"

    [vary]                      # optional: one comparison per value
    samples = [1000, 3000]

    [runs.off]
    [runs.slow]
    mode = "strict"
    horizon = 0.9

    [paper]                     # optional: published result of each run, or one such table per value of [vary]
    off = "5.6"
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomlkit
from tomlkit.exceptions import TOMLKitError

from ..contract.upstreams import Metric
from ..errors import AceError, ConfigError, one_of
from ..settings.config import KINDS

MODES, PRESETS = ("off", "auto", "strict", "bounded", "resilient", "scheduled"), ("paper", "fit")
KNOWN: Mapping[str, Mapping[str, Any]] = {
    **{mode: {"mode": mode} for mode in MODES},
    **{preset: {"preset": preset} for preset in PRESETS},
}
"""Settings of runs by name: modes and presets. Further settings are added to them."""
KEYS = ("adapter", "command", "epochs", "seeds", "vary", "runs", "metrics", "paper", "title", "needs", "hours")
SEEDS_AT_MOST = 10_000


def parse_runs(text: str) -> dict[str, dict[str, Any]]:
    """Parse named sets of settings such as ``off,strict,mine:horizon=0.1,rho=2x``, in the order of the text."""
    runs: dict[str, dict[str, Any]] = {}
    for piece in re.split(r",(?![^,:]*=)", text):  # a comma before key=value continues the run's settings
        name, colon, words = piece.strip().partition(":")
        settings: dict[str, str] = {}
        for word in words.split(",") if colon else ():
            key, _, value = (part.strip() for part in word.partition("="))
            if not value:
                raise AceError(f"run {name!r}: expected key=value, found {word!r}")
            if key in settings:
                raise AceError(f"run {name!r}: {key} is given twice")
            settings[key] = value
        if name in runs:
            raise AceError(f"run {name!r} is given twice; give the second one another name")
        checked = _check_run(name, settings)
        runs[name] = {key: _parse_setting(name, key, value) for key, value in checked.items()}
    return runs


def check_runs(table: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Check and return the settings of each run. A run without settings is the mode or preset of its name."""
    for name, settings in table.items():
        if not isinstance(settings, Mapping):
            raise AceError(f"run {name!r}: expected a table of settings, found {settings!r}")
    return {name: _check_run(name, settings) for name, settings in table.items()}


def _check_run(name: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    if not re.fullmatch(r"[A-Za-z0-9][\w.+-]*", name):
        raise AceError(f"run {name!r}: expected a name of letters, digits and . _ + -, then ':' and settings if any")
    if not settings and name not in KNOWN:
        raise AceError(one_of("run", name, KNOWN, do="or add settings, as in mine:horizon=0.1,rho=2x"))
    for key in settings:
        if key not in (*KINDS, "preset"):
            raise AceError(f"run {name!r}: " + one_of("setting", key, [*KINDS, "preset"]))
    return {**KNOWN.get(name, {}), **settings}


def _parse_setting(run: str, key: str, text: str) -> Any:
    try:
        return text if key == "preset" else KINDS[key].parse(text)
    except ValueError:
        raise ConfigError(f"run {run!r}: {key} {text!r}: expected {KINDS[key].expected}") from None


def parse_seeds(text: str) -> tuple[int, ...]:
    """Parse a number of seeds (``3`` means the seeds 1, 2 and 3) or a list of seeds (``7,11``, or ``7,`` for one)."""
    try:
        seeds = [int(word) for word in text.removesuffix(",").split(",")]
    except ValueError:
        seeds = []
    if len(seeds) == 1 and "," not in text:
        seeds = list(range(1, seeds[0] + 1)) if seeds[0] <= SEEDS_AT_MOST else []
    if not seeds or min(seeds) < 0 or len(set(seeds)) < len(seeds):
        expected = (
            "expected a number of seeds, such as 3, or different seeds of at least 0, such as 7,11 (or 7, for one)"
        )
        raise AceError(f"seeds {text!r}: {expected}")
    return tuple(seeds)


def parse_metric(text: str, *, higher: bool = False) -> Metric:
    """Parse a metric such as ``test=Test MAE: {number}``: a name and a pattern, or a pattern alone."""
    name, equals, pattern = text.partition("=")
    if not equals or not re.fullmatch(r"[\w -]+", name):
        name, pattern = "metric", text
    metric = Metric(name, pattern, higher=higher)
    compile_pattern(metric.pattern, name)
    return metric


def compile_pattern(pattern: str, name: str) -> re.Pattern[str]:
    """Compile a metric's regular expression, which must have exactly one group."""
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise AceError(f"metric {name!r}: {pattern!r} is not a regular expression: {error}") from None
    if compiled.groups != 1:
        expected = "expected {number} once, as in 'Test MAE: {number}', or another single group"
        raise AceError(f"metric {name!r}: {expected}; found {compiled.groups} groups in {pattern!r}")
    return compiled


@dataclass(frozen=True)
class Experiment:
    """A script, the runs to compare, their seeds and metrics."""

    adapter: str
    words: tuple[str, ...]
    """The script's command: the script and its arguments."""
    runs: Mapping[str, Mapping[str, Any]]
    """Mapping from the name of each run to its settings. The first run is the baseline."""
    seeds: tuple[int, ...] = (1, 2, 3)
    metrics: tuple[Metric, ...] = ()
    """Metrics to read from the output. Runs are compared by the first one. Default: the adapter's metrics."""
    about: Mapping[str, Any] = field(default_factory=dict)
    """Description: title, requirements, expected hours, and the paper's result for each run."""
    label: str = ""
    """Name and value of the parameter that varies within an experiment file, such as "samples 1000"."""


def read_experiments(path: Path, scale: float = 1.0) -> list[Experiment]:
    """Read an experiment file, with its epochs multiplied by ``scale``. Returns one experiment per value of [vary]."""
    try:
        table = tomlkit.parse(path.read_text(encoding="utf-8")).unwrap()
        return _parse_experiments(table, path.resolve().parent, scale)
    except OSError as error:
        raise AceError(f"{path} cannot be read: {error.strerror or error}") from None
    except (TOMLKitError, UnicodeDecodeError) as error:
        raise AceError(f"{path} is not valid TOML: {error}") from None
    except AceError as error:
        raise AceError(f"{path}: {error}") from None


def _parse_experiments(table: Mapping[str, Any], folder: Path, scale: float) -> list[Experiment]:
    for key in table:
        if key not in KEYS:
            raise AceError(one_of("key", key, KEYS))
    for key in ("adapter", "command", "runs"):
        if key not in table:
            raise AceError(f"the key {key!r} is missing; found {', '.join(table)}")
    command, epochs = str(table["command"]).replace("{here}", shlex.quote(str(folder))), table.get("epochs")
    if ("{epochs}" in command) != (epochs is not None):
        raise AceError("expected the key epochs and {epochs} in the command, or neither of them; found only one")
    if epochs is not None:
        if not isinstance(epochs, int) or epochs < 1:
            raise AceError(f"epochs: expected a whole number of at least 1, found {epochs!r}")
        command = command.replace("{epochs}", str(max(1, round(scale * epochs))))
    elif scale != 1.0:
        raise AceError("there are no epochs to scale; leave out --budget-scale")
    vary = table.get("vary", {})
    if len(vary) > 1 or not all(isinstance(values, list) and values for values in vary.values()):
        raise AceError(f"vary: expected one name with a list of values, found {vary}")
    name, values = next(iter(vary.items()), ("", [None]))
    if name and f"{{{name}}}" not in command:
        raise AceError(f"vary: expected {{{name}}} in the command")
    try:
        metrics = tuple(Metric(name=key, **fields) for key, fields in table.get("metrics", {}).items())
    except TypeError as error:
        raise AceError(f"metrics: {error}; expected pattern, and optionally curve and higher") from None
    runs, seeds = check_runs(table["runs"]), parse_seeds(str(table.get("seeds", 3)))
    about = {key: table[key] for key in ("title", "needs", "hours") if key in table}
    paper = table.get("paper", {})
    by_value = any(isinstance(results, dict) for results in paper.values())
    return [
        Experiment(
            str(table["adapter"]),
            tuple(shlex.split(command.replace(f"{{{name}}}", str(value)) if name else command)),
            runs,
            seeds,
            metrics,
            about | {"paper": paper.get(str(value), {}) if by_value else paper},
            name and f"{name} {value}",
        )
        for value in values
    ]
