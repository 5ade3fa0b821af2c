"""Creates, finds and reads run folders ``.ace/runs/<time>-<adapter>/``, which hold ``run.json`` and ``trace.jsonl``.

Each line of the trace is passed to the operating system at once, so a killed process loses no line. A trace that gets
too long is thinned. Reading works for runs that finished, were killed or are still training.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from ..errors import AceError, ConfigError
from ..output import publish
from ..plugins.plugin import one_line
from ..settings.config import SETTINGS, Config
from ..settings.sources import HOME, RUNS

ABOUT, LINES, LEFT = "run.json", "trace.jsonl", "left.json"
QUANTITIES = ("gamma", "lambda", "u")  # every line of a trace has each of these, with one value per site
MOST_LINES = 10_000  # a longer trace loses every second line; even, so that the last line stays
Curve = list[tuple[int, float]]


def create_run_folder(runs: Path, adapter: str) -> Path:
    """Create a folder for a run that starts now. Runs that start in the same second get different folders."""
    refuse_links(runs)
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
    if folder.name == HOME:
        with suppress(FileExistsError), (folder / ".gitignore").open("x", encoding="utf-8") as ignore:
            ignore.write("*\n")


def refuse_links(folder: Path) -> None:
    """Raise an AceError if ``.ace`` or a folder in it is a link. Links in a stranger's clone may point to any file."""
    path = folder.absolute()
    inside = [path, *path.parents][: [*reversed(path.parts)].index(HOME) + 1] if HOME in path.parts else []
    if link := next((each for each in inside if each.is_symlink()), None):
        do = "remove it, or set ACE_RUNS to a folder outside (report, compare: --out)"
        raise AceError(f"{link} is a link: ACE writes no files through links in {HOME}; {do}")


def to_json(value: Any) -> Any:
    """Replace NaN and infinities, which JSON cannot hold, by None.

    Args:
        value: A number, or nested dicts, lists and tuples.

    Returns:
        The value, with lists in place of tuples.
    """
    if isinstance(value, Mapping):
        return {key: to_json(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def shorten_path(path: str | os.PathLike[str]) -> str:
    """Return the path relative to the current folder, if that is possible, else the path itself."""
    try:
        return os.path.relpath(path)
    except (OSError, ValueError):  # the current folder was deleted, or is on another drive
        return os.fspath(path)


def read_trace(folder: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Return the lines of a run's trace, oldest first.

    Lines that were cut off by a kill or a full disk are left out. A trace has at most 10,000 lines: each time it gets
    longer, every second line is removed, and further lines are written half as often.

        from ace_plugins import read_trace
        for line in read_trace(".ace/runs/20260102-101112-segnn"):
            print(line["step"], line["gamma"])

    Args:
        folder: The folder of one run, such as ``.ace/runs/<time>-<adapter>``.

    Returns:
        One dict per line, with ``step``, ``seconds`` since the start, and ``gamma``, ``lambda`` and ``u``: one number
        per site, in the order of ``sites`` in ``run.json``, or None if the number is not finite. ``landed`` lists the
        indices of the landed sites, and ``unused`` those that never had a gradient. ``budget`` is the length of the run
        in steps, or None if it is unknown. ``expected`` is the same, or an assumed length if it is unknown. Lines may
        also have ``loss``, ``gradient`` (of the loss at gamma, per site), ``lr`` (per parameter group), ``error``
        (equivariance error), ``test`` (mode auto), ``diverged`` (if the last gradients were not finite), ``loaded``
        (step of the earlier checkpoint that was loaded last) and ``event`` (a message). The last line has ``finished``,
        or ``interrupted`` if a signal or an error ended the run before its budget.

    Raises:
        AceError: If the folder has no trace, or the trace cannot be read.
    """
    if not (Path(folder) / LINES).is_file():
        raise AceError(f"no trace in {folder}: expected {LINES}; runs are under {RUNS}")
    return _read_lines(Path(folder))[0]


def _read_lines(folder: Path) -> tuple[list[dict[str, Any]], int]:
    """Return the lines of a trace, and the number of lines that cannot be read, such as one cut off by a kill."""
    try:
        texts = [text for text in (folder / LINES).read_bytes().split(b"\n") if text.strip()]
    except FileNotFoundError:
        return [], 0
    except OSError as error:
        raise AceError(f"{folder / LINES} cannot be read, {error.strerror or error}; fix that and try again") from None
    lines = []
    for text in texts:
        with suppress(ValueError):  # includes text that is not UTF-8
            if isinstance(line := json.loads(text), dict):
                lines.append(line)
    return lines, len(texts) - len(lines)


def thin_trace(folder: Path) -> int:
    """Remove every second line of a trace, except events and landings. Return the number of lines that are left."""
    kept: list[bytes] = []
    before: Any = []
    for number, text in enumerate((folder / LINES).read_bytes().splitlines(keepends=True)):
        line = json.loads(text)
        if number % 2 == 0 or "event" in line or line["landed"] != before:
            kept.append(text)
        before = line["landed"]
    publish(folder / LINES, b"".join(kept))
    return len(kept)


@dataclass
class SavedRun:
    """A run as its files describe it. Numbers that are missing or not finite are NaN."""

    folder: Path
    about: Mapping[str, Any]  # content of run.json
    config: Config
    sites: list[str]
    label: str  # name of the run within a comparison, otherwise empty
    lines: list[dict[str, Any]]  # lines of the trace that have the step, and gamma, lambda and u of every site
    skipped: int  # number of other lines
    symmetry: Mapping[str, Any] = field(default_factory=dict)  # content of left.json; empty without this file

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
        return max((line["step"] for line in self.lines), default=0)

    @property
    def budget(self) -> int | None:
        """Number of steps that the run is expected to have; None if unknown."""
        found = to_number(self.lines[-1].get("budget")) if self.lines else math.nan
        return None if math.isnan(found) else int(found)

    @property
    def landed_at(self) -> int | None:
        """Step in which the last site landed for good; 0 if this was before the trace; None if not all have landed."""
        step = None
        for line in reversed(self.lines if self.sites else []):
            if len(to_numbers(line.get("landed"))) < len(self.sites):
                return step
            step = line["step"]
        return None if step is None else 0

    @property
    def progress(self) -> str:
        return describe_progress(self.length, self.budget, self.landed_at, now=self.end is None)

    @property
    def rate(self) -> float:
        """Steps per second in this process: a run that resumed from a checkpoint does not start at step 0."""
        first = min((line["step"] for line in self.lines), default=0)
        return (self.length - first + 1) / self.duration if self.duration else 0.0

    @property
    def left(self) -> float | None:
        """Expected seconds until the end, at the pace of the second half of the trace; None if unknown."""
        times = [(step, value) for step, value in self.curve("seconds") if math.isfinite(value)]
        if self.end is not None or len(times) < 2 or self.budget is None or self.budget <= self.length:
            return None
        (first, begun), (last, now) = times[(len(times) - 1) // 2], times[-1]
        return (self.budget - last) * (now - begun) / (last - first) if last > first else None

    @property
    def duration(self) -> float:  # in seconds
        return max((value for _, value in self.curve("seconds") if math.isfinite(value)), default=0.0)

    @property
    def end(self) -> Mapping[str, Any] | None:
        """The last line of a run that has finished, or was interrupted by a signal or an error."""
        return next((line for line in reversed(self.lines) if line.get("finished") or line.get("interrupted")), None)

    @property
    def state(self) -> str:
        return "not finished" if self.end is None else "interrupted" if self.end.get("interrupted") else "finished"

    @property
    def events(self) -> list[tuple[int, str]]:
        """Messages in the trace, each with its step."""
        return [(line["step"], str(line["event"])) for line in self.lines if line.get("event")]

    @property
    def group(self) -> str:
        """Symmetry group under which the equivariance error is measured, for example "SO(3)"."""
        return next((str(line["group"]) for line in self.lines if line.get("group")), "")

    @property
    def changed(self) -> dict[str, Any]:
        """Settings that differ from the defaults."""
        values = vars(self.config)
        return {name: values[name] for name, field in SETTINGS.items() if values[name] != field.default}

    @property
    def missing(self) -> list[str]:
        """Notes on parts that could not be read."""
        notes = [f"lines of {LINES} that cannot be read and are left out: {self.skipped}"] if self.skipped else []
        if not self.lines:
            notes.append(f"{LINES} has no lines")
        elif self.end is None:
            notes.append(f"the trace has no end: the run was killed after step {self.length:,} or is still training")
        return notes

    def curve(self, key: str) -> Curve:
        """Return the steps and values of a quantity with one value per line: "loss" or the equivariance "error"."""
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


def describe_progress(steps: int, budget: int | None, landed_at: int | None, *, now: bool = False) -> str:
    """Describe the progress of a run, as in ``landed at step 37, now 120 of 400 steps``."""
    of = f" of {budget:,}" if budget is not None and budget >= steps else ""
    made = f"{steps:,}{of} steps"
    if landed_at is None:
        return made
    return f"landed{f' at step {landed_at:,}' if landed_at else ''}, {'now ' if now else ''}{made}"


def to_number(value: Any) -> float:
    """Return a number as a float, and NaN for infinities and for anything that is not a number."""
    if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    return math.nan


def to_numbers(values: Any) -> list[float]:
    """Apply `to_number` to each element of a list; return an empty list for anything that is not a list."""
    return [to_number(value) for value in values] if isinstance(values, list) else []


def read_run(folder: Path, label: str = "") -> SavedRun:
    """Read the files of a run that has ended or is still training."""
    path = folder / ABOUT
    try:
        about = json.loads(path.read_text(encoding="utf-8"))
        sites, config = list(map(str, about["sites"])), Config(**about["config"])
    except (OSError, ValueError, KeyError, TypeError, ConfigError) as error:
        expected = "expected the sites and settings of a run, as this version of ace-plugins writes them"
        raise AceError(f"{path} cannot be read ({one_line(error)}): {expected}") from None
    lines, skipped = _read_lines(folder)
    run = SavedRun(folder, about, config, sites, label, [], skipped, _read_left(folder))
    for line in lines:
        step, measured, test = to_number(line.get("step")), line.pop("error", None), line.pop("test", None)
        if math.isnan(step) or any(len(to_numbers(line.get(name))) != len(sites) for name in QUANTITIES):
            run.skipped += 1
            continue
        line |= test if isinstance(test, dict) else {}
        if isinstance(measured, dict):
            line |= {"error": measured.get("relative"), "group": measured.get("group")}
        run.lines.append({**line, "step": int(step)})
    return run


def _read_left(folder: Path) -> dict[str, Any]:
    """Return the content of left.json: the sentence, rows of the table and points of the map; empty without it."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        found = json.loads((folder / LEFT).read_text(encoding="utf-8"))
        rows = [
            (str(s["name"]), *(to_number(s[key]) for key in ("error", "low", "high")), str(s["verdict"]))
            for s in found["subgroups"]
        ]
        points = [(to_numbers(axis), to_number(error)) for axis, error in found["axes"]]
        points = [point for point in points if len(point[0]) == 3]
        return {"sentence": str(found["sentence"]), "rows": rows, "points": points}
    return {}


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
        raise AceError(f"no runs in {folder}: {expected}; train with ACE here first, or give the folder of a run")
    return found


def find_newest(runs: Path) -> Path | None:
    """Return the run in ``runs`` that started last; None if there is none."""
    found = [(path.stat().st_mtime, path.parent) for path in runs.glob(f"*/{ABOUT}")]
    return max(found)[1] if found else None
