"""The live view of a run in progress."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from traces import write_run

from ace_plugins.report import watch as watching
from ace_plugins.report.charts import sparkline
from ace_plugins.report.watch import RunWatcher, draw_bar, follow


def text_of(renderable: object) -> str:
    console = Console(width=100)
    with console.capture() as capture:
        console.print(renderable)
    return capture.get()


def grow(folder: Path, **line: Any) -> None:
    told = {"step": 0, "seconds": 0.0, "gamma": [0.5] * 3, "lambda": [0.0] * 3, "u": [0.0] * 3, **line}
    with (folder / "trace.jsonl").open("a") as file:
        file.write(json.dumps(told) + "\n")


def test_it_follows_the_file_as_it_grows(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", sites=3, lines=20, finished=False)
    watch = RunWatcher(folder)
    drawn = text_of(watch.draw())
    assert "egno, resilient" in drawn
    assert "step 200, 10 s, 19.9 steps/s" in drawn
    assert "layers.1.x" in drawn
    grow(folder, step=210, seconds=10.5, gamma=[0.5, -0.25, None], loss=0.125)
    watch.look()
    drawn = text_of(watch.draw())
    assert "step 210" in drawn
    assert "−0.25" in drawn
    assert "not finite" in drawn
    assert "loss 0.125 " in drawn
    assert "finished" not in drawn
    grow(folder, step=220, seconds=11.0, finished=True)
    watch.look()
    assert "finished" in text_of(watch.draw())


def test_a_run_that_has_only_begun_and_one_that_is_silent(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", sites=3)
    whole = (folder / "trace.jsonl").read_text()
    (folder / "trace.jsonl").unlink()
    watch = RunWatcher(folder)
    assert "waiting for the first line" in text_of(watch.draw())
    (folder / "trace.jsonl").write_text(whole[: whole.index("\n") + 1])
    watch.look()
    assert "step 1" in text_of(watch.draw())
    stamp = os.stat(folder / "trace.jsonl").st_mtime
    assert "no new line for 7 min" in text_of(RunWatcher(folder, clock=lambda: stamp + 420).draw())


def test_it_goes_over_to_a_newer_run(tmp_path: Path) -> None:
    old = write_run(tmp_path / "runs" / "1-egno")
    watch, stays = RunWatcher(old, runs=tmp_path / "runs"), RunWatcher(old)
    new = write_run(tmp_path / "runs" / "2-egno", mode="strict")
    os.utime(new / "run.json", (4e9, 4e9))
    for _ in range(5):
        watch.look()
        stays.look()
    assert (watch.folder, stays.folder) == (new, old)
    assert "egno, strict" in text_of(watch.draw())


def test_of_many_layers_those_that_matter_are_shown(tmp_path: Path) -> None:
    drawn = text_of(RunWatcher(write_run(tmp_path / "a", sites=40)).draw(5))
    assert "and 35 layers with a smaller |gamma|" in drawn
    assert "layers.19.h" in drawn
    assert "layers.0.x" not in drawn


def test_without_a_terminal_following_prints_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_run(tmp_path / "a", sites=3, lines=20, finished=False)
    looks = iter([lambda: None, lambda: grow(folder, step=210, seconds=10.5, loss=0.5), lambda: None])
    monkeypatch.setattr(watching.time, "sleep", lambda seconds: next(looks)())
    count = iter([False, False, False, True])
    follow(RunWatcher(folder), until=lambda: next(count))
    told = capsys.readouterr().out.splitlines()
    assert len(told) == 2, "a line only where there is news"
    assert told[0].startswith("a: step 200, 10 s, 19.9 steps/s, loss ")
    assert told[1] == "a: step 210, 10 s, 19.9 steps/s, loss 0.5, |gamma| up to 0.5"


def test_bars_and_sparklines() -> None:
    assert draw_bar(1.0, 1.0).count("━") == 16
    assert draw_bar(-0.001, 1.0) == "━" + " " * 15 + "-"
    assert draw_bar(float("nan"), 1.0) == ""
    assert sparkline([1, 2, 3], [0.0, 1.0, 0.5], 3) == "▁█▅"
    assert sparkline([1, 2], [float("nan"), 1.0], 2) == "x▁"
    assert len(sparkline(list(range(1, 1001)), [0.0] * 1000, 24)) == 24
    assert sparkline([], []) == ""
