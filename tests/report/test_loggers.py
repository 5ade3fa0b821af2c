"""Logged values, read back from the files that each library wrote."""

from __future__ import annotations

import copy
import gc
import json
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from clones import python
from toy import Layered

from ace_plugins import AceWarning, attach, project, read_trace
from ace_plugins.errors import ConfigError
from ace_plugins.plugins import plugin
from ace_plugins.report import observers as loggers
from ace_plugins.report.record import RECORDER
from ace_plugins.settings.config import LOGGERS

SITES = ["layers.0", "layers.1", "layers.2"]
NAMES = {f"ace/{name}/{site}" for name in ("gamma", "lambda", "u") for site in SITES}


def train(model: Any, steps: int) -> None:
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 3)).square().mean().backward()
        optimizer.step()


def needs(library: str) -> None:
    pytest.importorskip(library, reason=f"needs {library}: pip install '.[{library}]'")


# TensorBoard.


def events(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Tag -> (step, value), as TensorBoard reads them."""
    needs("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder))
    found.Reload()
    return {tag: [(e.step, e.value) for e in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def test_tensorboard_has_what_the_trace_has_beside_it(tmp_path: Path) -> None:
    needs("tensorboard")
    model = attach(Layered(), mode="resilient", spectral_norm=True, log="tensorboard", trace_every=4, error_every=6)
    train(model, 9)
    (folder,) = (tmp_path / "runs").iterdir()
    found = events(folder)
    assert found.keys() == NAMES | {"ace/error/relative", "ace/error/absolute"}, "and it is there before the run ends"
    lines = {line["step"]: line for line in read_trace(folder)}
    assert sorted(lines) == [1, 4, 6, 8]
    for name in ("gamma", "lambda", "u"):
        for number, site in enumerate(SITES):
            expected = [(step, pytest.approx(lines[step][name][number])) for step in (1, 4, 6, 8)]
            assert found[f"ace/{name}/{site}"] == expected
    for name in ("relative", "absolute"):
        errors = [(step, pytest.approx(lines[step]["error"][name])) for step in (1, 6)]
        assert found[f"ace/error/{name}"] == errors
    assert lines[8]["gamma"] != lines[1]["gamma"]


def test_tensorboard_without_a_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs("tensorboard")
    monkeypatch.setattr(RECORDER, "home", tmp_path)
    for _ in range(2):
        train(attach(Layered(), log="tensorboard", trace=False, trace_every=3, error_every=2), 4)
    gc.collect()
    folders = sorted((tmp_path / ".ace" / "tensorboard").iterdir())
    assert [len(list(folder.iterdir())) for folder in folders] == [1, 1], "a run is a folder"
    found = events(folders[0])
    assert [step for step, _ in found["ace/gamma/layers.1"]] == [1, 2, 3, 4]
    assert [step for step, _ in found["ace/error/relative"]] == [1, 2, 4]
    assert (tmp_path / ".ace" / ".gitignore").read_text() == "*\n"
    assert not (tmp_path / "runs").exists()


def test_steps_go_on_after_an_earlier_checkpoint_is_loaded(tmp_path: Path) -> None:
    needs("tensorboard")
    model = attach(Layered(), log="tensorboard", trace_every=2, error_every=3)
    train(model, 2)
    earlier = copy.deepcopy(model.state_dict())
    train(model, 3)
    model.load_state_dict(earlier)
    train(model, 4)
    (folder,) = (tmp_path / "runs").iterdir()
    steps = [line["step"] for line in read_trace(folder)]
    found = events(folder)
    assert [step for step, _ in found["ace/gamma/layers.0"]] == steps == sorted(set(steps))
    assert [step for step, _ in found["ace/error/relative"]] == [
        line["step"] for line in read_trace(folder) if "error" in line
    ]
    assert steps[-1] == 9


def test_of_processes_that_train_together_one_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs("tensorboard")
    monkeypatch.setattr(RECORDER, "home", tmp_path)
    monkeypatch.setenv("RANK", "1")
    train(attach(Layered(), log="tensorboard", error_every=1), 1)
    assert not list(tmp_path.rglob("*tfevents*"))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_forked_process_has_a_separate_log_and_a_killed_one_loses_nothing(tmp_path: Path) -> None:
    """In a forked process the thread that writes its parent's log is not there."""
    needs("tensorboard")
    code = (
        "import os, signal, sys, torch; sys.path.insert(0, 'tests')\n"
        "from ace_plugins import attach\nfrom ace_plugins.plugins.registry import registry\n"
        "from toy import Layered, LayeredAdapter\nregistry().add(LayeredAdapter(), 'layered')\n"
        "torch.set_num_threads(1)\n"
        "m = attach(Layered(), log='tensorboard', trace_every=1); o = torch.optim.SGD(m.parameters(), lr=.01)\n"
        "def step():\n    m(torch.randn(8, 3)).square().mean().backward(); o.step(); o.zero_grad()\n"
        "step(); child = os.fork()\n"
        "step()\n"
        "if child:\n    assert os.waitpid(child, 0)[1] == 0; step(); os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = python(Path(__file__).parents[2], "-c", code, ACE_RUNS=str(tmp_path / "runs"))
    assert done.returncode == -signal.SIGKILL, done.stderr
    steps = [[step for step, _ in events(folder)["ace/gamma/layers.0"]] for folder in (tmp_path / "runs").iterdir()]
    assert sorted(steps) == [[1, 2, 3], [2]]


# Weights & Biases.


@pytest.fixture
def wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for name, value in {"MODE": "offline", "DIR": str(tmp_path), "SILENT": "true"}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    needs("wandb")
    import wandb

    yield wandb
    wandb.teardown()  # it reads its environment once


def rows(folder: Path) -> list[dict[str, Any]]:
    """The history in the one file that an offline run wrote. The frame is that of LevelDB's log, in blocks of 32 KiB;
    what it frames is read by wandb itself."""
    import wandb
    from wandb.proto.wandb_internal_pb2 import Record

    wandb.teardown()  # waits for the process that writes the file; finish() does not
    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
    data, place, message, found = path.read_bytes(), 7, b"", []
    while place + 7 <= len(data):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        _, length, part = struct.unpack("<IHB", data[place : place + 7])
        message += data[place + 7 : place + 7 + length]
        place += 7 + length
        if part in (1, 4):  # whole, or its last part
            record, message = Record.FromString(message), b""
            if record.HasField("history"):
                items = record.history.item
                found.append({item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items})
    return found


def test_wandb_gets_a_new_run(tmp_path: Path, wandb: Any) -> None:
    model = attach(Layered(), log="wandb", trace_every=4, error_every=6)
    train(model, 5)
    own = wandb.run
    assert (own.project, own.config["mode"]) == ("ace", "strict")
    assert own.summary["ace/gamma/layers.2"] == pytest.approx(
        read_trace(*(tmp_path / "runs").iterdir())[-1]["gamma"][2]
    )
    train(model, 4)
    project(model)
    assert wandb.run is None, "a run that was started here ends here"
    found = rows(tmp_path)
    assert [row["ace/step"] for row in found] == [1, 4, 6, 8]
    assert all(row.keys() >= NAMES for row in found)
    assert ["ace/error/relative" in row for row in found] == [True, False, True, False]


def test_wandb_without_a_trace(tmp_path: Path, wandb: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_DIR")
    monkeypatch.setattr(RECORDER, "home", tmp_path)
    model = attach(Layered(), log="wandb", trace=False)
    train(model, 1)
    project(model)
    assert [row["ace/step"] for row in rows(tmp_path / ".ace")] == [1]
    assert (tmp_path / ".ace" / ".gitignore").read_text() == "*\n"


@pytest.mark.parametrize(("numbered", "steps"), [(False, [4, 12, 16]), (True, [12, 16, None])])
def test_the_scripts_own_run_of_wandb_is_used_and_loses_nothing(
    tmp_path: Path, wandb: Any, numbered: bool, steps: list[int | None]
) -> None:
    """ACE makes more steps than the script writes rows, and wandb drops rows whose number goes back.

    A row that the script has numbered stays open until the next, so it holds what ACE did meanwhile."""
    run = wandb.init(project="script")
    model = attach(Layered(), log="wandb", trace_every=4)
    for epoch in range(3):
        train(model, 6)
        wandb.log({"loss": 1.0 / (1 + epoch)}, step=epoch if numbered else None)
    project(model)
    assert wandb.run is run, "it is the script's to finish"
    run.finish()
    found = rows(tmp_path)
    assert [(row["_step"], row["loss"]) for row in found] == [(0, 1.0), (1, 0.5), (2, 1 / 3)]
    assert [row.get("ace/step") for row in found] == steps
    assert all(row.keys() >= NAMES for row in found if "ace/step" in row)


# trackio.

SCRIPT = """
import json, sys, torch; sys.path.insert(0, 'tests')
from ace_plugins import attach, project
from ace_plugins.plugins.registry import registry
from toy import Layered, LayeredAdapter
registry().add(LayeredAdapter(), 'layered')
torch.set_num_threads(1)
def trained(steps):
    model = attach(Layered(), log='trackio', trace_every=4, error_every=6)
    optimizer = torch.optim.Adam(model.parameters())
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 3)).square().mean().backward()
        optimizer.step()
        if step == 4 and 'trackio' in sys.argv:
            trackio.log({'loss': 1.0})
    return model
assert 'trackio' not in sys.modules
if 'trackio' in sys.argv:
    import trackio
    run = trackio.init(project='script')
    project(trained(9))
    assert trackio.context_vars.current_run.get() is run, "it is the script's to finish"
    trackio.finish()
else:
    model = trained(9)  # which ends with the process
    print('the script')
"""
READ = """
import json, sys
from trackio.sqlite_storage import SQLiteStorage
(run,) = SQLiteStorage.get_runs(sys.argv[1])
print(json.dumps([{**row, 'timestamp': ''} for row in SQLiteStorage.get_logs(sys.argv[1], run)]))
"""


def tracked(tmp_path: Path, script: str) -> tuple[list[dict[str, Any]], subprocess.CompletedProcess[str]]:
    """The rows that trackio has stored, after a script has run. Its folder is fixed when it is imported."""
    needs("trackio")
    where = {"TRACKIO_DIR": str(tmp_path / "trackio"), "ACE_RUNS": str(tmp_path / "runs")}
    done = python(Path(__file__).parents[2], "-c", SCRIPT, script, **where)
    assert done.returncode == 0, done.stderr
    read = python(tmp_path, "-c", READ, {"trackio": "script"}.get(script, "ace"), **where)
    assert read.returncode == 0, read.stderr
    found: list[dict[str, Any]] = json.loads(read.stdout.splitlines()[-1])
    assert {str(path.name) for path in (tmp_path / "trackio").glob("*.db")}, "the folder it was given"
    return found, done


def test_trackio_gets_a_new_run(tmp_path: Path) -> None:
    found, done = tracked(tmp_path, "none")
    assert done.stdout == "the script\n", "trackio tells of itself elsewhere"
    assert [(row["step"], row["ace/step"]) for row in found] == [(step, step) for step in (1, 4, 6, 8)]
    assert all(row.keys() >= NAMES for row in found)
    gamma = [line["gamma"][0] for line in read_trace(*(tmp_path / "runs").iterdir())]
    assert [row["ace/gamma/layers.0"] for row in found] == pytest.approx(gamma[:4])
    assert ["ace/error/relative" in row for row in found] == [True, False, True, False]


def test_the_scripts_own_run_of_trackio_is_used(tmp_path: Path) -> None:
    found, _ = tracked(tmp_path, "trackio")
    assert [row.get("ace/step", "loss") for row in found] == [1, 4, "loss", 6, 8]
    assert [row["step"] for row in found] == [0, 1, 2, 3, 4], "the script counts on"


# Failures, and libraries that are not used.


@pytest.mark.parametrize("log", LOGGERS)
def test_a_logger_that_is_not_installed_is_reported_before_training(
    log: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder of its name is none: wandb makes one."""
    (tmp_path / log).mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    hidden = {"tensorboard", "wandb", "trackio"}
    real = plugin.find_spec

    def without(name: str) -> Any:
        from importlib.machinery import PathFinder

        return PathFinder.find_spec(name, [str(tmp_path)]) if name in hidden else real(name)

    monkeypatch.setattr(plugin, "find_spec", without)
    assert without(log) is not None
    model = Layered()
    before = list(model.state_dict())
    told = rf"^log '{log}': .*pip install '\.\[{log}\]'$"
    with pytest.raises(ConfigError, match=told) as caught:
        attach(model, log=log)
    assert [name for name, _ in caught.value.problems] == ["log"]
    assert list(model.state_dict()) == before


class Failing:
    """Fails to open, to log or to close, as a logger whose disk is full."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.calls: list[str] = []

    def __call__(self, record: Any) -> Failing:
        return self._called("open")

    def log(self, values: Any, step: int) -> None:
        self._called(f"log {step}")

    def close(self) -> None:
        self._called("close")

    def _called(self, what: str) -> Failing:
        self.calls.append(what)
        if what == self.where:
            raise OSError("No space left\non device")
        return self


@pytest.mark.parametrize(
    ("where", "calls"),
    [
        ("open", ["open"]),
        ("log 1", ["open", "log 1"]),
        ("log 2", ["open", "log 1", "log 2"]),
        ("close", ["open", "log 1", "log 2", "log 3", "close"]),
    ],
)
def test_a_logger_that_fails_is_reported_once_and_costs_no_training(
    where: str, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = Failing(where)
    monkeypatch.setitem(loggers.KINDS, "tensorboard", failing)
    monkeypatch.setattr(plugin, "find_spec", lambda package: plugin.__spec__)
    model = attach(Layered(), log="tensorboard", trace_every=1)
    with pytest.warns(AceWarning, match="tensorboard .*OSError: No space left on device") as caught:  # noqa: PT031
        train(model, 3)
        project(model)
    assert len(caught) == 1
    assert failing.calls == calls


def test_the_end_of_a_forked_process_does_not_end_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    failing = Failing("never")
    monkeypatch.setitem(loggers.KINDS, "wandb", failing)
    monkeypatch.setattr(plugin, "find_spec", lambda package: plugin.__spec__)
    model = attach(Layered(), log="wandb")
    train(model, 1)
    with monkeypatch.context() as forked:
        forked.setattr(os, "getpid", lambda: -1)
        loggers.LOGGERS.logs[model].close()
    assert failing.calls == ["open", "log 1"]
    project(model)
    assert failing.calls == ["open", "log 1", "close"]


def test_a_log_waits_for_the_device_only_where_it_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading a value off the device is what waits."""
    failing = Failing("never")
    monkeypatch.setitem(loggers.KINDS, "tensorboard", failing)
    monkeypatch.setattr(plugin, "find_spec", lambda package: plugin.__spec__)
    model = attach(Layered(), log="tensorboard", trace=False, trace_every=4)
    read: list[int] = []
    real = torch.Tensor.tolist

    def tolist(tensor: torch.Tensor) -> Any:
        read.append(model.ace.duals.count)
        return real(tensor)

    monkeypatch.setattr(torch.Tensor, "tolist", tolist)
    train(model, 9)
    assert read == [1, 4, 8]


def test_libraries_that_nobody_asked_for_are_not_imported() -> None:
    code = (
        "import sys, torch; sys.path.insert(0, 'tests')\n"
        "from ace_plugins import attach\nfrom ace_plugins.plugins.registry import registry\n"
        "from toy import Layered, LayeredAdapter\nregistry().add(LayeredAdapter(), 'layered')\n"
        "m = attach(Layered(), trace=False, error_every=1); o = torch.optim.SGD(m.parameters(), lr=.01)\n"
        "m(torch.randn(8, 3)).square().mean().backward(); o.step()\n"
        "assert 'ace_plugins.report.observers' in sys.modules\n"
        f"print(*sorted(set({LOGGERS}) & set(sys.modules)))"
    )
    done = python(Path(__file__).parents[2], "-c", code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ""


def test_every_logger_has_its_extra() -> None:
    import importlib.metadata

    assert set(loggers.KINDS) == set(LOGGERS)
    extras = importlib.metadata.metadata("ace-plugins").get_all("Provides-Extra") or []
    assert set(LOGGERS) <= set(extras), f"reinstall ace-plugins: {sys.executable} -m pip install -e ."
