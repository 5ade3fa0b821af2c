"""Runs trials on a Ray cluster, each as a task that reserves its processors and a GPU.

Code and small data are sent to the nodes. Large data is linked by path, so it must be on a disk that all nodes share.
If a node is lost, Ray restarts its tasks on another one.
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
from ..plugins.plugin import one_line
from .plan import LOG, Contents, Store, TrialResult, link
from .trial import TICK, Event, Task, perform

SMALL = 64 * 2**20  # largest total size, in bytes, of data files that are sent instead of linked


def run_on_ray(store: Store, tasks: Sequence[Task], jobs: int, address: str) -> Generator[Event]:
    """Run all tasks on the Ray cluster at an address, and yield an event when a task ends.

    The address "ray" starts a cluster on this machine, for ``jobs`` simultaneous trials.
    """
    ray = _connect(address, jobs * max((task.threads for task in tasks), default=1))
    try:
        archive, links = pack(store.comparison.contents)
        data = store.comparison.contents.data_state()
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
                trial = waiting.pop(reference)
                try:
                    result, failed, log = ray.get(reference)
                except ray.exceptions.RayError as error:
                    yield Event(trial, failed=one_line(error)[:300])
                    continue
                store.comparison.contents.check_data(data)
                folder = store.trial_folder(trial)
                folder.mkdir(parents=True, exist_ok=True)
                (folder / LOG).write_text(log, encoding="utf-8")
                if result is not None:
                    store.save(trial, result)
                yield Event(trial, result=result, failed=failed)
    finally:
        ray.shutdown()


def _connect(address: str, processors: int) -> Any:
    """Connect to a Ray cluster, or start one with this number of processors, and return the module ``ray``."""
    try:
        import ray
    except ImportError:
        raise AceError(
            f"--on {address}: ray is not installed; in a clone of ace-plugins, run pip install '.[ray]'"
        ) from None
    started: dict[str, Any] = {"num_cpus": processors, "include_dashboard": False}
    where = started if address == "ray" else {"address": address}
    try:
        ray.init(log_to_driver=False, logging_level="error", **where)
    except (ConnectionError, ValueError, RuntimeError, TimeoutError) as error:
        check = "check that the cluster is running, and set RAY_AUTH_TOKEN if the cluster requires a token"
        raise AceError(f"--on {address}: cannot connect to a Ray cluster: {one_line(error)[:200]}; {check}") from None
    return ray


def pack(contents: Contents) -> tuple[bytes, dict[str, str]]:
    """Return an archive of the code and small data, and the paths of the data files to link, by name."""
    links = {name: str((contents.root / name).resolve()) for name in contents.linked}
    if sum(os.stat(path).st_size for path in links.values()) <= SMALL:
        links = {}
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=1) as archive:
        for name in (*contents.copied, *contents.linked):
            if name not in links:
                archive.add(os.path.realpath(contents.root / name), name)
    return buffer.getvalue(), links


def _perform_on_node(task: Task, archive: bytes, links: Mapping[str, str]) -> tuple[TrialResult | None, str, str]:
    """Run a trial on a node of the cluster. Returns the result or None, the error message, and the log."""

    def lay_out(target: Path) -> None:
        with tarfile.open(fileobj=io.BytesIO(archive), mode="r:gz") as code:
            code.extractall(target, filter="data")
        for name, path in links.items():
            if not os.path.exists(path):
                raise AceError(f"{path} is not on this node; put the data on a disk that all nodes share")
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            link(Path(path), target / name)

    with tempfile.TemporaryDirectory(prefix="ace-compare-") as name:
        result, failed, log = None, "", Path(name, LOG)
        try:
            result = perform(task, Path(name), lay_out)
        except (AceError, OSError) as error:
            failed = str(error).replace(f"{name}{os.sep}", "")
        return result, failed, log.read_text(encoding="utf-8") if log.exists() else ""
