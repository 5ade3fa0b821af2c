"""The live view of a run in progress."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from traces import write_run

from ace_plugins.report import terminal
from ace_plugins.report.tables import TableData, sparkline
from ace_plugins.report.terminal import watch_run


def grow(folder: Path, **line: Any) -> None:
    told = {"step": 0, "seconds": 0.0, "gamma": [0.5] * 3, "lambda": [0.0] * 3, "u": [0.0] * 3, **line}
    with (folder / "trace.jsonl").open("a") as file:
        file.write(json.dumps(told) + "\n")


def watched(folder: Path, monkeypatch: pytest.MonkeyPatch, *changes: Callable[[], object]) -> list[str]:
    """Return the view at the start and after each change."""
    views: list[str] = []

    class Shown:
        def __init__(self, **options: Any) -> None:
            self.console = Console(width=100)

        def __enter__(self) -> Shown:
            return self

        def __exit__(self, *error: object) -> None:
            pass

        def update(self, view: object, *, refresh: bool) -> None:
            with self.console.capture() as capture:
                self.console.print(view)
            views.append(capture.get())

    left = list(changes)

    def change(seconds: float) -> None:
        if not left:
            raise KeyboardInterrupt
        left.pop(0)()

    monkeypatch.setattr(terminal, "Live", Shown)
    monkeypatch.setattr(terminal.time, "sleep", change)
    with pytest.raises(KeyboardInterrupt):
        watch_run(folder)
    return views


def test_it_follows_the_file_as_it_grows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_run(tmp_path / "a", sites=3, lines=20, finished=False)
    begun, grown, ended = watched(
        folder,
        monkeypatch,
        lambda: grow(folder, step=210, seconds=10.5, gamma=[0.5, -0.25, None], loss=0.125),
        lambda: grow(folder, step=220, seconds=11.0, finished=True),
    )
    assert "egno, resilient: 200 steps, 10 s, 20 steps/s\n" in begun
    assert "layers.1.x" in begun
    assert "210 steps" in grown
    assert "−0.25" in grown
    assert "not finite" in grown
    assert " 0.125\n" in grown
    assert "finished" not in grown
    assert "finished" in ended


def test_a_run_that_has_only_begun_and_one_that_is_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_run(tmp_path / "a", sites=3)
    path = folder / "trace.jsonl"
    first = path.read_text().splitlines(keepends=True)[0]
    path.unlink()
    waiting, begun = watched(folder, monkeypatch, lambda: path.write_text(first))
    assert "0 steps" in waiting
    assert "no new line" not in waiting + begun
    assert "1 step" in begun
    monkeypatch.setattr(terminal.time, "time", lambda: os.stat(path).st_mtime + 420)
    (silent,) = watched(folder, monkeypatch)
    assert "no new line in the trace for 7 min" in silent


def test_sparklines() -> None:
    assert sparkline([1, 2, 3], [0.0, 1.0, 0.5], 3) == "▁█▅"
    assert sparkline([1, 2], [float("nan"), 1.0], 2) == "x▁"
    assert len(sparkline(list(range(1, 1001)), [0.0] * 1000, 24)) == 24
    assert sparkline([], []) == ""


def test_a_terminal_that_is_too_narrow_leaves_out_optional_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = TableData(["site", "over time"], [["a", "b"]], optional=["over time"])
    assert table.fit(20) is table
    assert (table.fit(19).headers, table.fit(19).rows) == (["site"], [["a"]])
    folder = write_run(tmp_path / "a", sites=3, lines=20)
    for width, shown in ((100, True), (60, False)):
        monkeypatch.setenv("COLUMNS", str(width))
        parts = terminal.draw_run(terminal.read_run(folder))
        (drawn,) = [part for part in parts if not isinstance(part, str)]
        assert ("over time" in [column.header for column in drawn.columns]) == shown
