"""Trials on Ray: in process with a stub, and on a real cluster of two nodes on this machine, one of which is lost."""

from __future__ import annotations

import io
import json
import os
import pickle
import secrets
import signal
import socket
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from ace_plugins import AceError, run_comparison
from ace_plugins.compare.cluster import pack
from ace_plugins.compare.plan import LARGE, Contents

SCRIPT = """
import os, random, time
from pathlib import Path
random.seed(5)
with open(os.environ["SHARED"] + "/started", "a") as file:
    print(os.environ["NODE"], file=file)
print("data", len(Path("data.npy").read_bytes()))
for epoch in range(1, 5):
    time.sleep(0.5)
    print("epoch", epoch, "test", random.random())
"""
WORDS = ["--metric", r"test=test (\S+)", "--runs", "off,strict", "--seeds", "2", "--threads", "1", "--json"]


def test_small_data_travels_and_large_data_is_linked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.py").write_text("code")
    (tmp_path / "data.npy").write_bytes(bytes(LARGE))
    for limit, expected in ((LARGE, {}), (LARGE - 1, {"data.npy": str((tmp_path / "data.npy").resolve())})):
        monkeypatch.setattr("ace_plugins.compare.cluster.SMALL", limit)
        archive, links = pack(Contents.of(tmp_path))
        assert links == expected
        with tarfile.open(fileobj=io.BytesIO(archive)) as packed:
            assert set(packed.getnames()) == {"a.py", "data.npy"} - set(expected)


class RayInProcess(ModuleType):
    """The part of Ray's interface that the backend uses; tasks run in this process, on pickled arguments."""

    def __init__(self, *, lose: str = "") -> None:
        super().__init__("ray")
        self.lose = lose
        self.exceptions = SimpleNamespace(RayError=KeyError)
        self.init = self.shutdown = lambda **options: None
        self.put = pickle.dumps
        self.cluster_resources = dict

    def remote(self, function: Any) -> Any:
        def submit(name: str, *arguments: Any) -> tuple[str, bytes]:
            task, archive, links = pickle.loads(pickle.dumps(arguments))
            return name, pickle.dumps(function(task, pickle.loads(archive), links))

        return SimpleNamespace(options=lambda name, **_: SimpleNamespace(remote=partial(submit, name)))

    def wait(self, references: list[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        return references[:1], references[1:]

    def get(self, reference: tuple[str, bytes]) -> Any:
        name, result = reference
        if name == self.lose:
            raise KeyError("node lost")
        return pickle.loads(result)


def test_tasks_are_sent_and_results_and_logs_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text("import sys; print('test', sys.argv[1]); sys.exit(sys.argv[1] == '3')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "ray", RayInProcess(lose="off seed 2"))
    metrics = [r"test=test (\S+)"]
    result = run_comparison("schnet", ["train.py", "{seed}"], runs="off", metrics=metrics, seeds=3, on="ray", out="out")
    assert {each.seed: each.metrics for each in result.results} == {1: {"test": 1.0}}
    assert result.failed.keys() == {"off seed 2", "off seed 3"}
    assert "node lost" in result.failed["off seed 2"]
    assert result.failed["off seed 3"].startswith("ended with exit code 1; the end of log.txt:")
    assert len(list((tmp_path / "out").glob("*/seed-1/result.json"))) == 1
    assert [path.read_text() for path in sorted((tmp_path / "out").glob("*/*/log.txt"))] == ["test 1\n", "test 3\n"]


def test_a_grid_goes_through_ray_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text("import sys; print('test', sys.argv[2], 'val', abs(float(sys.argv[2]) - 2))")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "ray", RayInProcess())
    metrics, grid = ["test=test {number}", "validation=val {number}"], {"lr": [1, 2, 3]}
    result = run_comparison(
        "schnet", ["train.py", "--lr", "1"], runs="off", metrics=metrics, seeds=2, grid=grid, on="ray", out="out"
    )
    assert [(each.run, each.seed, each.metrics["test"]) for each in result.results] == [
        ("off (lr=2)", 1, 2.0),
        ("off (lr=2)", 2, 2.0),
    ]


def test_ray_that_is_missing_or_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text("print('test 1')")
    monkeypatch.chdir(tmp_path)
    ray = RayInProcess()

    def refuse(**options: Any) -> None:
        raise ConnectionError("no answer")

    ray.init = refuse  # type: ignore[assignment]
    for module, expected in ((None, "ray is not installed"), (ray, "no answer; .*RAY_AUTH_TOKEN")):
        monkeypatch.setitem(sys.modules, "ray", module)
        with pytest.raises(AceError, match=expected):
            run_comparison("schnet", ["train.py"], metrics=["test {number}"], on="10.0.0.1:6379")


def run(*words: str, folder: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "ace_plugins", "compare", "schnet", *WORDS, *words, "--", "train.py"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    return told


class Nodes:
    """``ray start``, once for the head and once for each further node."""

    def __init__(self, shared: Path) -> None:
        self.shared = shared
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str) -> None:
        head = ["--head", f"--port={self.port}", "--include-dashboard=false"]
        where = head if not self.processes else [f"--address=127.0.0.1:{self.port}"]
        ray = Path(sys.executable).parent / "ray"
        command = [str(ray), "start", *where, "--node-ip-address=127.0.0.1", "--num-cpus=1", "--block"]
        environment = {**os.environ, "NODE": name}
        quiet: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.processes[name] = subprocess.Popen(command, env=environment, start_new_session=True, **quiet)
        self.started = self.shared / "started"

    def lose(self, name: str) -> None:
        os.killpg(self.processes[name].pid, signal.SIGKILL)
        self.processes[name].wait()


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Nodes]:
    pytest.importorskip("ray", reason="ray is not installed: pip install '.[ray]'")
    # A secret of this cluster's own, for its nodes and for those who call them.
    told = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_USAGE_STATS_ENABLED": "0"}
    for name, value in {**told, "NODE": "none", "SHARED": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    made = Nodes(tmp_path)
    made.start("one")
    until(lambda: _answers(made.port))
    made.start("two")
    time.sleep(5)
    yield made
    for name, process in made.processes.items():
        if process.poll() is None:
            made.lose(name)


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def until(what: Callable[[], Any], seconds: float = 90) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.1)


def test_two_nodes_give_the_same_and_a_lost_one_is_made_good(nodes: Nodes, tmp_path: Path) -> None:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT)
    (folder / "data.npy").write_bytes(bytes(LARGE))
    here = run("--out", "here", "--jobs", "2", folder=folder)
    nodes.started.unlink()
    there = run("--out", "there", "--on", f"127.0.0.1:{nodes.port}", folder=folder)
    values = [[each["values"] for each in told["runs"]] for told in (here, there)]
    assert values[0] == values[1]
    assert set(nodes.started.read_text().split()) == {"one", "two"}, "both have worked"
    nodes.started.unlink()
    words = ["--out", "lost", "--on", f"127.0.0.1:{nodes.port}"]
    command = [sys.executable, "-m", "ace_plugins", "compare", "schnet", *WORDS, *words, "--", "train.py"]
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    until(lambda: nodes.started.exists() and "two" in nodes.started.read_text())
    nodes.lose("two")
    told, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    assert [each["values"] for each in json.loads(told)["runs"]] == values[0]
