"""Parses the runs, seeds and metrics of a comparison, from options or from an experiment file.

docs/how_to/comparing.md describes the format of experiment files.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import tomlkit
from tomlkit.exceptions import TOMLKitError

from ..contract.upstreams import Metric
from ..errors import AceError, ConfigError, one_of
from ..settings.config import KINDS

KNOWN: Mapping[str, Mapping[str, Any]] = {
    **{mode: {"mode": mode} for mode in ("off", "auto", "strict", "bounded", "resilient", "scheduled")},
    **{preset: {"preset": preset} for preset in ("paper", "fit")},
    # A control: gamma keeps its initial value, all samples train everything, and all branches are evaluated.
    "branches": {"mode": "bounded", "loop": "paper", "gamma_lr": 0.0, "dual_lr": 0.0, "spectral_norm": True},
}
"""Settings of the runs that are named after a mode, a preset or a control."""
MOST_POINTS = 32  # largest number of points of the grid for each run
KEYS = ("adapter", "command", "epochs", "seeds", "vary", "grid", "runs", "metrics", "paper", "title", "needs", "hours")


def parse_runs(given: str | Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the settings of each run, from a mapping or a text such as ``off,strict,mine:horizon=0.1,rho=2x``."""
    runs = {}
    for name, settings in (_split_runs(given) if isinstance(given, str) else given).items():
        if not re.fullmatch(r"[A-Za-z0-9][\w.+-]*", name):
            raise AceError(f"run {name!r}: expected a name of letters, digits and . _ + -, then ':' and any settings")
        if not isinstance(settings, Mapping):
            raise AceError(f"run {name!r}: expected a table of settings, found {settings!r}")
        if not settings and name not in KNOWN:
            raise AceError(one_of("run", name, KNOWN, do="or add settings, as in mine:horizon=0.1,rho=2x"))
        parsed = {key: parse_setting(name, key, value) for key, value in settings.items()}
        runs[name] = {**KNOWN.get(name, {}), **parsed}
    return runs


def _split_runs(text: str) -> dict[str, dict[str, str]]:
    runs: dict[str, dict[str, str]] = {}
    for piece in re.split(r",(?![^,:]*=)", text):  # a comma before key=value separates settings, not runs
        name, colon, words = piece.strip().partition(":")
        if name in runs:
            raise AceError(f"run {name!r} is given twice; give the second one another name")
        runs[name] = {}
        for word in words.split(",") if colon else ():
            key, _, value = map(str.strip, word.partition("="))
            if not value or key in runs[name]:
                raise AceError(f"run {name!r}: expected key=value with different keys, found {words!r}")
            runs[name][key] = value
    return runs


def parse_setting(run: str, key: str, value: Any) -> Any:
    """Return the value of a setting of a run, which may be given as text."""
    if key not in (*KINDS, "preset"):
        raise AceError(f"run {run!r}: " + one_of("setting", key, [*KINDS, "preset"]))
    try:
        return KINDS[key].parse(value) if key in KINDS and isinstance(value, str) else value
    except ValueError:
        raise ConfigError(f"run {run!r}: {key} {value!r}: expected {KINDS[key].expected}") from None


def parse_grid(text: str) -> tuple[str, tuple[str, ...]]:
    """Parse the values of an option or a setting, such as ``lr=5e-4,9e-4``."""
    key, _, words = text.partition("=")
    key, values = key.strip().lstrip("-"), tuple(word.strip() for word in words.split(","))
    if not key or " " in key or "" in values or len({*values}) < max(2, len(values)):
        raise AceError(f"grid {text!r}: expected KEY=VALUE,VALUE with two or more different values, as in lr=5e-4,1e-3")
    return key, values


def list_points(
    grid: Mapping[str, Sequence[str]], words: Sequence[str], run: str, settings: Mapping[str, Any]
) -> dict[str, tuple[dict[str, Any], dict[str, str]]]:
    """Return the points of the grid for a run by name, each with settings of ACE and options of the script.

    A setting that the run already has keeps its value. For mode off, only options of the script are varied.
    """
    named = {key: find_setting(key, words) for key in grid}
    fixed = KINDS if settings.get("mode") == "off" else settings
    keys, points = [key for key in grid if named[key] not in fixed], {}
    for values in product(*(grid[key] for key in keys)):
        point = dict(zip(keys, values, strict=True))
        name = f"{run} ({', '.join(f'{key}={value}' for key, value in point.items())})" if point else run
        varied = {named[key]: parse_setting(run, named[key], value) for key, value in point.items() if named[key]}
        points[name] = {**settings, **varied}, {key: point[key] for key in keys if not named[key]}
    if len(points) > MOST_POINTS:
        raise AceError(f"--grid: {len(points)} points for run {run!r}: expected at most {MOST_POINTS}")
    return points


def find_setting(key: str, words: Sequence[str]) -> str:
    """Return the setting of ACE that a key of the grid names; "" if it names an option of the script."""
    name = key.removeprefix("ace.")
    return name if name != key or (name in KINDS and not set_option(words, key, "")[1]) else ""


def set_option(words: Sequence[str], key: str, value: str) -> tuple[list[str], str]:
    """Return the command with a new value of an option, and the replaced words ("" if the option was not in it).

    ``--key value``, ``--key=value`` and ``key=value`` are replaced, with ``-`` and ``_`` as in the command.
    """
    found = [*words]
    for n, word in reversed([*enumerate(words)]):
        name, equals, _ = word.partition("=")
        if name.lstrip("-").replace("_", "-") == key.replace("_", "-") and (equals or name.startswith("-")):
            old = [] if equals else [each for each in words[n + 1 : n + 2] if not each.startswith("--")]
            found[n : n + 1 + len(old)] = [f"{name}={value}"] if equals else [name, value]
            return found, " ".join([word, *old])
    return [*found, f"--{key}={value}"], ""


def parse_seeds(text: str) -> tuple[int, ...]:
    """Parse a number of seeds (``3`` means the seeds 1, 2 and 3) or a list of seeds (``7,11``, or ``7,`` for one)."""
    try:
        seeds: Sequence[int] = [int(word) for word in text.removesuffix(",").split(",")]
    except ValueError:
        seeds = []
    if len(seeds) == 1 and "," not in text:
        seeds = range(1, seeds[0] + 1)
    if not 0 < len(seeds) <= 1000 or min(seeds) < 0 or len(set(seeds)) < len(seeds):
        raise AceError(
            f"seeds {text!r}: expected a number of seeds, such as 3, or a list of different seeds, such as 7,11; "
            "to use a single seed, end the list with a comma, as in 7,"
        )
    return tuple(seeds)


def parse_metric(text: str, *, higher: bool = False) -> Metric:
    """Parse a metric such as ``test=Test MAE: {number}``: a name and a pattern, or a pattern alone."""
    name, equals, pattern = text.partition("=")
    if not equals or not re.fullmatch(r"[\w -]+", name):
        name, pattern = "metric", text
    return Metric(name, pattern, higher=higher)


def compile_pattern(metric: Metric, pattern: str) -> re.Pattern[str]:
    """Compile a regular expression of a metric. Raises AceError unless the expression has exactly one group."""
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise AceError(f"metric {metric.name!r}: {pattern!r} is not a regular expression: {error}") from None
    if compiled.groups != 1:
        expected = "expected {number} once, as in 'Test MAE: {number}', or another single group"
        raise AceError(f"metric {metric.name!r}: {expected}; found {compiled.groups} groups in {pattern!r}")
    return compiled


@dataclass(frozen=True)
class Experiment:
    """A script, the runs to compare, their seeds and metrics."""

    adapter: str
    words: tuple[str, ...]  # the script's command: the script and its arguments
    runs: Mapping[str, Mapping[str, Any]]
    """Mapping from the name of each run to its settings. The first run is the baseline."""
    seeds: tuple[int, ...] = (1, 2, 3, 4, 5)
    metrics: tuple[Metric, ...] = ()
    """Metrics to read from the output. Runs are compared by the first one. Default: the adapter's metrics."""
    about: Mapping[str, Any] = field(default_factory=dict)
    """Description: title, requirements, expected hours, and the paper's result for each run."""
    grid: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Mapping from options of the script and settings of ACE to the values from which each run gets the best one."""
    label: str = ""  # name and value of the parameter that varies within an experiment file, such as "samples 1000"


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
    if unknown := [key for key in table if key not in KEYS]:
        raise AceError(one_of("key", unknown[0], KEYS))
    if missing := [key for key in ("adapter", "command", "runs") if key not in table]:
        raise AceError(f"the key {missing[0]!r} is missing; found {', '.join(table)}")
    command = str(table["command"]).replace("{here}", shlex.quote(str(folder)))
    if ("{epochs}" in command) != ("epochs" in table):
        raise AceError("expected the key epochs and {epochs} in the command, or neither of them; found only one")
    if "epochs" not in table and scale != 1.0:
        raise AceError("there are no epochs to scale; leave out --budget-scale")
    epochs = table.get("epochs", 1)
    if not isinstance(epochs, int) or epochs < 1:
        raise AceError(f"epochs: expected a whole number of at least 1, found {epochs!r}")
    command = command.replace("{epochs}", str(max(1, round(scale * epochs))))
    vary = table.get("vary", {})
    if len(vary) > 1 or not all(isinstance(values, list) and values for values in vary.values()):
        raise AceError(f"vary: expected one placeholder with its values, as samples = [1000, 3000], found {vary}")
    name, values = next(iter(vary.items()), ("", [None]))
    place = f"{{{name}}}" if name else ""
    if place not in command:
        raise AceError(f"vary: expected {place} in the command")
    try:
        metrics = tuple(Metric(name=key, **fields) for key, fields in table.get("metrics", {}).items())
    except TypeError as error:
        raise AceError(f"metrics: {error}; expected the key 'pattern', and optionally 'curve' and 'higher'") from None
    runs, seeds, paper = parse_runs(table["runs"]), parse_seeds(str(table.get("seeds", 5))), table.get("paper", {})
    grid = dict(parse_grid(f"{key}={','.join(map(str, each))}") for key, each in table.get("grid", {}).items())
    about = {key: table[key] for key in ("title", "needs", "hours") if key in table}
    by_value = any(isinstance(results, dict) for results in paper.values())
    experiments = []
    for value in values:
        words = tuple(shlex.split(command.replace(place, str(value)) if name else command))
        described = about | {"paper": paper.get(str(value), {}) if by_value else paper}
        label = name and f"{name} {value}"
        experiments.append(Experiment(str(table["adapter"]), words, runs, seeds, metrics, described, grid, label))
    return experiments
