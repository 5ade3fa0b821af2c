"""Trials on this machine: so many at a time, each with its share of the processors, and a GPU of its own."""

from __future__ import annotations

import os
import queue
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

from ..errors import AceError
from .metrics import Reading
from .plan import Trial
from .results import Result, Store
from .trial import Stop, Stopped, Task, perform

TICK = 0.5
"""Seconds after which somebody who watches hears that nothing has happened."""


@dataclass
class Event:
    """Something happened to a trial; without one, time has passed."""

    trial: Trial | None = None
    reading: Reading | None = None
    result: Result | None = None
    failed: str = ""


@dataclass
class Machine:
    """What there is to share out."""

    processors: int
    devices: tuple[str, ...] = ()

    @classmethod
    def here(cls) -> Machine:
        available = getattr(os, "sched_getaffinity", None)
        count = len(available(0)) if available else os.cpu_count() or 1
        return cls(count, _devices())

    def jobs(self, asked: int | None) -> int:
        """How many at a time: what was asked for, one for each GPU, or one for every two processors."""
        return asked or len(self.devices) or max(1, self.processors // 2)


def _devices() -> tuple[str, ...]:
    """The GPUs that runs may use. Asked of the driver's own tool: importing torch would take seconds."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return tuple(word.strip() for word in named.split(",") if word.strip() not in ("", "-1"))
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(str(number) for number, line in enumerate(done.stdout.splitlines()) if line.startswith("GPU"))


@dataclass
class Local:
    """A pool of threads, each of which waits for one process."""

    jobs: int
    devices: Sequence[str] = ()
    _events: queue.SimpleQueue[Event] = field(default_factory=queue.SimpleQueue)

    def carry_out(self, store: Store, tasks: Mapping[Trial, Task]) -> Iterator[Event]:
        """All tasks, told as they go. When the iteration is given up, processes that run are stopped."""
        free: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        for number in range(self.jobs):
            free.put(self.devices[number % len(self.devices)] if self.devices else None)
        stop = Stop()

        def work(trial: Trial, task: Task) -> None:
            if stop.asked:
                return
            device = free.get()

            def tell(reading: Reading) -> None:
                self._events.put(Event(trial, reading))

            try:
                lay_out = store.comparison.contents.lay_out
                result = perform(task, store.place(trial), lay_out, tell, device=device, stop=stop)
                store.keep(trial, result)
                self._events.put(Event(trial, result=result))
            except AceError as error:
                self._events.put(Event(trial, failed=str(error)))
            except OSError as error:
                self._events.put(Event(trial, failed=f"{trial}: {error.strerror or error}"))
            except Stopped:
                pass
            finally:
                free.put(device)

        with ThreadPoolExecutor(self.jobs) as pool:
            waiting = {pool.submit(work, trial, task) for trial, task in tasks.items()}
            try:
                while waiting:
                    done, waiting = wait(waiting, timeout=TICK, return_when=FIRST_COMPLETED)
                    for each in done:
                        each.result()
                    yield Event()
                    while not self._events.empty():
                        yield self._events.get()
            finally:
                stop.now()
                pool.shutdown(wait=False, cancel_futures=True)
