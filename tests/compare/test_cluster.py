"""Trials on a Ray cluster of two nodes on this machine, over loopback: the same results, also when a node is lost."""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

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
    for name in ("one.npy", "two.npy"):
        (tmp_path / name).write_bytes(bytes(LARGE))
    monkeypatch.setattr("ace_plugins.compare.cluster.SMALL", LARGE)
    archive, links = pack(Contents.of(tmp_path))
    assert links == {"two.npy": str((tmp_path / "two.npy").resolve())}
    assert len(archive) > 0


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
    pytest.importorskip("ray", reason="ray is not installed: pip install 'ace-plugins[ray]'")
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
