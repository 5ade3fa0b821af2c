"""ace-patch report and ace-patch watch, as people call them."""

from __future__ import annotations

import json
import subprocess
import sys
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result
from traces import write_run

from ace_plugins.cli import runs
from ace_plugins.cli.main import cli
from ace_plugins.errors import AceError
from ace_plugins.output import printable
from ace_plugins.plugins.registry import registry
from ace_plugins.report.trace import create_run_folder
from ace_plugins.testing.checks import check_importing_is_light


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


def test_nothing_is_written_through_a_link(here: Path) -> None:
    folder = write_run(here / ".ace" / "runs" / "20260101-egno", command=["ssh-rsa attacker"])
    mine = here / "mine"
    mine.write_text("mine")
    (folder / "report.html").symlink_to(mine)
    assert call("report").exit_code == 0
    assert mine.read_text() == "mine"
    assert "<html" in (folder / "report.html").read_text(encoding="utf-8")
    (here / "outside").mkdir()
    folder.rename(here / "outside" / "20260101-egno")
    folder.symlink_to(here / "outside" / "20260101-egno")
    (folder / "report.html").unlink()
    done = call("report")
    assert done.exit_code == 2
    assert "20260101-egno is a link" in done.stderr
    assert not (folder / "report.html").exists()
    assert call("report", "--out", "mine.html").exit_code == 0
    (here / "clone").mkdir()
    (here / "clone" / ".ace").symlink_to(here / "outside")
    with pytest.raises(AceError, match="is a link"):
        create_run_folder(here / "clone" / ".ace" / "runs", "egno")
    (here / "other" / ".ace").mkdir(parents=True)
    (here / "other" / ".ace" / ".gitignore").symlink_to(here / "new")
    create_run_folder(here / "other" / ".ace" / "runs", "egno")
    assert not (here / "new").exists()


def test_control_characters_are_escaped(here: Path) -> None:
    write_run(here / "a", sites=1, names=["layer\x1b[2J\u202e"], adapter="eg\x9b2Jno", finished=False)
    for command in (("report", "a", "--text"), ("watch", "a"), ("report", "\x1b[2J")):
        done = call(*command)
        message = done.stdout + done.stderr
        assert not {"\x1b", "\x9b", "\u202e"} & set(message), command
        assert r"\x1b[2J" in message
    assert printable("a\tb\r\nc\rd\x07é–日") == "a\tb\r\nc\\rd\\x07é–日"


def test_a_module_of_the_current_folder_is_not_imported(here: Path) -> None:
    (here / "click.py").write_text("print('imported')")
    (here / "ace_schnet.py").write_text("raise SystemExit('imported')")
    done = subprocess.run([sys.executable, "-m", "ace_plugins", "list"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "imported" not in done.stdout
    kit: Any = SimpleNamespace(plugin=registry().adapter("schnet"))
    check_importing_is_light(kit)  # as doctor does, in a new process


def test_text_and_json_write_no_file(here: Path) -> None:
    write_run(here / "a")
    done = call("report", "a", "--text")
    row = next(line for line in done.stdout.splitlines() if "layers.0.h" in line)
    assert "█" in row
    assert "▁" in row
    assert "kept: the branch stays in the model" in done.stdout
    message = json.loads(call("report", "a", "--json").stdout)
    assert message["runs"][0]["sites"][1]["verdict"] == "kept"
    assert sorted(path.name for path in (here / "a").iterdir()) == ["run.json", "trace.jsonl"]
    assert sorted(path.name for path in here.iterdir()) == ["a"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["report"], "no runs in .ace/runs: expected folders with run.json and trace.jsonl; train with ACE"),
        (["report", "nowhere"], "no runs in nowhere: expected folders with run.json"),
        (["report", "."], "no runs in ."),
        (["report", ".", "--text", "--json"], "--text and --json cannot be combined: leave one of them out"),
        (["watch", "--once"], "no runs in .ace/runs"),
        (["watch", "nowhere"], "no runs in nowhere"),
    ],
)
def test_mistakes_are_reported_in_one_line(here: Path, words: list[str], message: str) -> None:
    done = call(*words)
    assert done.exit_code == 2
    assert message in done.stderr
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
