"""The files of a run in ``.ace/runs/<time>-<adapter>/``: ``run.json`` and ``trace.jsonl``, written, found and read.

Each line of the trace is passed to the operating system at once, so a killed process loses no line. Reading works for
runs that finished, were killed or are still training.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from ..errors import AceError, ConfigError
from ..plugins.plugin import one_line
from ..settings.config import SETTINGS, Config
from ..settings.sources import HOME, RUNS

ABOUT, LINES = "run.json", "trace.jsonl"
QUANTITIES = ("gamma", "lambda", "u")  # every line of a trace has each of these, with one value per site
NAMED = 4  # largest number of sites that a note names; it only counts the others
Curve = list[tuple[int, float]]


def create_run_folder(runs: Path, adapter: str) -> Path:
    """Create a folder for a run that starts now. Runs that start in the same second get different folders."""
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{adapter}"
    for number in count(1):
        folder = runs / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir(parents=True)
            break
        except FileExistsError:
            continue
    hide_from_git(runs.parent)
    return folder.resolve()


def hide_from_git(folder: Path) -> None:
    """Write a ``.gitignore`` into ``.ace``, so that runs do not show up as changes of the user's repository."""
    ignore = folder / ".gitignore"
    if folder.name == HOME and not ignore.exists():
        ignore.write_text("*\n", encoding="utf-8")


def append_line(folder: Path, line: Mapping[str, Any]) -> None:
    """Append a line to the trace. The file is closed after each line, so that forked processes do not share it."""
    with (folder / LINES).open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def finite_or_none(value: float) -> float | None:
    """Return the number, or None for NaN and infinities, which JSON cannot hold."""
    return value if math.isfinite(value) else None


def shorten_path(path: str | os.PathLike[str]) -> str:
    """Return the path relative to the current folder, if that is possible, else the path itself."""
    try:
        return os.path.relpath(path)
    except (OSError, ValueError):  # the current folder was deleted, or is on another drive
        return os.fspath(path)


class TraceReader:
    """Reads the lines of a trace, also while they are being written."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / LINES
        self.skipped = 0  # number of lines that cannot be used
        self.changed = 0.0  # time at which the file was last changed, in seconds since the epoch
        self._position = 0
        self._rest = b""

    @property
    def truncated(self) -> bool:
        """True if the last line does not end with a newline."""
        return bool(self._rest.strip())

    def read_new(self) -> list[dict[str, Any]]:
        """Return the complete lines that were added since the last call."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._position)
                added = file.read()
                self.changed = os.fstat(file.fileno()).st_mtime
        except FileNotFoundError:
            return []
        except OSError as error:
            raise AceError(f"{self.path} cannot be read, {error.strerror or error}; fix that and try again") from None
        self._position += len(added)
        *complete, self._rest = (self._rest + added).split(b"\n")
        lines = []
        for text in filter(bytes.strip, complete):
            try:
                line = json.loads(text)
            except ValueError:  # includes text that is not UTF-8
                line = None
            if isinstance(line, dict):
                lines.append(line)
            else:
                self.skipped += 1
        return lines


def read_trace(folder: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Return the lines of a run's trace, oldest first.

    Lines that were cut off by a kill or a full disk are left out.

        from ace_plugins import read_trace
        for line in read_trace(".ace/runs/20260102-101112-segnn"):
            print(line["step"], line["gamma"])

    Args:
        folder: The folder of one run, such as ``.ace/runs/<time>-<adapter>``.

    Returns:
        One dict per line, with ``step``, ``seconds`` since the start, and ``gamma``, ``lambda`` and ``u``: one number
        per site, in the order of ``sites`` in ``run.json``, or None if the number is not finite. ``landed`` lists the
        indices of the landed sites. ``held`` is, per site, |lambda| divided by the typical size of the loss's gradient
        at gamma, which is averaged over ``averaged`` steps. Lines may also have ``loss``, ``gradient`` (of the loss at
        gamma, per site), ``lr`` (per parameter group), ``error`` (equivariance error), ``test`` (mode auto) and
        ``event`` (a message). The last line of a finished run has ``finished``, ``verdicts`` (one per site) and
        ``verdict`` (of the run).

    Raises:
        AceError: If the folder has no trace, or the trace cannot be read.
    """
    reader = TraceReader(Path(folder))
    if not reader.path.is_file():
        raise AceError(f"no trace in {folder}: expected {LINES}; runs are under {RUNS}")
    return reader.read_new()


@dataclass
class SavedRun:
    """A run as its files describe it. Numbers that are missing or not finite are NaN."""

    folder: Path
    about: Mapping[str, Any]  # content of run.json
    config: Config
    sites: list[str]
    label: str  # name of the run within a comparison, otherwise empty
    reader: TraceReader
    lines: list[dict[str, Any]] = field(default_factory=list)  # lines with a step and with gamma, lambda, u per site

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
        """Label of the run, or its adapter and mode."""
        return self.label or ", ".join(filter(None, (self.adapter, self.mode)))

    @property
    def length(self) -> int:
        """Number of training steps up to the last line."""
        return max((line["step"] for line in self.lines), default=0)

    @property
    def duration(self) -> float:
        """Seconds up to the last line."""
        return max((value for _, value in self.curve("seconds") if math.isfinite(value)), default=0.0)

    @property
    def end(self) -> Mapping[str, Any] | None:
        """The last line of a finished run."""
        return next((line for line in reversed(self.lines) if line.get("finished")), None)

    @property
    def events(self) -> list[tuple[int, str]]:
        """Messages in the trace, each with its step."""
        return [(line["step"], str(line["event"])) for line in self.lines if line.get("event")]

    @property
    def errors(self) -> Curve:
        """Relative equivariance error of the model with branches, each with its step."""
        return [(line["step"], to_number(line["error"].get("relative"))) for line in self._measured]

    @property
    def group(self) -> str:
        """Symmetry group under which the equivariance error is measured, for example "SO(3)"."""
        return next((str(line["error"]["group"]) for line in self._measured if line["error"].get("group")), "")

    @property
    def _measured(self) -> list[dict[str, Any]]:
        return [line for line in self.lines if isinstance(line.get("error"), dict)]

    @property
    def changed(self) -> dict[str, Any]:
        """Settings that differ from the defaults."""
        values = {name: getattr(self.config, name) for name in SETTINGS}
        return {name: value for name, value in values.items() if value != SETTINGS[name].default}

    def curve(self, key: str) -> Curve:
        """Return the steps and values of a quantity that has one value per line, such as "loss"."""
        return [(line["step"], to_number(line[key])) for line in self.lines if key in line]

    def per_site(self, key: str) -> tuple[list[int], list[list[float]]]:
        """Return the steps of the lines that have this quantity, and for each site its values over time."""
        rows = [(line["step"], to_numbers(line.get(key))) for line in self.lines]
        rows = [(step, row) for step, row in rows if len(row) == len(self.sites)]
        return [step for step, _ in rows], [[row[n] for _, row in rows] for n in range(len(self.sites))]

    def last(self, key: str) -> list[float]:
        """Return the numbers under this key in the last line, one per site; an empty list if they are missing."""
        found = to_numbers(self.lines[-1].get(key)) if self.lines else []
        return found if len(found) == len(self.sites) else []

    def read_new(self) -> None:
        """Read the lines that were added to the trace since the last call."""
        for line in self.reader.read_new():
            step = to_number(line.get("step"))
            if math.isnan(step) or any(len(to_numbers(line.get(name))) != len(self.sites) for name in QUANTITIES):
                self.reader.skipped += 1
                continue
            test = line.get("test")
            self.lines.append({**line, **(test if isinstance(test, dict) else {}), "step": int(step)})

    @property
    def missing(self) -> list[str]:
        """Notes on what could not be read."""
        notes = []
        if skipped := self.reader.skipped:
            notes.append(f"{skipped} line{'s' * (skipped > 1)} of {LINES} cannot be read and are left out")
        if self.reader.truncated:
            notes.append(f"the last line of {LINES} is cut off and left out")
        if not self.lines:
            notes.append(f"{LINES} has no lines" if self.reader.path.exists() else f"{LINES} is missing")
        elif self.end is None:
            notes.append(f"the trace has no end: the run was killed after step {self.length:,} or is still training")
        for key in QUANTITIES:
            pairs = zip(self.sites, self.per_site(key)[1], strict=True)
            gaps = [site for site, values in pairs if any(map(math.isnan, values))]
            if gaps:
                more = f" and {len(gaps) - NAMED} more" if len(gaps) > NAMED else ""
                notes.append(f"{key} is not finite in some lines: {', '.join(gaps[:NAMED])}{more}")
        if any(math.isnan(value) for _, value in self.curve("loss")):
            notes.append("the loss is not finite in some lines")
        return notes


def to_number(value: Any) -> float:
    """Return a number as a float, and NaN for infinities and for anything that is not a number."""
    if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    return math.nan


def to_numbers(values: Any) -> list[float]:
    """Apply `to_number` to each element of a list; return an empty list for anything that is not a list."""
    return [to_number(value) for value in values] if isinstance(values, list) else []


def read_run(folder: Path, label: str = "") -> SavedRun:
    """Read the lines of a run that were written so far. `SavedRun.read_new` reads further lines."""
    path = folder / ABOUT
    try:
        about = json.loads(path.read_text(encoding="utf-8"))
        sites, config = list(map(str, about["sites"])), Config(**about["config"])
    except (OSError, ValueError, KeyError, TypeError, ConfigError) as error:
        expected = "expected the sites and settings of a run, as this version of ace-plugins writes them"
        raise AceError(f"{path} cannot be read ({one_line(error)}): {expected}") from None
    run = SavedRun(folder, about, config, sites, label, TraceReader(folder))
    run.read_new()
    return run


def default_runs(home: Path = Path()) -> Path:
    """Return the folder for new runs: the value of the environment variable ACE_RUNS, or .ace/runs in ``home``."""
    return Path(os.environ.get("ACE_RUNS") or home / RUNS)


def find_run(where: Path | None) -> Path:
    """Return the folder of one run: ``where`` itself, or the newest run in it. Default: the newest in .ace/runs."""
    folder = default_runs() if where is None else where.parent if where.name in (ABOUT, LINES) else where
    if (folder / ABOUT).is_file():
        return folder
    found = find_newest(folder) or find_newest(folder / RUNS)
    if found is None:
        expected = f"expected folders with {ABOUT} and {LINES}"
        raise AceError(f"no runs in {folder}: {expected}; train with ACE here first, or name a run")
    return found


def find_newest(runs: Path) -> Path | None:
    """Return the run in ``runs`` that started last; None if there is none."""
    found = [(path.stat().st_mtime, path.parent) for path in runs.glob(f"*/{ABOUT}")]
    return max(found)[1] if found else None
