"""ace-patch report and ace-patch watch, as people call them."""

from __future__ import annotations

import json
import subprocess
import sys
from inspect import signature
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from traces import write_run

from ace_plugins.cli import runs
from ace_plugins.cli.main import cli


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("ACE_RUNS")
    monkeypatch.chdir(tmp_path)
    return tmp_path


# Before click 8.2 the two streams were one unless asked.
RUNNER = CliRunner(**({"mix_stderr": False} if "mix_stderr" in signature(CliRunner).parameters else {}))  # type: ignore[arg-type]


def call(*words: str) -> Result:
    return RUNNER.invoke(cli, words)


def test_the_newest_run_without_a_word(here: Path) -> None:
    folder = write_run(here / ".ace" / "runs" / "20260101-egno")
    done = call("report")
    assert (done.exit_code, done.stdout) == (0, f"Report: {Path('.ace/runs/20260101-egno/report.html')}\n")
    assert "egno, resilient" in (folder / "report.html").read_text(encoding="utf-8")


def test_several_runs_and_a_file_of_ones_own(here: Path) -> None:
    write_run(here / "a"), write_run(here / "b", mode="strict")
    assert call("report", "a", "b").exit_code == 0
    assert "2 runs side by side" in (here / "ace-report.html").read_text(encoding="utf-8")
    assert call("report", "a", "--out", "mine.html").exit_code == 0
    assert "side by side" not in (here / "mine.html").read_text(encoding="utf-8")


def test_text_and_json_write_no_file(here: Path) -> None:
    write_run(here / "a")
    done = call("report", "a", "--text")
    row = next(line for line in done.stdout.splitlines() if "layers.0.h" in line)
    assert "█" in row
    assert "▁" in row
    assert "breaks: the data breaks the symmetry here" in done.stdout
    told = json.loads(call("report", "a", "--json").stdout)
    assert told["runs"][0]["sites"][1]["verdict"] == "breaks"
    assert sorted(path.name for path in (here / "a").iterdir()) == ["run.json", "trace.jsonl"]
    assert sorted(path.name for path in here.iterdir()) == ["a"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["report"], "no runs in .ace/runs: expected folders with run.json and trace.jsonl; train with ACE"),
        (["report", "nowhere"], "no runs in nowhere: expected folders with run.json"),
        (["report", "."], "no runs in ."),
        (["report", ".", "--text", "--json"], "--text and --json cannot be combined: leave one of them out"),
        (["watch", "--once"], "no runs in .ace/runs"),
        (["watch", "nowhere"], "no runs in nowhere"),
    ],
)
def test_mistakes_are_told_in_one_line(here: Path, words: list[str], told: str) -> None:
    done = call(*words)
    assert done.exit_code == 2
    assert told in done.stderr
    assert done.stderr.count("\n") == 1


def test_watch_prints_the_report_once_where_there_is_no_terminal(here: Path) -> None:
    write_run(here / ".ace" / "runs" / "a", finished=False)
    for words in (["watch", "--once"], ["watch"], ["watch", ".ace/runs/a"], ["watch", "."]):
        done = call(*words)
        assert done.exit_code == 0
        assert "600 steps" in done.stdout
        assert "layers.1.x" in done.stdout
    assert done.stdout == call("report", "--text").stdout


def test_ctrl_c_leaves_quietly(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(folder: Path, *, seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(runs, "watch_run", stop)
    monkeypatch.setattr("click.testing._NamedTextIOWrapper.isatty", lambda stream: True)
    write_run(here / "a")
    done = call("watch", "a")
    assert (done.exit_code, done.stdout, done.stderr) == (0, "", "")


def test_neither_needs_torch(here: Path) -> None:
    write_run(here / "a")
    code = "import sys; from ace_plugins.cli import runs; print('torch' in sys.modules, 'matplotlib' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["False", "False"]
