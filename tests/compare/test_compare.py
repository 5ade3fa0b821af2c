"""``ace-patch compare`` with small scripts: isolation, seeds, failures, and continuing after a kill."""

from __future__ import annotations

import functools
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ace_plugins import AceError, run_comparison
from ace_plugins.adapter import Script
from ace_plugins.cli.main import cli
from ace_plugins.compare.plan import LARGE, Comparison, Contents, Trial

METRIC = ["--metric", r"test=test (\S+)"]
SCRIPT = """
import os, random, sys, time
from pathlib import Path
random.seed(5)
mode = os.environ["ACE_RUN"].partition('"mode": "')[2].partition('"')[0]
Path("written.txt").write_text(mode)  # a script that writes: every run into the same name
print("data", len(Path("data.npy").read_bytes()), "argument", sys.argv[1:])
for epoch in range(1, 4):
    time.sleep(float(os.environ.get("PAUSE", "0")))
    if mode == os.environ.get("FAILS"):
        raise ValueError("out of luck")
    print("epoch", epoch, "test", random.random() * (0.5 if mode == "strict" else 1.0))
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT)
    (folder / "data.npy").write_bytes(bytes(LARGE))
    (folder / "old.pt").write_bytes(bytes(LARGE))
    monkeypatch.chdir(folder)
    return folder


def compare(*words: str, code: int = 0) -> Any:
    done = CliRunner().invoke(cli, ["compare", *words], catch_exceptions=False)
    assert done.exit_code == code, done.output
    return done


def answer(*words: str, code: int = 0) -> dict[str, Any]:
    done = compare("schnet", "--json", *METRIC, *words, "--", "train.py", "--fast", code=code)
    summary: dict[str, Any] = json.loads(done.stdout)
    return summary


def test_runs_have_folders_of_their_own_and_seeds_in_common(project: Path) -> None:
    before = sorted(project.iterdir())
    summary = answer("--runs", "off,strict", "--seeds", "2")
    off, strict = (run["values"] for run in summary["runs"])
    assert off.keys() == strict.keys() == {"1", "2"}
    assert off["1"] != off["2"]
    assert all(strict[seed] == pytest.approx(0.5 * off[seed], rel=1e-12) for seed in off), "the same random numbers"
    interval = "(95 % interval 50 % to 50 %; better in 2 of 2 seeds)"
    assert summary["sentences"] == [f"strict is better than off by 50 % {interval}."]
    assert sorted(project.iterdir()) == sorted([*before, project / ".ace"]), "the user's own folder is as it was"
    places = list(Path(summary["folder"]).glob("*/seed-*/work-*"))
    assert len(places) == 4
    assert {(place / "written.txt").read_text() for place in places} == {"off", "strict"}
    assert all((place / "data.npy").is_symlink() for place in places), "data is linked"
    assert not any((place / "old.pt").is_symlink() for place in places), "what scripts write again is copied"
    assert "argument ['--fast']" in next(Path(summary["folder"]).glob("*/seed-1/log.txt")).read_text()


def test_called_again_it_reuses_what_is_finished(project: Path) -> None:
    first = answer("--runs", "off,strict", "--seeds", "1")
    done = compare(
        "schnet", "--json", *METRIC, "--runs", "off,strict,mine:horizon=0.5", "--seeds", "2", "--", "train.py", "--fast"
    )
    assert "ace: 2 of 6 runs were finished before, in .ace/compare/schnet-" in done.stderr
    second = json.loads(done.stdout)
    assert second["runs"][0]["values"]["1"] == first["runs"][0]["values"]["1"]
    assert second["folder"] == first["folder"]
    (project / "train.py").write_text(SCRIPT + "\n# another script\n")
    assert answer("--runs", "off", "--seeds", "1")["folder"] != first["folder"]


def test_a_name_that_means_something_else_now_is_another_run(project: Path) -> None:
    answer("--runs", "off,mine:horizon=0.5", "--seeds", "1")
    done = compare("schnet", *METRIC, "--runs", "off,mine:horizon=0.6", "--seeds", "1", "--", "train.py", "--fast")
    assert "1 of 2 runs were finished before" in done.stderr


CHANGES: dict[str, Any] = {
    "code": lambda project: (project / "train.py").write_text(SCRIPT + "# edited"),
    "an untracked file of any type": lambda project: (project / "options.json").write_text("[2]"),
    "large data, by size and time": lambda project: os.utime(project / "data.npy", (1, 1)),
    "a large copied file, by size and time": lambda project: os.utime(project / "old.pt", (1, 1)),
    "metrics": None,
    "package versions": None,
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_result_is_reused_only_if_nothing_that_it_depends_on_changed(
    project: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    subprocess.run(["git", "init", "-q"], check=True)
    subprocess.run(["git", "add", "train.py"], check=True)
    (project / "options.json").write_text("[1]")
    words = ["--runs", "off", "--seeds", "1", "--out", "../out"]
    answer(*words)
    kind = what if CHANGES[what] is None else "code or data"
    if what == "metrics":
        monkeypatch.setattr(sys.modules[__name__], "METRIC", ["--metric", r"test=epoch (\S+)"])
    elif what == "package versions":
        monkeypatch.setattr("ace_plugins.compare.plan.find_versions", lambda adapter: {"torch": "1"})
    else:
        CHANGES[what](project)
    done = compare("schnet", "--json", *METRIC, *words, "--", "train.py", "--fast")
    assert f"results with other {kind} are kept but not reused" in done.stderr
    assert "were finished before" not in done.stderr
    if what == "metrics":
        assert json.loads(done.stdout)["runs"][0]["values"] == {"1": 3.0}


def test_results_are_not_invalidated_by_caches_and_logs_and_are_listed_with_their_time(project: Path) -> None:
    answer("--runs", "off", "--seeds", "1")
    os.utime(project / "train.py", (1, 1))  # as after a git checkout
    (project / "__pycache__").mkdir()
    (project / "__pycache__" / "train.cpython-311.pyc").write_bytes(b"cache")
    (project / "today.log").write_text("a run by hand")
    done = compare("schnet", "--json", *METRIC, "--runs", "off", "--seeds", "1", "--", "train.py", "--fast")
    assert "1 of 1 runs were finished before" in done.stderr
    assert re.search(r"reused: off, seeds 1, made \d{4}-\d\d-\d\d \d\d:\d\d$", done.stderr, re.MULTILINE), done.stderr


def test_output_that_goes_into_the_folder_is_no_input(project: Path) -> None:
    words = ["--runs", "off", "--seeds", "1", "--", "train.py"]
    command = [sys.executable, "-m", "ace_plugins", "compare", "schnet", *METRIC, *words]
    for _ in range(2):
        with (project / "nohup.out").open("a") as output:
            subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, check=True, timeout=60)
    summary = (project / "nohup.out").read_text()
    assert summary.count("off seed 1: started") == 1
    assert "1 of 1 runs were finished before" in summary


def test_two_calls_in_one_folder(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAUSE", "5")
    process = started("--runs", "off", "--seeds", "1", "--out", "out")
    until(lambda: (project / "out").is_dir() and list(project.glob("out/*/*/work-*")))
    done = compare("schnet", *METRIC, "--out", "out", "--", "train.py", code=2)
    assert len(done.stderr.splitlines()) == 1
    assert re.search(rf"/out is in use by process {process.pid} on .*, since \d{{4}}-.*: wait until", done.stderr)
    process.kill()
    process.communicate()
    monkeypatch.delenv("PAUSE")
    assert answer("--runs", "off", "--seeds", "1", "--out", "out")["runs"], "the lock of a dead process does not count"


@pytest.mark.parametrize(
    "write",
    [
        "open('data.npy', 'wb').write(b'new')",
        "import pathlib; pathlib.Path('data.npy').open('r+b').write(b'new')",
        "import os; os.truncate('data.npy', 3)",
        "import subprocess, sys; subprocess.run([sys.executable, '-c', 'open(\"data.npy\", \"a\")'], check=True)",
    ],
)
def test_a_script_cannot_write_through_links_to_large_data(
    project: Path, monkeypatch: pytest.MonkeyPatch, write: str
) -> None:
    monkeypatch.setattr("ace_plugins.compare.plan.FICLONE", 0)  # as on a file system that cannot clone files
    (project / "train.py").write_text(f"open('own.txt', 'w').write('x')\n{write}\nprint('test 1')")
    summary = answer("--runs", "off", "--seeds", "1", code=1)
    assert "PermissionError" in summary["failed"]["off seed 1"]
    assert "is a link to data that all runs share: let the script write another file" in summary["failed"]["off seed 1"]
    assert (project / "data.npy").read_bytes() == bytes(LARGE)


def test_a_program_that_writes_into_large_data_is_stopped_before_the_next_run(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ace_plugins.compare.plan.FICLONE", 0)  # as on a file system that cannot clone files
    (project / "train.py").write_text("import os; os.system('echo new > data.npy'); print('test 1')")
    done = compare("schnet", *METRIC, "--runs", "off", "--jobs", "1", "--out", "out", "--", "train.py", code=2)
    assert re.search(r"stopped: .*/project/data\.npy, which all runs read, was changed, .*: restore it", done.stderr)
    assert len(list(project.glob("out/*/seed-*"))) == 1
    assert not list(project.glob("out/*/seed-*/result.json")), "a run that changed its own data has no result"


def test_on_file_systems_that_clone_files_a_run_writes_into_its_own(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def clone(target: Any, number: int, source: int) -> None:
        assert number == 0x40049409
        target.write(os.pread(source, 2**22, 0))

    monkeypatch.setattr("fcntl.ioctl", clone)
    (project / "train.py").write_text("open('data.npy', 'wb').write(b'new'); print('test 1')")
    assert len(answer("--runs", "off", "--seeds", "2")["runs"][0]["values"]) == 2
    assert (project / "data.npy").read_bytes() == bytes(LARGE)


def test_a_script_that_is_edited_during_the_comparison(project: Path) -> None:
    edit = f"open({str(project / 'train.py')!r}, 'w').write('print(\\'test 2\\')')"
    (project / "train.py").write_text(f"{edit}; print('test 1')")
    summary = answer("--runs", "off", "--seeds", "2", "--jobs", "1")
    assert summary["runs"][0]["values"] == {"1": 1.0, "2": 1.0}, "all runs are of the script at the start"


LEAVES = """
import subprocess, sys, time
print("half a line", end="", flush=True)
print(chr(13) + "progress" + chr(13) + "test 7", flush=True)
code = "import time\\nfor _ in range(200): print('noise', flush=True), time.sleep(0.1)"
subprocess.Popen([sys.executable, "-c", code])
time.sleep(1)
"""


def test_a_run_ends_with_its_script_and_not_with_processes_that_it_leaves_behind(project: Path) -> None:
    (project / "train.py").write_text(LEAVES)
    start = time.monotonic()
    summary = answer("--runs", "off", "--seeds", "1")
    assert summary["runs"][0]["values"] == {"1": 7.0}
    assert time.monotonic() - start < 15
    log = next(Path(summary["folder"]).glob("*/seed-1/log.txt")).read_text().splitlines()
    assert [line for line in log if "noise" not in line] == ["half a line", "progress", "test 7"]


def test_a_result_that_is_not_finite_is_null_in_json(project: Path) -> None:
    (project / "train.py").write_text("print('test nan')")
    done = compare("schnet", "--json", *METRIC, "--seeds", "2", "--", "train.py")

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    summary = json.loads(done.stdout, parse_constant=refuse)
    assert summary["runs"][0]["values"] == {"1": None, "2": None}
    assert summary["differences"][0]["mean"] is None


def test_a_run_that_fails_is_reported_and_the_others_go_on(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAILS", "strict")
    summary = answer("--runs", "off,strict", "--seeds", "2", code=1)
    assert [run["run"] for run in summary["runs"]] == ["off"]
    assert len(summary["runs"][0]["values"]) == 2
    failed = summary["failed"]["strict seed 1"]
    assert failed.startswith("ended with exit code 1; the end of ")
    assert "ValueError: out of luck" in failed
    done = compare("schnet", *METRIC, "--runs", "off,strict", "--seeds", "2", "--", "train.py", "--fast", code=1)
    assert done.output.count("strict seed 1") == 2, "a line when it starts and one when it fails"
    assert done.output.count("ValueError: out of luck") == 2, "once for each seed"
    monkeypatch.delenv("FAILS")
    assert len(answer("--runs", "off,strict", "--seeds", "2")["runs"]) == 2, "and called again it is made good"


@pytest.mark.parametrize("link", [".ace", ".ace/compare"])
def test_results_are_not_written_through_a_link(project: Path, tmp_path: Path, link: str) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (project / link).parent.mkdir(exist_ok=True)
    (project / link).symlink_to(outside)
    done = compare("schnet", *METRIC, "--runs", "off", "--seeds", "1", "--", "train.py", code=2)
    assert f"{link} is a link: ACE writes no files through links in .ace" in done.stderr
    assert not list(outside.iterdir())
    compare("schnet", *METRIC, "--runs", "off", "--seeds", "1", "--out", "out", "--", "train.py")


def test_control_characters_at_the_end_of_a_log_are_escaped(project: Path) -> None:
    (project / "train.py").write_text("print('\\x1b]0;title\\x07\\x1b[2J'); raise SystemExit('\\x1b[31mred')")
    done = compare("schnet", *METRIC, "--runs", "off", "--seeds", "1", "--", "train.py", code=1)
    assert "\\x1b]0;title\\x07\\x1b[2J" in done.output
    assert "\x1b" not in done.output
    assert "\x07" not in done.output


def test_a_place_for_the_seed_in_the_command(project: Path) -> None:
    (project / "train.py").write_text("import sys; print('test', sys.argv[1])")
    done = compare("schnet", "--json", *METRIC, "--runs", "off", "--seeds", "7,11", "--", "train.py", "{seed}")
    assert json.loads(done.stdout)["runs"][0]["values"] == {"7": 7.0, "11": 11.0}


def test_an_absolute_path_is_that_of_the_copy(project: Path) -> None:
    (project / "train.py").write_text("import os; print('test 1', os.path.abspath(__file__))")
    summary = answer_to(str(project / "train.py"))
    log = next(Path(summary["folder"]).glob("*/seed-1/log.txt")).read_text()
    assert f"{os.sep}work-" in log


def answer_to(*command: str) -> dict[str, Any]:
    done = compare("schnet", "--json", *METRIC, "--runs", "off", "--seeds", "1", "--", *command)
    summary: dict[str, Any] = json.loads(done.stdout)
    return summary


def test_the_option_that_an_adapter_names() -> None:
    made = Comparison("egno", ("main.py",), {"off": {}}, (1, 2), script=Script(seed="--seed"))
    assert made.command(Trial("off", 2)) == ["main.py", "--seed", "2"]
    assert made.seed_shift(Trial("off", 2)) is None


def test_a_dry_run_starts_nothing(project: Path) -> None:
    summary = compare("schnet", *METRIC, "--runs", "off,strict", "--seeds", "2", "--dry-run", "--", "train.py").stdout
    assert "strict seed 2: mode = strict: to run" in summary
    assert "(seed: every seed the script sets is shifted)" in summary
    assert "2 files copied, 1 linked" in summary
    assert not (project / ".ace").exists()


@pytest.mark.parametrize(
    ("words", "summary"),
    [
        (["schnet", "--", "train.py"], "no metrics for train.py: add one, as in --metric"),
        (["schnet", *METRIC, "--", "trian.py"], "no script 'trian.py' in"),
        (["schnet", *METRIC], "no script given"),
        (["schnet", *METRIC, "--"], "no script given"),
        (["schnet", *METRIC, "train.py", "--dry-run"], "'train.py': expected '--' before the script"),
        (["schnet", *METRIC, "train.py", "--", "x"], "'train.py': expected '--' before the script"),
        (["schnt", *METRIC, "--", "train.py"], "unknown adapter 'schnt'.*did you mean 'schnet'"),
        (["schnet", "--metric", "test=(", "--", "train.py"], "metric 'test': '\\(' is not a regular expression"),
        (["schnet", "--metric", "test=x", "--", "train.py"], "expected {number} once"),
        (["schnet", *METRIC, *METRIC, "--", "train.py"], "metrics test, test: expected different names"),
        (["schnet", *METRIC, "--runs", "off,off", "--", "train.py"], "run 'off' is given twice"),
        (["schnet", *METRIC, "--runs", "a:mode=strict,rho=-1", "--", "train.py"], "run 'a': .*rho"),
        (
            ["schnet", *METRIC, "--runs", "a:dual_lr=1", "--", "train.py"],
            "run 'a': .*dual_lr",
        ),
        (["no.toml"], "no.toml cannot be read: No such file"),
        (["schnet", *METRIC, "--seeds", "none", "--", "train.py"], "seeds 'none': expected a number of seeds"),
    ],
)
def test_mistakes_are_one_line_and_nothing_is_started(project: Path, words: list[str], summary: str) -> None:
    done = compare(*words, code=2)
    assert len(done.stderr.splitlines()) == 1
    assert re.search(summary, done.stderr), done.stderr
    assert not (project / ".ace").exists()


def test_the_budget_of_all_runs_with_ace(project: Path) -> None:
    runs = "off,strict:horizon=0.1,mine:mode=auto,budget=7"
    done = compare("schnet", *METRIC, "--runs", runs, "--budget", "20 epochs", "--dry-run", "--", "train.py")
    lines = [line for line in done.stdout.splitlines() if "seed 1: " in line]
    assert [sorted(line.partition(": ")[2].removesuffix(": to run").split(", ")) for line in lines] == [
        ["mode = off"],
        ["budget = 20 epochs", "horizon = 0.1", "mode = strict"],
        ["budget = 7", "mode = auto"],
    ]


def test_a_script_that_prints_no_metric(project: Path) -> None:
    (project / "train.py").write_text("print('loss 3')")
    done = compare("schnet", *METRIC, "--runs", "off", "--seeds", "3", "--jobs", "1", "--", "train.py", code=2)
    assert done.stderr.splitlines()[0] == "ace: off seed 1: started (0 of 3 runs)"
    expected = r"stopped: off seed 1: no line matches .* of metric 'test'; the last line of .*log.txt is 'loss 3'"
    assert re.search(expected, done.stderr.splitlines()[-1])
    assert not list(project.glob(".ace/compare/*/*/seed-3")), "the other runs would not print it either"


def test_links_to_folders_are_gone_through_and_ours_are_left_out(tmp_path: Path) -> None:
    data, root = tmp_path / "data", tmp_path / "root"
    for folder in (data, root / ".git", root / "results", root / ".mypy_cache" / "3.11"):
        folder.mkdir(parents=True)
    (root / ".mypy_cache" / "CACHEDIR.TAG").write_text("Signature: 8a477f597d28d172789f06886806bc55")
    (root / ".mypy_cache" / "3.11" / "missing_stubs").write_text("")
    (data / "x.npy").write_bytes(bytes(LARGE))
    (root / "data").symlink_to(data)
    (root / "loop").symlink_to(root)
    (root / "results" / "comparison.json").write_text("{}")
    (root / "a.py").write_text("")
    found = Contents.of(root)
    assert (found.copied, found.linked) == (["a.py"], ["data/x.npy"])
    found.lay_out(tmp_path / "target")
    assert not (tmp_path / "target" / "data").is_symlink(), "what is written there stays there"
    assert (tmp_path / "target" / "data" / "x.npy").resolve() == data / "x.npy"


def test_the_current_folder_as_the_folder_of_results_can_be_continued(project: Path) -> None:
    answer("--runs", "off", "--seeds", "1", "--out", ".")
    (project / "CACHEDIR.TAG").write_text("Signature: 8a477f597d28d172789f06886806bc55")
    found = Contents.of(project)
    assert {"train.py", "old.pt"} <= set(found.copied), "the user's files are copied"
    assert found.linked == ["data.npy"]
    assert not [name for name in found.copied if name.startswith("off-") or name == "comparison.json"]
    done = compare(
        "schnet", "--json", *METRIC, "--runs", "off", "--seeds", "2", "--out", ".", "--", "train.py", "--fast"
    )
    assert "1 of 2 runs were finished before" in done.stderr


def started(*words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "ace_plugins", "compare", "schnet", *METRIC, *words, "--", "train.py"]
    # Tests that run in the background of a shell inherit that SIGINT is ignored.
    heard = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=heard)


def until(what: Any, seconds: float = 60) -> Any:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if found := what():
            return found
        time.sleep(0.05)
    raise AssertionError("it did not happen")


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM], ids=["kill -9", "Ctrl-C", "kill"])
def test_killed_and_called_again_it_ends_in_the_same_table(
    project: Path, monkeypatch: pytest.MonkeyPatch, end: signal.Signals
) -> None:
    monkeypatch.setenv("PAUSE", "0.3")
    words = ["--runs", "off,strict", "--seeds", "2", "--out", "out", "--jobs", "1"]
    process = started(*words)
    until(lambda: len(list(project.glob("out/*/*/result.json"))) == 1)
    process.send_signal(end)
    _, summary = process.communicate(timeout=30)
    assert process.returncode == (-9 if end is signal.SIGKILL else 130)
    if end is not signal.SIGKILL:
        assert "stopped; 1 of 4 runs are finished" in summary
    monkeypatch.delenv("PAUSE")
    again = compare("schnet", "--json", *METRIC, *words, "--", "train.py")
    assert "1 of 4 runs were finished before" in again.stderr
    whole = compare("schnet", "--json", *METRIC, *words[:-4], "--", "train.py")
    values = [[run["values"] for run in json.loads(done.stdout)["runs"]] for done in (again, whole)]
    assert values[0] == values[1]


def test_one_run_killed_is_reported_and_the_others_go_on(project: Path) -> None:
    (project / "train.py").write_text(
        SCRIPT.replace(
            "if mode == os.environ", "os.kill(os.getpid(), 9) if mode == 'strict' else None\n    if mode == os.environ"
        )
    )
    summary = answer("--runs", "off,strict", "--seeds", "1", code=1)
    assert summary["failed"]["strict seed 1"].startswith("ended with signal 9")
    assert len(summary["runs"]) == 1


SEEDS = """
import random, sys
if "late" in sys.argv: random.seed(3)
import numpy, torch
if "late" in sys.argv:
    numpy.random.seed(3)
    torch.manual_seed(3)
print(random.random(), numpy.random.rand(), torch.rand(()).item())
from random import seed
seed(40); numpy.random.seed(40); torch.manual_seed(40); torch.cuda.manual_seed_all(40); torch.random.manual_seed(40)
print(random.random(), numpy.random.rand(), torch.rand(()).item())
numpy.random.seed([1, 2]); numpy.random.seed(None); seed("text")
"""


def test_every_seed_that_a_script_sets_is_shifted(tmp_path: Path) -> None:
    import random

    import numpy
    import torch

    (tmp_path / "s.py").write_text(SEEDS)
    environment = {**os.environ, "ACE_SEED_SHIFT": "2"}
    command = [sys.executable, "-m", "ace_plugins", "run", "schnet", "--mode", "off", "--", str(tmp_path / "s.py")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    unset, shifted = ([float(word) for word in line.split()] for line in done.stdout.splitlines())
    for seed, found in ((2, unset), (42, shifted)):
        expected = random.Random(seed).random(), numpy.random.RandomState(seed).rand()
        generator = torch.Generator().manual_seed(seed)
        assert found[:2] == list(expected), f"as with seed {seed}"
        assert found[2] == torch.rand((), generator=generator).item()


def test_run_comparison_returns_what_the_command_prints(project: Path) -> None:
    result = run_comparison(
        "schnet",
        ["train.py", "--fast"],
        runs={"off": {}, "half": {"mode": "strict"}},
        seeds=[1, 2],
        metrics=[r"test=test (\S+)"],
    )
    assert [row.run for row in result.rows] == ["off", "half"]
    assert result.rows[1].mean == pytest.approx(0.5 * result.rows[0].mean, rel=1e-12)
    assert result.differences[0].mean == pytest.approx(-0.5, rel=1e-12)
    assert result.sentences == ["half is better than off by 50 % (95 % interval 50 % to 50 %; better in 2 of 2 seeds)."]
    assert result.to_dict() == json.loads(json.dumps(result.to_dict()))
    printed = answer("--runs", "off,half:mode=strict", "--seeds", "2")
    assert printed == result.to_dict(), "the command reuses the results and prints the same"
    with pytest.raises(AceError, match="seeds"):
        run_comparison("schnet", ["train.py"], seeds=0)
