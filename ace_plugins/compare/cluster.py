"""Run trials on a Ray cluster, each as a task that reserves its processors and a GPU.

Code and small data are sent with each task. Large data is linked by path, so it must be on a shared disk. The result
and the log are sent back. If a node is lost, Ray restarts its tasks on another one.
"""

from __future__ import annotations

import io
import os
import tarfile
import tempfile
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import AceError
from .plan import LOG, Contents, Store, Trial, TrialResult
from .trial import TICK, Event, Task, perform

SMALL = 64 * 2**20
"""Largest total size, in bytes, of the data files that are sent with a task. Further files are linked."""


class RayBackend:
    """Runs trials on the Ray cluster at an address. The address "ray" starts a cluster on this machine."""

    def __init__(self, address: str, jobs: int) -> None:
        try:
            import ray
        except ImportError:
            raise AceError(f"--on {address}: ray is not installed; pip install 'ace-plugins[ray]'") from None
        self.ray: Any = ray
        self.address = address
        self.jobs = jobs

    def run(self, store: Store, tasks: Sequence[Task]) -> Generator[Event]:
        """Run all tasks, and yield an event whenever a task ends."""
        ray = self.ray
        self._connect(max((task.threads for task in tasks), default=1))
        try:
            archive, links = pack(store.comparison.contents)
            shared = ray.put(archive)
            gpus = 1 if ray.cluster_resources().get("GPU") else 0
            remote = ray.remote(_perform_on_node)
            waiting = {}
            for task in tasks:
                options = remote.options(num_cpus=task.threads, num_gpus=gpus, max_retries=-1, name=str(task.trial))
                waiting[options.remote(task, shared, links)] = task.trial
            while waiting:
                done, _ = ray.wait(list(waiting), timeout=TICK)
                for reference in done:
                    yield self._receive(store, waiting.pop(reference), reference)
        finally:
            ray.shutdown()

    def _connect(self, threads: int) -> None:
        where: dict[str, Any] = {"address": self.address}
        if self.address == "ray":
            where = {"num_cpus": self.jobs * threads, "include_dashboard": False}
        try:
            self.ray.init(log_to_driver=False, logging_level="error", **where)
        except (ConnectionError, ValueError, RuntimeError, TimeoutError) as error:
            raise AceError(
                f"--on {self.address}: cannot connect to a Ray cluster there: {' '.join(str(error).split())[:200]}; "
                "check that it is running and that RAY_AUTH_TOKEN is set if it requires a token"
            ) from None

    def _receive(self, store: Store, trial: Trial, reference: Any) -> Event:
        try:
            result, failed, log = self.ray.get(reference)
        except self.ray.exceptions.RayError as error:
            return Event(trial, failed=f"{trial}: {' '.join(str(error).split())[:300]}")
        folder = store.trial_folder(trial)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / LOG).write_text(log, encoding="utf-8")
        if result is not None:
            store.save(trial, result)
        return Event(trial, result=result, failed=failed)


def pack(contents: Contents) -> tuple[bytes, dict[str, str]]:
    """Return an archive of the code and small data, and a mapping from names of large data files to their paths."""
    links, budget = {}, SMALL
    names = list(contents.copied)
    for name in contents.linked:
        size = os.stat(contents.root / name).st_size
        if size <= budget:
            budget -= size
            names.append(name)
        else:
            links[name] = str((contents.root / name).resolve())
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=1) as archive:
        for name in names:
            archive.add(os.path.realpath(contents.root / name), name)
    return buffer.getvalue(), links


def _perform_on_node(task: Task, archive: bytes, links: Mapping[str, str]) -> tuple[TrialResult | None, str, str]:
    """Run a trial on a node of the cluster. Returns the result or None, the error message, and the log."""

    def lay_out(target: Path) -> None:
        with tarfile.open(fileobj=io.BytesIO(archive), mode="r:gz") as code:
            code.extractall(target, filter="data")
        for name, path in links.items():
            if not os.path.exists(path):
                raise AceError(f"{task.trial}: {path} is not on this node; put the data on a disk that all nodes share")
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            (target / name).symlink_to(path)

    with tempfile.TemporaryDirectory(prefix="ace-compare-") as name:
        folder = Path(name)
        result, failed = None, ""
        try:
            result = perform(task, folder, lay_out)
        except AceError as error:
            failed = str(error).replace(f"{folder}{os.sep}", "")
        log = folder / LOG
        return result, failed, log.read_text(encoding="utf-8") if log.exists() else ""
