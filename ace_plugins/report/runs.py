"""What is known of one run, line by line of its trace.

Runs found and read back from their folders, in whatever state they were left: finished, killed, half written.
"""

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
from .trace import ABOUT, LINES

NAN = math.nan
QUANTITIES = ("gamma", "lambda", "u")
"""What every line has of every site."""


@dataclass
class Run:
    """What is known of one run. Numbers that are missing or not finite are NaN."""

    folder: Path
    about: Mapping[str, Any]
    """What run.json says; empty if there is none."""
    config: Config | None
    """None if run.json does not say."""
    sites: list[str]
    steps: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    values: dict[str, list[list[float]]] = field(default_factory=lambda: {name: [] for name in QUANTITIES})
    """gamma, lambda and u: of every site a value for every line."""
    loss: list[tuple[int, float]] = field(default_factory=list)
    rates: list[tuple[int, list[float]]] = field(default_factory=list)
    """The live learning rates of the script's optimizer."""
    errors: list[tuple[int, float]] = field(default_factory=list)
    """The relative equivariance error, with branches."""
    group: str = ""
    """Under which it was measured."""
    gradients: list[tuple[int, list[float]]] = field(default_factory=list)
    """Of the loss at gamma, one for every site."""
    landings: dict[int, float] = field(default_factory=dict)
    """Sites that have landed by themselves, with how hard lambda has to hold them, as the mean of ``averaged``
    gradients."""
    averaged: float = math.inf
    events: list[tuple[int, str]] = field(default_factory=list)
    end: Mapping[str, Any] | None = None
    """The last line of a run that came to its end."""
    absent: set[str] = field(default_factory=set)
    """Of gamma, lambda and u, those that a line left out."""
    missing: list[str] = field(default_factory=list)
    """What a reader should know is not there."""
    label: str = ""
    """What somebody who has many runs calls this one."""

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
        """Steps, as far as the trace goes."""
        return max(self.steps, default=0)

    @property
    def lasted(self) -> float:
        """Seconds, as far as the trace goes."""
        return max((value for value in self.seconds if math.isfinite(value)), default=0.0)

    def now(self, quantity: str) -> list[float]:
        """Its last values, one for every site."""
        return [site[-1] if site else NAN for site in self.values[quantity]]

    def first(self, quantity: str) -> list[float]:
        """Its first values, one for every site."""
        return [site[0] if site else NAN for site in self.values[quantity]]

    def largest(self) -> list[float]:
        """The largest |gamma| of every line."""
        return [
            max((abs(v) for v in at if math.isfinite(v)), default=NAN) for at in zip(*self.values["gamma"], strict=True)
        ]

    def changed(self) -> dict[str, Any]:
        """The settings that are not the defaults, as run.json has them."""
        told = self.about.get("config")
        told = told if isinstance(told, dict) else {}
        return {key: value for key, value in told.items() if key not in SETTINGS or value != SETTINGS[key].default}

    def add(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """More lines of the trace."""
        for line in lines:
            step = _number(line.get("step"))
            if not math.isfinite(step):
                continue
            self._add(int(step), line)

    def _add(self, step: int, line: Mapping[str, Any]) -> None:
        self.steps.append(step)
        self.seconds.append(_number(line.get("seconds")))
        for name in QUANTITIES:
            told = line.get(name)
            row = [_number(value) for value in told] if isinstance(told, list) else []
            if len(row) < len(self.sites):
                self.absent.add(name)
            for number, column in enumerate(self.values[name]):
                column.append(row[number] if number < len(row) else NAN)
        if "loss" in line:
            self.loss.append((step, _number(line["loss"])))
        if isinstance(line.get("lr"), list):
            self.rates.append((step, [_number(value) for value in line["lr"]]))
        gradient = line.get("gradient")
        if isinstance(gradient, list) and len(gradient) == len(self.sites):
            self.gradients.append((step, [_number(value) for value in gradient]))
        self._land(line.get("landed"))
        error = line.get("error")
        if isinstance(error, dict):
            self.errors.append((step, _number(error.get("relative"))))
            self.group = str(error.get("group") or self.group)
        if line.get("event"):
            self.events.append((step, str(line["event"])))
        if line.get("finished"):
            self.end = line

    def _land(self, told: Any) -> None:
        sites, held = (told.get("sites"), told.get("held")) if isinstance(told, dict) else (None, None)
        if isinstance(sites, list) and isinstance(held, list) and len(sites) == len(held):
            self.landings |= {int(site): _number(value) for site, value in zip(sites, held, strict=True)}
            self.averaged = _number(told.get("gradients"))


def _number(value: Any) -> float:
    """NaN for what is no number, and for infinities: nobody can draw them."""
    if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    return NAN


class Follower:
    """The lines of a trace, as they are written."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / LINES
        self.garbled = 0
        """Lines that are no JSON object."""
        self._place = 0
        self._rest = b""

    @property
    def cut_off(self) -> bool:
        """The last line has no end yet, or never got one."""
        return bool(self._rest.strip())

    def poll(self) -> list[dict[str, Any]]:
        """The lines that are new. A line counts once its end is there."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._place)
                fresh = file.read()
        except FileNotFoundError:
            return []
        except OSError as error:
            raise AceError(f"{self.path} cannot be read, {error.strerror or error}; mend that and try again") from None
        self._place += len(fresh)
        *whole, self._rest = (self._rest + fresh).split(b"\n")
        lines = []
        for text in whole:
            try:
                told = json.loads(text)
            except ValueError:  # of which a text that is no UTF-8 is one
                told = None
            if isinstance(told, dict):
                lines.append(told)
            elif text.strip():
                self.garbled += 1
        return lines


def read_run(folder: Path, label: str = "") -> Run:
    """Everything that can be read of a run, and what cannot."""
    run, follower = opened(folder)
    run.label = label
    _take_stock(run, follower)
    return run


def opened(folder: Path) -> tuple[Run, Follower]:
    """A run as far as it is written, and what reads on."""
    follower = Follower(folder)
    lines = follower.poll()
    missing: list[str] = []
    about = _about(folder, missing)
    widths = [len(line["gamma"]) for line in lines if isinstance(line.get("gamma"), list)]
    told = about.get("sites")
    names = [str(name) for name in told] if isinstance(told, list) else []
    if not names and widths:
        names = [f"site {number}" for number in range(max(widths))]
        if about:
            missing.append(f"{ABOUT} has no names of layers: they are numbered")
    elif widths and max(widths) != len(names):
        missing.append(f"{ABOUT} names {len(names)} layers, the trace has {max(widths)}: the names may not fit")
        names += [f"site {number}" for number in range(len(names), max(widths))]
    run = Run(folder, about, _config(about, missing), names, missing=missing)
    run.values = {name: [[] for _ in names] for name in QUANTITIES}
    run.add(lines)
    return run, follower


def find_run(where: Path | None) -> Path:
    """The folder of one run: the one that is named, or the newest below it; without a name, of the current folder."""
    if where is None:
        where = Path(os.environ.get("ACE_RUNS") or RUNS)
        found = newest(where)
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
    found = newest(where) or newest(where / RUNS)
    if found is None:
        raise AceError(f"no run in {where}: expected {LINES} there or in folders below; runs are under {RUNS}")
    return found


def is_run(folder: Path) -> bool:
    return (folder / LINES).is_file() or (folder / ABOUT).is_file()


def newest(runs: Path) -> Path | None:
    """The run that began last; None if there is none."""
    found: list[tuple[float, str, Path]] = []
    with contextlib.suppress(OSError):
        for folder in runs.iterdir():
            about = next((path for path in (folder / ABOUT, folder / LINES) if path.is_file()), None)
            if about is not None:
                found.append((about.stat().st_mtime, folder.name, folder))
    return max(found)[2] if found else None


def _about(folder: Path, missing: list[str]) -> dict[str, Any]:
    path = folder / ABOUT
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        missing.append(f"{ABOUT} is missing: layers have no names, and settings and command are not known")
        return {}
    except (OSError, ValueError):
        told = None
    if not isinstance(told, dict):
        missing.append(f"{ABOUT} cannot be read: layers have no names, and settings and command are not known")
        return {}
    return told


def _config(about: Mapping[str, Any], missing: list[str]) -> Config | None:
    """The settings that this version knows. A record may come from an older or a newer one."""
    told = about.get("config")
    if not isinstance(told, dict) or "mode" not in told:
        if about:
            missing.append(f"{ABOUT} has no settings: there are no verdicts without the mode")
        return None
    known = {key: value for key, value in told.items() if key in SETTINGS}
    if (loop := str(known.get("loop"))) in FORMER_LOOPS:
        known["loop"] = FORMER_LOOPS[loop]
    strange = [key for key in told if key not in SETTINGS and key not in REMOVED]
    if strange:
        missing.append(f"settings this version does not know: {', '.join(strange)}")
    try:
        return Config(**known)
    except ConfigError as error:
        wrong = {key for key, _ in error.problems}
        missing.append(f"settings whose values this version does not know: {', '.join(sorted(wrong))}")
        if "mode" in wrong:
            return None
        return Config(**{key: value for key, value in known.items() if key not in wrong})


def _take_stock(run: Run, follower: Follower) -> None:
    """What a reader of this trace should know is not there."""
    if not run.steps:
        run.missing.append(f"{LINES} has no lines" if follower.path.exists() else f"{LINES} is missing")
        return
    if follower.garbled:
        run.missing.append(f"{follower.garbled} line{'s' * (follower.garbled > 1)} of {LINES} cannot be read: left out")
    if follower.cut_off:
        run.missing.append(f"the last line of {LINES} is cut off: left out")
    if run.end is None:
        run.missing.append(f"the trace has no end: the run was killed after step {run.length:,}, or is still under way")
    for name in QUANTITIES:
        gaps = [site for site, values in zip(run.sites, run.values[name], strict=True) if not _all_finite(values)]
        if gaps:
            told = ", ".join(gaps[:4]) + (f" and {len(gaps) - 4} more" if len(gaps) > 4 else "")
            how = "is missing" if name in run.absent else "is not finite"
            run.missing.append(f"{name} {how} in some lines: {told}")
    if run.loss and not _all_finite([value for _, value in run.loss]):
        run.missing.append("the loss is not finite in some lines")


def _all_finite(values: Sequence[float]) -> bool:
    return all(map(math.isfinite, values))
