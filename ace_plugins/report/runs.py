"""Runs found and read back from their folders, in any state: finished, killed, still training, partly unreadable."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import AceError, ConfigError
from ..settings.config import FORMER_LOOPS, REMOVED, SETTINGS, Config
from ..settings.sources import RUNS
from .trace import ABOUT, LINES, TraceReader

NAN = math.nan
QUANTITIES = ("gamma", "lambda", "u")
"""Present in every line, with one value per site."""
NAMED = 4
"""Number of sites that a note lists."""


@dataclass
class SavedRun:
    """A run as its files describe it. Numbers that are missing or not finite are NaN."""

    folder: Path
    about: Mapping[str, Any]
    """Content of run.json; empty if there is none."""
    config: Config | None
    """None if run.json has no settings."""
    sites: list[str]
    steps: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    values: dict[str, list[list[float]]] = field(default_factory=dict)
    """gamma, lambda and u: for each site one value per line."""
    loss: list[tuple[int, float]] = field(default_factory=list)
    rates: list[tuple[int, list[float]]] = field(default_factory=list)
    """Learning rates of the script's optimizer, one per parameter group."""
    errors: list[tuple[int, float]] = field(default_factory=list)
    """Relative equivariance error, with branches."""
    group: str = ""
    """Group of the equivariance error."""
    gradients: list[tuple[int, list[float]]] = field(default_factory=list)
    """Gradient of the loss at gamma, one per site."""
    held: dict[int, float] = field(default_factory=dict)
    """For each landed site |lambda| / s, computed from the mean of ``averaged`` gradients."""
    averaged: float = math.inf
    events: list[tuple[int, str]] = field(default_factory=list)
    end: Mapping[str, Any] | None = None
    """The last line of a finished run."""
    absent: set[str] = field(default_factory=set)
    """Quantities that some line lacks."""
    missing: list[str] = field(default_factory=list)
    """Notes on what could not be read."""
    label: str = ""
    """Name of the run within a comparison."""

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def adapter(self) -> str:
        return str(self.about.get("adapter") or "")

    @property
    def mode(self) -> str:
        return self.config.mode if self.config is not None else ""

    @property
    def title(self) -> str:
        return self.label or ", ".join(filter(None, (self.adapter, self.mode))) or self.name

    @property
    def length(self) -> int:
        """Number of training steps up to the last line."""
        return max(self.steps, default=0)

    @property
    def duration(self) -> float:
        """Seconds up to the last line."""
        return max(filter(math.isfinite, self.seconds), default=0.0)

    @property
    def settings(self) -> dict[str, Any]:
        """Settings in run.json, under the names of this version."""
        found = self.about.get("config")
        known = {k: v for k, v in found.items() if k not in REMOVED} if isinstance(found, dict) else {}
        return known | ({"loop": FORMER_LOOPS.get(str(known["loop"]), known["loop"])} if "loop" in known else {})

    @property
    def changed(self) -> dict[str, Any]:
        """Settings in run.json that differ from the defaults."""
        return {k: v for k, v in self.settings.items() if k not in SETTINGS or v != SETTINGS[k].default}

    def last(self, quantity: str) -> list[float]:
        """Return the last value of each site."""
        return [site[-1] if site else NAN for site in self.values[quantity]]

    def largest_gamma(self) -> list[tuple[int, float]]:
        """Return the largest |gamma| of each line, with its step."""
        lines = zip(*self.values["gamma"], strict=True)
        sizes = [max((abs(v) for v in line if math.isfinite(v)), default=NAN) for line in lines]
        return list(zip(self.steps, sizes, strict=False))

    def add(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Add lines of the trace."""
        for line in lines:
            step = to_number(line.get("step"))
            if math.isfinite(step):
                self._add(int(step), line)

    def _add(self, step: int, line: Mapping[str, Any]) -> None:
        self.steps.append(step)
        self.seconds.append(to_number(line.get("seconds")))
        for name in QUANTITIES:
            row = _numbers(line.get(name)) or []
            if len(row) < len(self.sites):
                self.absent.add(name)
            for number, values in enumerate(self.values[name]):
                values.append(row[number] if number < len(row) else NAN)
        if "loss" in line:
            self.loss.append((step, to_number(line["loss"])))
        if (rates := _numbers(line.get("lr"))) is not None:
            self.rates.append((step, rates))
        gradient = _numbers(line.get("gradient"))
        if gradient is not None and len(gradient) == len(self.sites):
            self.gradients.append((step, gradient))
        landed = line.get("landed")
        if isinstance(landed, dict):
            sites, held = _numbers(landed.get("sites")) or [], _numbers(landed.get("held")) or []
            self.held |= {int(s): value for s, value in zip(sites, held, strict=False) if math.isfinite(s)}
            self.averaged = to_number(landed.get("gradients"))
        error = line.get("error")
        if isinstance(error, dict):
            self.errors.append((step, to_number(error.get("relative"))))
            self.group = str(error.get("group") or self.group)
        if line.get("event"):
            self.events.append((step, str(line["event"])))
        if line.get("finished"):
            self.end = line


def to_number(value: Any) -> float:
    """Return NaN for infinities and for anything that is not a number."""
    if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    return NAN


def _numbers(values: Any) -> list[float] | None:
    return [to_number(value) for value in values] if isinstance(values, list) else None


def pick_evenly(length: int, most: int) -> list[int]:
    """Return at most ``most`` evenly spaced positions of a series, including the last one."""
    every = max(1, -(-length // most))
    return list(range(length - 1, -1, -every))[::-1]


def open_run(folder: Path) -> tuple[SavedRun, TraceReader]:
    """Read a run as far as it is written, and return it with the reader of further lines."""
    reader = TraceReader(folder)
    lines = reader.read_new()
    missing: list[str] = []
    about = _read_about(folder, missing)
    width = max((len(line["gamma"]) for line in lines if isinstance(line.get("gamma"), list)), default=0)
    found = about.get("sites")
    names = [str(name) for name in found] if isinstance(found, list) else []
    if about and width and width != len(names):
        missing.append(f"{ABOUT} names {len(names)} layers but the trace has {width}: names may be wrong")
    names += [f"site {number}" for number in range(len(names), width)]
    run = SavedRun(folder, about, None, names, missing=missing)
    run.config = _read_config(run)
    run.values = {name: [[] for _ in names] for name in QUANTITIES}
    run.add(lines)
    return run, reader


def read_run(folder: Path, label: str = "") -> SavedRun:
    """Read everything that can be read of a run, and note what cannot."""
    run, reader = open_run(folder)
    run.label = label
    missing = run.missing
    if not run.steps:
        missing.append(f"{LINES} has no lines" if reader.path.exists() else f"{LINES} is missing")
        return run
    if reader.skipped:
        missing.append(f"{reader.skipped} line{'s' * (reader.skipped > 1)} of {LINES} cannot be read and are left out")
    if reader.truncated:
        missing.append(f"the last line of {LINES} is cut off and left out")
    if run.end is None:
        missing.append(f"the trace has no end: the run was killed after step {run.length:,} or is still training")
    for name in QUANTITIES:
        gaps = [site for site, values in zip(run.sites, run.values[name], strict=True) if not _all_finite(values)]
        if gaps:
            problem = "missing" if name in run.absent else "not finite"
            more = f" and {len(gaps) - NAMED} more" if len(gaps) > NAMED else ""
            missing.append(f"{name} is {problem} in some lines: {', '.join(gaps[:NAMED])}{more}")
    if not _all_finite([value for _, value in run.loss]):
        missing.append("the loss is not finite in some lines")
    return run


def _all_finite(values: Sequence[float]) -> bool:
    return all(map(math.isfinite, values))


def _read_about(folder: Path, missing: list[str]) -> dict[str, Any]:
    problem = "cannot be read"
    try:
        about = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
        if isinstance(about, dict):
            return about
    except FileNotFoundError:
        problem = "is missing"
    except (OSError, ValueError):
        pass
    missing.append(f"{ABOUT} {problem}: the names of layers, the settings and the command are unknown")
    return {}


def _read_config(run: SavedRun) -> Config | None:
    """Return the settings that this version has. The run may come from an older or a newer one."""
    if "mode" not in run.settings:
        if run.about:
            run.missing.append(f"{ABOUT} has no settings: without the mode there are no verdicts")
        return None
    known = {key: value for key, value in run.settings.items() if key in SETTINGS}
    if unknown := run.settings.keys() - known.keys():
        run.missing.append(f"unknown settings: {', '.join(sorted(unknown))}")
    try:
        return Config(**known)
    except ConfigError as error:
        wrong = {key for key, _ in error.problems}
    run.missing.append(f"settings with unknown values: {', '.join(sorted(wrong))}")
    return None if "mode" in wrong else Config(**{key: value for key, value in known.items() if key not in wrong})


def find_run(where: Path | None) -> Path:
    """Return the folder of one run: ``where`` itself, or the newest run in it; without ``where``, in .ace/runs."""
    if where is None:
        where = default_runs()
        found = find_newest(where)
        if found is None:
            raise AceError(
                f"no runs in {where}: expected folders with {LINES}; train with ACE here first, or name a run"
            )
        return found
    if where.is_file() and where.name in (LINES, ABOUT):
        where = where.parent
    if not where.is_dir():
        raise AceError(f"no run {str(where)!r}: expected the folder of a run, or one with runs, such as {RUNS}")
    if is_run(where):
        return where
    found = find_newest(where) or find_newest(where / RUNS)
    if found is None:
        raise AceError(f"no run in {where}: expected {LINES} there or in folders below; runs are under {RUNS}")
    return found


def default_runs(home: Path = Path()) -> Path:
    """Return the folder that new runs are written to: ACE_RUNS, or .ace/runs in ``home``."""
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
