"""The command as people call it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from clones import ace, miniature, python

pytest.importorskip("torch_geometric", reason="needs torch-geometric: pip install torch-geometric")

from torch_geometric.nn import SchNet

from ace_plugins import project
from ace_plugins.cli.main import COMMANDS, cli, main
from ace_plugins.testing.kit import Kit

SCRIPT = """
import argparse, os, sys, torch
from torch_geometric.nn import SchNet
parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=3)
options = parser.parse_args()
def main():
    torch.manual_seed(0)
    model = SchNet(16, 16, 2, 10)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    z, pos = torch.randint(1, 9, (12,)), torch.randn(12, 3)
    for step in range(options.steps):
        optimizer.zero_grad()
        model(z, pos).square().mean().backward()
        optimizer.step()
    print(__name__, sys.argv, os.path.basename(sys.path[0]), sum(p.numel() for p in model.parameters()))
    torch.save(model.state_dict(), "model.pt")
main()
sys.exit(7)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "train.py").write_text(SCRIPT)
    return tmp_path / "work"


@dataclass
class Done:
    returncode: Any
    stdout: str
    stderr: str


@pytest.fixture
def call(folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Any:
    """``ace-patch ...`` in this process: for what does not."""

    def called(*arguments: str) -> Done:
        monkeypatch.chdir(folder)
        monkeypatch.setenv("COLUMNS", "200")
        monkeypatch.setattr(sys, "argv", ["ace-patch", *arguments])
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        return Done(ended.value.code, *capfd.readouterr())

    return called


def test_run_trains_an_unmodified_script(folder: Path, call: Any) -> None:
    done = ace(folder, "run", "schnet", "--mode", "resilient", "--budget", "25", "--", "train.py", "--steps", "25")
    assert done.returncode == 7, done.stderr
    upstream = sum(p.numel() for p in SchNet(16, 16, 2, 10).parameters())
    assert done.stdout.splitlines()[0].startswith(f"__main__ ['train.py', '--steps', '25'] work {upstream + 674}"), (
        done.stdout
    )
    banner = (
        f"ace: schnet: attached to SchNet, 2 sites, {upstream:,} parameters + 674 of ACE, mode resilient, budget 25"
    )
    assert banner in done.stderr
    assert "ace: budget: 25 steps (the setting budget)\n" in done.stderr
    assert "ACE resilient, 25 of 25 steps, trace in .ace/runs/" in done.stderr
    (run,) = (folder / ".ace" / "runs").iterdir()
    lines = [json.loads(line) for line in (run / "trace.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 10, 20, 25]
    assert lines[-1]["gamma"][0] < 0.9
    assert sorted(p.name for p in folder.iterdir()) == [".ace", "model.pt", "train.py"]
    done = call("export", "model.pt", "-o", "plain.pt")
    assert done.returncode == 0, done.stderr
    assert "plain.pt: " in done.stdout
    assert "export removes branches with |gamma| up to" in done.stderr
    SchNet(16, 16, 2, 10).load_state_dict(torch.load(folder / "plain.pt"), strict=True)


def test_each_warning_is_printed_once_in_a_line(call: Any, tmp_path: Path) -> None:
    pytest.importorskip("ace_segnn")
    done = call("segnn", str(miniature("segnn", tmp_path / "clones")), "--loop", "fitted")
    assert done.returncode == 0
    assert done.stderr == "ace-patch: loop 'fitted' is now called 'paced'; use the new name\n"


def test_ctrl_c_ends_the_process_as_it_does_without_us(folder: Path) -> None:
    # Tests that run in the background of a shell inherit that SIGINT is ignored.
    heard = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    ends = f"{heard}; os.kill(os.getpid(), signal.SIGINT)"
    (folder / "train.py").write_text(SCRIPT.replace("sys.exit(7)", ends))
    # Libraries that import something at exit make Python forget what ended it: 1 instead of -2, without us too.
    (folder / "plain.py").write_text(f"import os; from torch_geometric.nn import SchNet; {ends}")
    plain = subprocess.run([sys.executable, "plain.py"], cwd=folder, capture_output=True)
    done = ace(folder, "run", "schnet", "--no-trace", "--", "train.py")
    assert done.returncode == plain.returncode, done.stderr
    assert plain.returncode in (-2, 1)
    assert "ACE auto, 3 steps, interrupted\n" in done.stderr, "the table comes all the same, and without a trace"
    assert not (folder / ".ace").exists()


def test_without_a_word_the_command_shows_its_help(call: Any) -> None:
    for words in ((), ("--help",)):
        done = call(*words)
        shown = done.stdout + done.stderr
        assert f"Commands:\n  {next(iter(COMMANDS))} " in shown
        assert "Checkouts:\n  egno " in shown
        assert 'eval "$(_ACE_PATCH_COMPLETE=bash_source ace-patch)"\n' in shown


def test_a_command_is_imported_when_it_is_called_and_has_the_summary_of_the_list() -> None:
    code = "import sys\nfrom ace_plugins.cli.main import cli\ncli(['--help'], standalone_mode=False)\n"
    code += "print(*sorted(name for name in sys.modules if name.startswith('ace_plugins.cli.')))"
    done = python(Path(__file__).parents[2], "-c", code)
    assert done.stdout.endswith("\nace_plugins.cli.main ace_plugins.cli.options\n"), done.stdout + done.stderr
    for name, (_, summary) in COMMANDS.items():
        command = cli.get_command(click.Context(cli), name)
        assert command is not None
        assert (command.name, command.get_short_help_str(300)) == (name, summary)


def test_data_without_a_name_lists_data_sets_one_per_line(call: Any) -> None:
    pytest.importorskip("ace_segnn")
    done = call("data")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("Usage: ")
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("  nbody ")]
    assert not line.endswith("..."), "whole sentences"


def test_the_scripts_own_options_are_its_own(folder: Path, call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    became: list[list[str]] = []
    environments: list[dict[str, str]] = []

    def execve(path: str, command: list[str], environment: dict[str, str]) -> None:
        became.append(command)
        environments.append(environment)
        sys.exit(0)

    monkeypatch.setattr(os, "execve", execve)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    words = ["train.py", "--mode", "fast", "--epsilon", "7", "--json", "--", "x"]
    both = ["run", "--budget", "25", "schnet", "--mode", "off"]
    for before in (["run", "schnet", "--mode", "off"], ["run", "--mode", "off", "schnet"], both):
        assert call(*before, "--", *words).returncode == 0
        assert became[-1][-len(words) :] == words
        assert became[-1][0] == sys.executable
        assert '"mode": "off"' in environments[-1]["ACE_RUN"]
    assert '"budget": 25' in environments[-1]["ACE_RUN"], "from the left of the adapter"
    for before in (["run", "schnet"], ["run", "--mode", "off", "schnet"]):
        assert call(*before, "--", "-m", "json.tool", "--mode", "x").returncode == 0
        assert became[-1][-4:] == ["-m", "json.tool", "--mode", "x"]


def test_run_reports_if_nothing_was_trained(folder: Path) -> None:
    (folder / "idle.py").write_text("from torch_geometric.nn import SchNet\nmodel = SchNet(16, 16, 2, 10)\n")
    done = ace(folder, "run", "schnet", "--", "idle.py")
    assert "ace: attached to SchNet, but there was no training step: expected optimizer.step()" in done.stderr
    (folder / "empty.py").write_text("print('hello')")
    done = ace(folder, "run", "schnet", "--", "empty.py")
    assert (done.returncode, done.stdout) == (0, "hello\n")
    assert "no model was attached: this process built none of torch_geometric.nn.models.schnet:SchNet" in done.stderr


def test_doctor(folder: Path, call: Any) -> None:
    done = call("doctor", "schnet", "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["parameters_before"], told["parameters_after"]) == (127_553, 153_543)
    assert told["error_at_0"]["relative"] < 1e-5 < 1e-2 < told["error_at_1"]["relative"]
    assert [part["name"] for part in told["parts"]][:2] == ["lift", "interactions.0"]
    table = call("doctor", "schnet")
    assert "parameters: 127,553 before, 153,543 after" in table.stdout
    assert "preset paper: dual_optimizer=adam, dual_lr=0.0005" in table.stdout
    assert table.stdout.rstrip().endswith("healthy: 25 checks pass")
    assert call("doctor", "schnet", "--json").stdout == done.stdout, "the same numbers each time"
    assert list(folder.iterdir()) == [folder / "train.py"], "doctor leaves nothing behind"


def test_audit(folder: Path, call: Any) -> None:
    done = call("audit", "schnet", "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["verdict"], told["culprits"], told["uncovered"]) == ("symmetric", [], [])
    assert (told["precision"], told["branches"], told["averaged"]) == ("float64", False, None)
    table = call("audit", "schnet", "--branches", "on", "--averaged", "4")
    assert table.returncode == 0, table.stderr
    (blamed,) = [line for line in table.stdout.splitlines() if "error starts here" in line]
    assert "interactions.0 " in blamed
    assert "in float64): broken" in table.stdout
    assert "averaged over 4 random frames: " in table.stdout
    assert " are hidden: --all shows them" in table.stdout
    assert "interactions.0.mlp.0" not in table.stdout
    assert "interactions.0.mlp.0" in call("audit", "schnet", "--all").stdout
    left = call("audit", "schnet", "--left", "--branches", "on").stdout
    assert re.search(r"all rotations +│ +[\d.]+ │ [\d.]+ to [\d.]+ +│ broken", left)
    assert left.splitlines()[-1].startswith("The model keeps")
    assert (
        "The model keeps all of E(3)"
        in json.loads(call("audit", "schnet", "--left", "--json").stdout)["left"]["sentence"]
    )
    assert list(folder.iterdir()) == [folder / "train.py"], "audit leaves nothing behind"


def test_audit_of_a_checkpoint(folder: Path, call: Any) -> None:
    model = Kit("schnet").attached()
    with torch.no_grad():
        model.ace.gamma.zero_()
        model.ace.gamma[3] = 0.5
    torch.save({"epoch": 3, "model": {f"module.{k}": v for k, v in model.state_dict().items()}}, folder / "model.pt")
    done = call("audit", "schnet", "--checkpoint", "model.pt", "--branches", "on", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["culprits"] == ["interactions.3"]
    torch.save(project(model).state_dict(), folder / "plain.pt")
    done = call("audit", "schnet", "--checkpoint", "plain.pt", "--json")
    assert json.loads(done.stdout)["verdict"] == "symmetric", done.stderr
    torch.save(SchNet(16, 16, 2, 10).state_dict(), folder / "other.pt")
    done = call("audit", "schnet", "--checkpoint", "other.pt")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(
        "ace-patch: other.pt does not fit SchNet, the adapter's example: checkpoint of another"
    )
    assert len(done.stderr.splitlines()) == 1
    torch.save({"w": torch.ones(1)}, folder / "none.pt")
    assert "none.pt does not fit SchNet" in call("audit", "schnet", "--checkpoint", "none.pt").stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["audit", "schnt"], "unknown adapter 'schnt': .*did you mean 'schnet'?"),
        (["audit", "schnet", "--checkpoint", "none.pt"], "no checkpoint at 'none.pt'"),
        (["audit", "schnet", "--checkpoint", "train.py"], "cannot read train.py as a checkpoint"),
        (["audit", "schnet", "--averaged", "0"], "Invalid value for '--averaged': 0 is not in the range"),
        (["audit", "schnet", "--branches", "of"], "'of' is not one of 'on', 'off'"),
        (["doctor", "schnt"], "unknown adapter 'schnt': .*did you mean 'schnet'?"),
        (["run", "segn", "--", "train.py"], "unknown adapter 'segn'"),
        (["run", "schnet", "--mode", "strct", "--", "train.py"], "unknown mode 'strct': expected one of auto, bounded"),
        (["run", "schnet", "--dual-lr", "-1", "--", "train.py"], "dual_lr -1.0: expected a finite number of at least"),
        (["run", "schnet", "--", "trian.py"], "trian.py"),
        (["run", "schnet"], "no script given"),
        (["run", "schnet", "--prest", "x", "--", "train.py"], "--prest"),
        (["run", "schnet", "train.py", "--", "x"], "'train.py': expected '--' before the script"),
        (["run", "schnet", "--", "./train.sh"], "'./train.sh' is a shell script: start its shell"),
        (["run", "--", "train.py"], "expected an adapter, then '--' and the script"),
        (["run", "--", "train.py", "--epochs=3"], "expected an adapter, then '--' and the script"),
        (["run", "--preset", "--", "schnet", "train.py"], "expected an adapter, then '--' and the script"),
        (["compare", "--", "train.py"], "expected an adapter, then '--' and the script"),
        (["run", "schnet", "--land-at", "1e3", "--", "train.py"], "--land-at"),
        (["run"], "Missing argument 'ADAPTER'"),
        (["doctor"], "Missing argument 'ADAPTER'"),
        (["export", "train.py", "-o", "x.pt"], "cannot read train.py as a checkpoint"),
        (["export", "none.pt", "-o", "x.pt"], "no checkpoint at 'none.pt'"),
        (["lst"], "unknown command 'lst': did you mean 'list'?"),
        (["SEGNN"], "unknown command 'SEGNN': did you mean 'segnn'?"),
        (["schnet"], "run 'ace-patch run schnet -- your_script.py'"),
        (["demo", "schnet", "--target", "energy"], "unknown QM9 target 'energy': expected one of "),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(folder: Path, call: Any, arguments: list[str], message: str) -> None:
    before = sorted(folder.rglob("*"))
    done = call(*arguments)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("ace-patch: ")
    for part in message.split(".*"):
        assert part in line
    assert sorted(folder.rglob("*")) == before, "nothing changed"


@pytest.mark.parametrize(
    ("words", "mode", "script"),
    [
        ("schnet -- train.py --mode x", None, "train.py --mode x"),
        ("schnet train.py --mode x", None, "train.py --mode x"),
        ("--mode off schnet train.py --json", "off", "train.py --json"),
        ("schnet --mode off train.py -h", "off", "train.py -h"),
        ("schnet --mode off -- -m train", "off", "-m train"),
        ("schnet -c pass", None, "-c pass"),
    ],
)
def test_a_script_may_follow_with_and_without_dashes(words: str, mode: str | None, script: str) -> None:
    from ace_plugins.cli.scripts import run

    found = run.make_context("run", words.split()).params
    assert (found["adapter"], found["mode"], list(found["words"])) == ("schnet", mode, script.split())
