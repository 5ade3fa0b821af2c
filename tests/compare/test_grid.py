"""Grids of ``ace-patch compare``: the best point of each run on validation, and what ends a point early."""

from __future__ import annotations

import json
import math
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from test_compare import started, until

from ace_plugins import AceError, run_comparison
from ace_plugins.adapter import Metric
from ace_plugins.cli.main import cli
from ace_plugins.compare.experiment import find_setting, list_points, parse_grid, set_option
from ace_plugins.compare.page import read_comparison, render_comparison
from ace_plugins.compare.plan import Comparison, Store, TrialResult
from ace_plugins.compare.results import find_best

METRICS = ["--metric", "test=test {number}", "--metric", "validation=val {number}"]
SCRIPT = """
import os, sys, time
lr = float(dict(word.removeprefix("--").partition("=")[::2] for word in sys.argv[1:]).get("lr", 0.1))
found = os.environ["ACE_RUN"]
if lr == 9:
    raise SystemExit("lr is too large")
best = 0.4 if '"mode": "strict"' in found else 0.2  # best learning rate of each run
shift = 0.5 if '"horizon": 0.5' in found else 0.0
for epoch in range(1, 9):
    time.sleep(float(os.environ.get("PAUSE", "0")))
    error = float("nan") if lr == 8 else abs(lr - best) + 0.01 + shift + 0.1 / epoch
    print("epoch", epoch, "val", error, "test", 2 * error)
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT)
    monkeypatch.chdir(folder)
    return folder


def compare(*words: str, code: int = 0) -> Any:
    done = CliRunner().invoke(cli, ["compare", "schnet", *METRICS, *words], catch_exceptions=False)
    assert done.exit_code == code, done.output
    return done


def test_each_run_gets_the_best_value_on_validation_and_all_seeds_train_with_it(project: Path) -> None:
    words = ["--runs", "off,strict", "--seeds", "2", "--grid", "lr=0.1,0.2,0.4,8,9", "--jobs", "1"]
    done = compare("--json", *words, "--", "train.py", "--lr=0.3")
    found = json.loads(done.stdout)
    assert [run["run"] for run in found["runs"]] == ["off (lr=0.2)", "strict (lr=0.4)"]
    assert all(run["values"].keys() == {"1", "2"} for run in found["runs"])
    assert [run["options"] for run in found["runs"]] == [{"lr": "0.2"}, {"lr": "0.4"}]
    grid = {each["run"]: each["mean"] for each in found["grid"]["runs"]}
    assert found["grid"]["metrics"][0]["name"] == "validation"
    assert grid["off (lr=0.2)"] == pytest.approx(0.0225)
    assert (len(grid), grid["off (lr=8)"]) == (8, None), "nan loses"
    assert [*found["grid"]["failed"]] == ["off (lr=9) seed 1", "strict (lr=9) seed 1"], "a failure loses"
    assert found["failed"] == {}, "failures in the grid are not failures of the comparison"
    assert "grid: lr = 0.1, 0.2, 0.4, 8, 9 (replaces --lr=0.3 in the command)" in done.stderr
    assert done.stderr.count("off (lr=9) seed 1 failed") == 1
    again = compare(*words, "--", "train.py", "--lr=0.3")
    assert "8 of 10 runs of the grid were finished before" in again.stderr
    assert again.stderr.count(" started (") == 2, "failed runs are repeated"
    assert [line.split()[1:3] for line in again.stdout.splitlines() if "picked" in line] == [
        ["off", "(lr=0.2)"],
        ["strict", "(lr=0.4)"],
    ]


def test_a_point_that_is_far_behind_half_way_is_stopped(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAUSE", "0.1")
    words = ["--runs", "off", "--seeds", "1", "--grid", "lr=0.2,2", "--jobs", "1"]
    found = json.loads(compare("--json", *words, "--", "train.py").stdout)
    assert [run["run"] for run in found["runs"]] == ["off (lr=0.2)"]
    best, worse = found["grid"]["runs"]
    assert (best["mean"], worse["mean"]) == (pytest.approx(0.0225), None)
    assert found["grid"]["notes"].keys() == {"off (lr=2)"}
    assert found["grid"]["notes"]["off (lr=2)"][0].startswith("stopped early at 1.8")
    log = next(Path(found["folder"]).glob("off_lr=2_-*/seed-1/log.txt")).read_text()
    assert "epoch 4" in log
    assert "epoch 8" not in log
    assert "2 of 2 runs of the grid were finished before" in compare(*words, "--", "train.py").stderr


def test_settings_of_ace_are_varied_in_runs_that_use_them(project: Path) -> None:
    words = ["--runs", "off,auto,strict:horizon=0.3", "--seeds", "1", "--grid", "horizon=0.5,0.25"]
    found = json.loads(compare("--json", *words, "--", "train.py").stdout)
    assert [(run["run"], run["settings"]) for run in found["runs"]] == [
        ("off", {"mode": "off"}),
        ("auto (horizon=0.25)", {"mode": "auto", "horizon": 0.25}),
        ("strict", {"mode": "strict", "horizon": 0.3}),
    ]


def test_interrupted_in_the_grid_and_called_again(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAUSE", "0.1")
    monkeypatch.setattr("test_compare.METRIC", METRICS)
    words = ["--runs", "off", "--seeds", "2", "--grid", "lr=0.2,0.21", "--jobs", "1", "--out", "out"]
    process = started(*words)
    until(lambda: len(list(project.glob("out/*/*/result.json"))) == 1)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "stopped; 1 of 2 runs of the grid are finished" in errors
    assert "picked" not in str(read_comparison(project / "out").grid_table())
    done = compare(*words, "--", "train.py")
    assert "1 of 2 runs of the grid were finished before" in done.stderr
    found = read_comparison(project / "out")
    assert [row.run for row in found.rows] == ["off (lr=0.2)"]
    page = render_comparison(found)
    assert "<h3>Grid</h3>" in page
    assert page.count("picked") == 1


def test_a_dry_run_lists_the_grid(project: Path) -> None:
    words = ["--seeds", "2", "--grid", "lr=1,2", "--grid", "ace.gamma_init=0.1,1", "--dry-run", "--", "train.py"]
    lines = compare(*words).stdout.splitlines()
    assert lines[:2] == [
        "grid: lr = 1, 2 (--lr=VALUE is added to the command)",
        "grid: ace.gamma_init = 0.1, 1 (the setting gamma_init of ACE)",
    ]
    points = [line.partition(" seed")[0] for line in lines[2:8]]
    assert points[:3] == ["off (lr=1)", "off (lr=2)", "auto (lr=1, ace.gamma_init=0.1)"]
    assert lines[8] == "then, with the values that were picked:"
    assert not (project / ".ace").exists()


def test_an_option_that_the_script_does_not_have(project: Path) -> None:
    (project / "train.py").write_text("import argparse; argparse.ArgumentParser().parse_args()")
    done = compare("--runs", "off", "--grid", "lrr=1,2", "--", "train.py", code=2)
    last = done.stderr.splitlines()[-1]
    assert "no run 'off' of the grid has a finite validation" in last
    assert "--lrr=VALUE is added to the command" in last


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--grid", "lr"], "grid 'lr': expected KEY=VALUE,VALUE with two or more"),
        (["--grid", "lr=1"], "two or more different values"),
        (["--grid", "lr=1,1"], "two or more different values"),
        (["--grid", "lr=1,"], "two or more different values"),
        (["--grid", "lr=1,2", "--grid", "lr=3,4"], "expected different keys"),
        (["--grid", "ace.horizn=0.1,0.2"], "unknown setting 'horizn': did you mean 'horizon'"),
        (["--grid", "horizon=x,y"], "run 'auto': horizon 'x': expected a finite number above 0"),
        (["--grid", "horizon=0.5,2"], r"run 'auto \(horizon=2\)': .*horizon 2.0: expected"),
        (["--grid", "dual_lr=1,2"], "run 'auto .*dual_lr is a setting of the paper's loop"),
        (["--grid", f"lr={','.join(map(str, range(33)))}"], "33 points for run 'off': expected at most 32"),
        (["--grid", "number=1,2"], "--grid number: this option is the seed; use --seeds"),
    ],
)
def test_mistakes_are_one_line_and_nothing_is_started(project: Path, words: list[str], message: str) -> None:
    done = compare(*words, "--", "train.py", "--number={seed}", code=2)
    assert len(done.stderr.splitlines()) == 1
    assert re.search(message, done.stderr), done.stderr
    assert not (project / ".ace").exists()


def test_a_grid_needs_a_validation_metric(project: Path) -> None:
    with pytest.raises(
        AceError, match="a metric whose name starts with validation, found test: .*--metric 'validation="
    ):
        run_comparison("schnet", ["train.py"], metrics=["test=test {number}"], grid={"lr": [0.1, 0.2]})


@pytest.mark.parametrize(
    ("command", "key", "expected", "replaced"),
    [
        ("t.py --lr 1 -v", "lr", "t.py --lr 5 -v", "--lr 1"),
        ("t.py --lr=1 --lr=2", "lr", "t.py --lr=1 --lr=5", "--lr=2"),
        ("t.py --weight-decay 1", "weight_decay", "t.py --weight-decay 5", "--weight-decay 1"),
        ("t.py -lr 1", "lr", "t.py -lr 5", "-lr 1"),
        ("t.py lr 1 optimizer.lr=2", "optimizer.lr", "t.py lr 1 optimizer.lr=5", "optimizer.lr=2"),
        ("t.py --lr -1", "lr", "t.py --lr 5", "--lr -1"),
        ("t.py --lr --fast", "lr", "t.py --lr 5 --fast", "--lr"),
        ("t.py --lrs 1 lr", "lr", "t.py --lrs 1 lr --lr=5", ""),
    ],
)
def test_options_are_replaced_in_the_spelling_of_the_command(
    command: str, key: str, expected: str, replaced: str
) -> None:
    assert set_option(command.split(), key, "5") == (expected.split(), replaced)


def test_an_option_of_the_command_takes_precedence_over_a_setting_of_the_same_name() -> None:
    assert find_setting("horizon", ["train.py"]) == "horizon"
    assert find_setting("horizon", ["train.py", "--horizon=3"]) == ""
    assert find_setting("ace.horizon", ["train.py", "--horizon=3"]) == "horizon"
    assert find_setting("lr", ["train.py"]) == ""
    made = Comparison("c4", ("t.py", "--rho", "3"), {}, grid={"rho": ("1", "2")})
    assert [*made.describe_grid()] == ["grid: rho = 1, 2 (replaces --rho 3 in the command)"]


def test_points_are_all_combinations() -> None:
    grid = dict([parse_grid("--lr=1,2"), parse_grid("horizon=0.5,0.25")])
    points = list_points(grid, ["t.py"], "auto", {"mode": "auto"})
    assert [*points] == [
        *("auto (lr=1, horizon=0.5)", "auto (lr=1, horizon=0.25)"),
        *("auto (lr=2, horizon=0.5)", "auto (lr=2, horizon=0.25)"),
    ]
    assert points["auto (lr=2, horizon=0.25)"] == ({"mode": "auto", "horizon": 0.25}, {"lr": "2"})
    assert [*list_points(grid, ["t.py"], "off", {"mode": "off"})] == ["off (lr=1)", "off (lr=2)"]
    assert list_points({}, ["t.py"], "off", {"mode": "off"}) == {"off": ({"mode": "off"}, {})}


def test_the_best_point_has_the_best_finite_value_of_a_metric() -> None:
    values = {"off (lr=1)": 0.5, "off (lr=2)": 0.7, "off (lr=3)": math.nan, "auto (lr=1)": math.inf}
    results = [TrialResult(run, 1, {"validation": value}) for run, value in values.items()]
    for higher, best in ((False, "off (lr=1)"), (True, "off (lr=2)")):
        found = find_best(results, Metric("validation", "(x)", higher=higher))
        assert {run: result.run for run, result in found.items()} == {"off": best}


def test_every_point_has_its_own_folder(tmp_path: Path) -> None:
    points = {f"off (data={value})": ({"mode": "off"}, {"data": value}) for value in ("a/b", "a b")}
    search = Comparison(
        "c4", ("t.py",), {"off": {"mode": "off"}}, metrics=(Metric("test", "(x)"),), points=points
    ).search
    assert search is not None
    folders = {Store(search, tmp_path).trial_folder(trial) for trial in search.trials}
    assert len(folders) == 2
    assert {folder.parents[1] for folder in folders} == {tmp_path}
