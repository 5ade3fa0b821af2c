"""Trials on a Ray cluster: each is a task with the processors and the GPU it needs, wherever they are free.

Code and small data travel with a task. Large data is linked where the task runs, so it must be there, as on a shared
disk. What comes back is the result and the log. When a node is lost, Ray starts its tasks again elsewhere.
"""

from __future__ import annotations

import io
import os
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..errors import AceError
from .local import TICK, Event
from .plan import Contents, Trial
from .results import LOG, Result, Store
from .trial import Task, perform

SMALL = 64 * 2**20
"""Bytes of data that travel; the rest is linked."""
HERE = "ray"


class Cluster:
    """Ray, on this machine or at an address."""

    def __init__(self, where: str, jobs: int) -> None:
        self.where = where
        self.jobs = jobs
        try:
            import ray
        except ImportError:
            raise AceError(f"--on {where}: ray is not installed; pip install 'ace-plugins[ray]'") from None
        self.ray: Any = ray

    def carry_out(self, store: Store, tasks: Mapping[Trial, Task]) -> Iterator[Event]:
        """All tasks, told as they end."""
        ray = self.ray
        self._join(max((task.threads for task in tasks.values()), default=1))
        try:
            archive, links = packed(store.comparison.contents)
            cargo = ray.put(archive)
            gpus = 1 if ray.cluster_resources().get("GPU") else 0
            remote = ray.remote(travelled)
            waiting = {
                remote.options(num_cpus=task.threads, num_gpus=gpus, max_retries=-1, name=str(trial)).remote(
                    task, cargo, links
                ): trial
                for trial, task in tasks.items()
            }
            while waiting:
                done, _ = ray.wait(list(waiting), timeout=TICK)
                yield Event()
                for reference in done:
                    yield self._ended(store, waiting.pop(reference), reference)
        finally:
            ray.shutdown()

    def _join(self, threads: int) -> None:
        quiet = {"include_dashboard": False, "log_to_driver": False, "logging_level": "error"}
        try:
            if self.where == HERE:
                self.ray.init(num_cpus=self.jobs * threads, **quiet)
            else:
                self.ray.init(address=self.where, log_to_driver=False, logging_level="error")
        except (ConnectionError, ValueError, RuntimeError, TimeoutError) as error:
            told = " ".join(str(error).split())
            raise AceError(
                f"--on {self.where}: no Ray cluster lets us in there: {told[:200]}; see that it is up, and that "
                "RAY_AUTH_TOKEN is set to its token if it wants one"
            ) from None

    def _ended(self, store: Store, trial: Trial, reference: Any) -> Event:
        try:
            result, failed, log = self.ray.get(reference)
        except self.ray.exceptions.RayError as error:
            return Event(trial, failed=f"{trial}: {' '.join(str(error).split())[:300]}")
        place = store.place(trial)
        place.mkdir(parents=True, exist_ok=True)
        (place / LOG).write_text(log, encoding="utf-8")
        if failed:
            return Event(trial, failed=failed)
        made = Result(**result)
        store.keep(trial, made)
        return Event(trial, result=made)


def packed(contents: Contents) -> tuple[bytes, dict[str, str]]:
    """What travels, and what is linked: name -> path."""
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


def travelled(task: Task, archive: bytes, links: Mapping[str, str]) -> tuple[dict[str, Any], str, str]:
    """On the node that carries it out: (result, why it failed, log)."""

    def lay_out(target: Path) -> None:
        with tarfile.open(fileobj=io.BytesIO(archive), mode="r:gz") as packed_code:
            packed_code.extractall(target, filter="data")
        for name, path in links.items():
            if not os.path.exists(path):
                raise AceError(f"{task.trial}: {path} is not on this node; put the data on a disk that all share")
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            (target / name).symlink_to(path)

    with tempfile.TemporaryDirectory(prefix="ace-compare-") as folder:
        place = Path(folder)
        try:
            result, failed = vars(perform(task, place, lay_out, lambda reading: None)), ""
        except AceError as error:
            result, failed = {}, str(error).replace(f"{place}{os.sep}", "")
        log = place / LOG
        return result, failed, log.read_text(encoding="utf-8") if log.exists() else ""
