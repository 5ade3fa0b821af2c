"""Files of a run: ``run.json`` and ``trace.jsonl`` in ``.ace/runs/<time>-<adapter>/``.

Each line of the trace is passed to the operating system at once, so a killed process loses no line. The folder is
created at the first training step: a model that is never trained leaves nothing behind.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import AceError
from ..output import finite_or_none as finite_or_none
from ..settings.sources import HOME, RUNS

ABOUT, LINES = "run.json", "trace.jsonl"


class TraceFile:
    """The folder of a run that is being recorded."""

    def __init__(self, runs: Path, adapter: str, about: Mapping[str, Any]) -> None:
        self.started = time.time()
        self.folder = create_run_folder(runs, adapter)
        (self.folder / ABOUT).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")

    def write(self, line: Mapping[str, Any]) -> None:
        """Append one line, with the seconds since the run started."""
        line = {"step": line["step"], "seconds": round(time.time() - self.started, 3), **line}
        # The file is opened for each line, so no file stays open after a model is deleted or in a forked process.
        with (self.folder / LINES).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


class TraceReader:
    """Reads the lines of a trace, also while they are being written."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / LINES
        self.skipped = 0  # number of lines that are not JSON objects
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
        per site, in the order of ``sites`` in ``run.json``, or None if the number is not finite. Lines may also have
        ``loss``, ``gradient`` (per site), ``lr`` (per parameter group), ``error`` (equivariance
        error), ``landed`` (newly landed sites) and ``event`` (a message). The last line of a finished run has
        ``finished``, ``verdicts`` (one per site) and ``verdict`` (of the run).

    Raises:
        AceError: If the folder has no trace, or the trace cannot be read.
    """
    reader = TraceReader(Path(folder))
    if not reader.path.is_file():
        raise AceError(f"no trace in {folder}: expected {LINES}; runs are under {RUNS}")
    return reader.read_new()


def shorten_path(path: str | os.PathLike[str]) -> str:
    """Return the path relative to the current folder, if that is possible, else the path itself."""
    try:
        return os.path.relpath(path)
    except (OSError, ValueError):  # the current folder was deleted, or is on another drive
        return os.fspath(path)


def create_run_folder(runs: Path, adapter: str) -> Path:
    """Create a folder for a run that starts now. Runs that start in the same second get different folders."""
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{adapter}"
    number = 1
    while True:
        folder = runs / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir(parents=True)
            hide_from_git(runs.parent)
            return folder.resolve()
        except FileExistsError:
            number += 1


def hide_from_git(folder: Path) -> None:
    """Write a ``.gitignore`` into ``.ace``, so that runs do not show up as changes of the user's repository."""
    ignore = folder / ".gitignore"
    if folder.name == HOME and not ignore.exists():
        ignore.write_text("*\n", encoding="utf-8")
