"""Finds runs and reads them from their folders, whether they finished, were killed or are still training."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import AceError, ConfigError
from ..plugins.plugin import one_line
from ..settings.config import SETTINGS, Config
from ..settings.sources import RUNS
from .trace import ABOUT, LINES, TraceReader

QUANTITIES = ("gamma", "lambda", "u")  # every line of a trace has each of these, with one value per site
TEST = ("log_e", "benefit", "limit", "kept", "used")  # numbers per site that verdicts in mode auto are derived from
NAMED = 4  # largest number of sites that a note names; it only counts the others


@dataclass
class SavedRun:
    """A run as its files describe it. Numbers that are missing or not finite are NaN."""

    folder: Path
    about: Mapping[str, Any]  # content of run.json
    config: Config
    sites: list[str]
    steps: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    values: dict[str, list[list[float]]] = field(default_factory=dict)  # per quantity and site, a value per line
    loss: list[tuple[int, float]] = field(default_factory=list)  # step, training loss
    rates: list[tuple[int, list[float]]] = field(default_factory=list)  # step, learning rate per parameter group
    errors: list[tuple[int, float]] = field(default_factory=list)  # step, relative equivariance error with branches
    group: str = ""  # symmetry group under which the error is measured, for example "SO(3)"
    gradients: list[tuple[int, list[float]]] = field(default_factory=list)  # step, d loss / d gamma per site
    held: dict[int, float] = field(default_factory=dict)  # by index of a landed site: |lambda| / s, see `Evidence`
    test: dict[str, list[float]] | None = None  # mode auto: the last outcome of the test, see engine.evidence
    log_e: list[tuple[int, list[float]]] = field(default_factory=list)  # step, logarithm of the e-value per site
    averaged: float = math.inf  # number of gradients that ``held`` is computed from
    events: list[tuple[int, str]] = field(default_factory=list)  # step, message
    end: Mapping[str, Any] | None = None  # the last line of a finished run
    skipped: int = 0  # number of lines that lack the step, or gamma, lambda or u of a site
    missing: list[str] = field(default_factory=list)  # notes on what could not be read
    label: str = ""  # name of the run within a comparison

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def mode(self) -> str:
        return self.config.mode

    @property
    def adapter(self) -> str:
        return str(self.about.get("adapter") or "")

    @property
    def title(self) -> str:
        return self.label or ", ".join(filter(None, (self.adapter, self.mode)))

    @property
    def length(self) -> int:
        """Number of training steps up to the last line."""
        return max(self.steps, default=0)

    @property
    def duration(self) -> float:
        """Seconds up to the last line."""
        return max(filter(math.isfinite, self.seconds), default=0.0)

    @property
    def changed(self) -> dict[str, Any]:
        """Settings that differ from the defaults."""
        values = {name: getattr(self.config, name) for name in SETTINGS}
        return {name: value for name, value in values.items() if value != SETTINGS[name].default}

    def last(self, quantity: str) -> list[float]:
        """Return the last value of a quantity for each site."""
        return [site[-1] if site else math.nan for site in self.values[quantity]]

    def largest_gamma(self) -> list[tuple[int, float]]:
        """Return the largest |gamma| over all sites for each line of the trace, with the line's step."""
        lines = zip(*self.values["gamma"], strict=True)
        sizes = [max((abs(v) for v in line if math.isfinite(v)), default=math.nan) for line in lines]
        return list(zip(self.steps, sizes, strict=False))

    def add(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Add lines of the trace."""
        for line in lines:
            step, rows = to_number(line.get("step")), [to_numbers(line.get(name)) for name in QUANTITIES]
            if math.isnan(step) or any(len(row) != len(self.sites) for row in rows):
                self.skipped += 1
                continue
            self.steps.append(int(step))
            self.seconds.append(to_number(line.get("seconds")))
            for name, row in zip(QUANTITIES, rows, strict=True):
                for values, value in zip(self.values[name], row, strict=True):
                    values.append(value)
            self._add_optional(int(step), line)

    def _add_optional(self, step: int, line: Mapping[str, Any]) -> None:
        if "loss" in line:
            self.loss.append((step, to_number(line["loss"])))
        if rates := to_numbers(line.get("lr")):
            self.rates.append((step, rates))
        if len(gradient := to_numbers(line.get("gradient"))) == len(self.sites):
            self.gradients.append((step, gradient))
        if isinstance(test := line.get("test"), dict):
            found = {key: to_numbers(test.get(key)) for key in TEST}
            if all(len(values) == len(self.sites) for values in found.values()):
                self.test = found
                self.log_e.append((step, found["log_e"]))
        if isinstance(landed := line.get("landed"), dict):
            held = zip(to_numbers(landed.get("sites")), to_numbers(landed.get("held")), strict=False)
            self.held |= {int(site): value for site, value in held if math.isfinite(site)}
            self.averaged = to_number(landed.get("gradients"))
        if isinstance(error := line.get("error"), dict):
            self.errors.append((step, to_number(error.get("relative"))))
            self.group = str(error.get("group") or self.group)
        if line.get("event"):
            self.events.append((step, str(line["event"])))
        if line.get("finished"):
            self.end = line


def to_number(value: Any) -> float:
    """Return a number as a float, and NaN for infinities and for anything that is not a number."""
    if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    return math.nan


def to_numbers(values: Any) -> list[float]:
    """Apply `to_number` to each element of a list; return an empty list for anything that is not a list."""
    return [to_number(value) for value in values] if isinstance(values, list) else []


def pick_evenly(length: int, most: int) -> list[int]:
    """Return at most ``most`` evenly spaced indices into a series of this length, including the last index."""
    every = max(1, -(-length // most))
    return list(range(length - 1, -1, -every))[::-1]


def open_run(folder: Path) -> tuple[SavedRun, TraceReader]:
    """Read the lines of a run that were written so far, and return the run with a reader for further lines."""
    path = folder / ABOUT
    try:
        about = json.loads(path.read_text(encoding="utf-8"))
        sites, config = list(map(str, about["sites"])), Config(**about["config"])
    except (OSError, ValueError, KeyError, TypeError, ConfigError) as error:
        expected = "expected the sites and settings of a run, as this version of ace-plugins writes them"
        raise AceError(f"{path} cannot be read ({one_line(error)}): {expected}") from None
    run = SavedRun(folder, about, config, sites)
    run.values = {name: [[] for _ in sites] for name in QUANTITIES}
    reader = TraceReader(folder)
    run.add(reader.read_new())
    return run, reader


def read_run(folder: Path, label: str = "") -> SavedRun:
    """Read everything that can be read of a run, and note what cannot."""
    run, reader = open_run(folder)
    run.label = label
    missing, skipped = run.missing, reader.skipped + run.skipped
    if skipped:
        missing.append(f"{skipped} line{'s' * (skipped > 1)} of {LINES} cannot be read and are left out")
    if reader.truncated:
        missing.append(f"the last line of {LINES} is cut off and left out")
    if not run.steps:
        missing.append(f"{LINES} has no lines" if reader.path.exists() else f"{LINES} is missing")
    elif run.end is None:
        missing.append(f"the trace has no end: the run was killed after step {run.length:,} or is still training")
    for name in QUANTITIES:
        gaps = [site for site, values in zip(run.sites, run.values[name], strict=True) if any(map(math.isnan, values))]
        if gaps:
            more = f" and {len(gaps) - NAMED} more" if len(gaps) > NAMED else ""
            missing.append(f"{name} is not finite in some lines: {', '.join(gaps[:NAMED])}{more}")
    if any(math.isnan(value) for _, value in run.loss):
        missing.append("the loss is not finite in some lines")
    return run


def find_run(where: Path | None) -> Path:
    """Return the folder of one run: ``where`` itself, or the newest run in it. Default: the newest in .ace/runs."""
    if where is not None and where.name in (LINES, ABOUT) and where.is_file():
        where = where.parent
    if where is not None and not where.is_dir():
        raise AceError(f"no run {str(where)!r}: expected the folder of a run, or one with runs, such as {RUNS}")
    if where is not None and is_run(where):
        return where
    runs = where or default_runs()
    found = find_newest(runs) or (find_newest(where / RUNS) if where else None)
    if found is None:
        raise AceError(f"no runs in {runs}: expected folders with {LINES}; train with ACE here first, or name a run")
    return found


def default_runs(home: Path = Path()) -> Path:
    """Return the folder for new runs: the value of the environment variable ACE_RUNS, or .ace/runs in ``home``."""
    return Path(os.environ.get("ACE_RUNS") or home / RUNS)


def is_run(folder: Path) -> bool:
    return (folder / LINES).is_file() or (folder / ABOUT).is_file()


def find_newest(runs: Path) -> Path | None:
    """Return the run in ``runs`` that started last; None if there is none."""
    found: list[tuple[float, str, Path]] = []
    with contextlib.suppress(OSError):
        for folder in runs.iterdir():
            first = next((path for path in (folder / ABOUT, folder / LINES) if path.is_file()), None)
            if first is not None:
                found.append((first.stat().st_mtime, folder.name, folder))
    return max(found)[2] if found else None
