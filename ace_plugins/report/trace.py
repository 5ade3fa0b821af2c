"""The trace of a run on disk: JSON lines under ``.ace/runs/<time>-<adapter>/``.

Every line is handed to the operating system when it is written, so a killed process loses none of them. The folder is
made at a model's first step: a model that is never trained leaves nothing behind.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..errors import AceError
from ..settings.sources import HOME, RUNS

ABOUT, LINES = "run.json", "trace.jsonl"


class TraceFile:
    """The folder of one run."""

    def __init__(self, runs: Path, adapter: str, about: Mapping[str, Any]) -> None:
        self.started = time.time()
        self.folder = fresh(runs, adapter)
        (self.folder / ABOUT).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")

    def write(self, line: Mapping[str, Any]) -> None:
        line = {"step": line["step"], "seconds": round(time.time() - self.started, 3), **line}
        # Opened for each line: nothing to leak when a model is dropped, nothing shared with a forked worker.
        with (self.folder / LINES).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def finite(value: float) -> float | None:
    """JSON knows no others."""
    return value if math.isfinite(value) else None


def relative(path: str | os.PathLike[str]) -> str:
    """As people read it: from the current folder."""
    try:
        return os.path.relpath(path)
    except (OSError, ValueError):  # the current folder is gone, or on another drive
        return os.fspath(path)


def fresh(runs: Path, adapter: str) -> Path:
    """A folder for a run that starts now. Runs that start in the same second do not share one."""
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{adapter}"
    number = 1
    while True:
        folder = runs / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir(parents=True)
            keep_out_of_git(runs.parent)
            return folder.resolve()
        except FileExistsError:
            number += 1


def keep_out_of_git(folder: Path) -> None:
    """What runs leave behind is not the work of whoever's checkout this is."""
    ignore = folder / ".gitignore"
    if folder.name == HOME and not ignore.exists():
        ignore.write_text("*\n", encoding="utf-8")


def read_trace(folder: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The lines of a run. Those that a kill or a full disk has cut off are left out."""
    path = Path(folder) / LINES
    if not path.is_file():
        raise AceError(f"no trace in {folder}: expected {LINES}; runs are under {RUNS}")
    told = []
    for line in path.read_bytes().split(b"\n")[:-1]:
        with suppress(ValueError):
            told.append(json.loads(line))
    return [line for line in told if isinstance(line, dict)]
