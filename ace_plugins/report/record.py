"""The run of one model, as one record: what it was, where gamma, lambda and u went, what was measured, how it ended."""

from __future__ import annotations

import dataclasses
import math
import os
import sys
import time
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import AceWarning
from .trace import TraceFile, finite, relative
from .verdicts import sites_verdicts, whole_verdict

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ..engine.state import Ace


class History:
    """gamma, lambda and u over a run: a bounded number of evenly spaced points, kept on their device, so that recording
    waits for nothing."""

    def __init__(self, points: int = 256) -> None:
        self.points = points
        self.every = 1
        self._taken: list[tuple[int, Tensor]] = []

    def record(self, step: int, snapshot: Tensor) -> None:
        """``snapshot``: gamma, lambda and u of every site, [3, sites]."""
        if step % self.every:
            return
        self._taken.append((step, snapshot))
        if len(self._taken) > self.points:
            self.every *= 2
            # By their steps: a run that goes on from a checkpoint may begin anywhere.
            self._taken = [taken for taken in self._taken if not taken[0] % self.every]

    def __len__(self) -> int:
        return len(self._taken)

    def per_site(self, *, now: Tensor) -> list[tuple[list[float], list[float], list[float]]]:
        """Of each site its gammas, its lambdas and its us, the last ones being those of now."""
        points = [*(snapshot.tolist() for _, snapshot in self._taken), now.tolist()]
        gamma, lambda_, u = ([list(site) for site in zip(*(p[row] for p in points), strict=True)] for row in range(3))
        return list(zip(gamma, lambda_, u, strict=True))


class Record:
    """The run of one model in one process. It outlives the model: it holds ACE's small tensors, not the model."""

    def __init__(self, model: nn.Module, ace: Ace) -> None:
        self.model = type(model).__name__
        self.adapter = ace.adapter
        self.config = ace.config
        self.sites = [site.name for site in ace.sites]
        self.gamma = ace.gamma
        self.duals = ace.duals
        self.process = os.getpid()
        self.trace: TraceFile | None = None
        self.begun = False
        """It has made a step."""
        self.errors: list[dict[str, Any]] = []
        """The equivariance errors that were measured."""
        self.measurable = True
        self.finished = False
        self.history = History()
        self._warned = False

    @property
    def folder(self) -> Path | None:
        return None if self.trace is None else self.trace.folder

    @property
    def steps(self) -> int:
        return self.duals.count

    def snapshot(self) -> Tensor:
        """gamma, lambda and u of every site now, [3, sites]."""
        return self.duals.snapshot(self.gamma)

    def open_trace(self, runs: Path) -> None:
        """Make the folder of this run. A full disk must not cost anyone their training run."""
        about = {
            "adapter": self.adapter,
            "sites": self.sites,
            "config": dataclasses.asdict(self.config),
            "command": sys.argv,
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "torch": version("torch"),
        }
        try:
            self.trace = TraceFile(runs, self.adapter, about)
        except OSError as error:
            _no_trace(error)

    def write(self, **more: Any) -> None:
        """A line of the trace, of how things are now."""
        if self.trace is None:
            return
        values = self.snapshot().tolist()
        self._warn_if_diverged(values[0])
        gamma, lambda_, u = (list(map(finite, row)) for row in values)
        try:
            self.trace.write({"step": self.steps, "gamma": gamma, "lambda": lambda_, "u": u, **more})
        except OSError as error:
            self.trace = None
            _no_trace(error)

    def _warn_if_diverged(self, gamma: list[float]) -> None:
        if not self._warned and not all(map(math.isfinite, gamma)):
            self._warned = True
            sites = [name for name, value in zip(self.sites, gamma, strict=True) if not math.isfinite(value)]
            warnings.warn(
                f"gamma is not finite at step {self.steps} (sites {', '.join(sites)}): the run has diverged; "
                "lower the learning rate",
                AceWarning,
                stacklevel=2,
            )

    def finish(self) -> None:
        """The last line, once: when the process ends, the model is projected, or nobody holds it any more."""
        if not self.finished and self.process == os.getpid():  # a forked child ends without ending the run
            self.finished = True
            self.write(finished=True)

    def to_dict(self) -> dict[str, Any]:
        """How the run ended, with a verdict on each site and on the whole."""
        history = self.history.per_site(now=self.snapshot())
        verdicts = sites_verdicts(self.config, history, landed=self.duals.landed)
        now = [tuple(values[-1] for values in site) for site in history]
        errors = [self.errors[0], self.errors[-1]] if len(self.errors) > 1 else self.errors
        return {
            "model": self.model,
            "adapter": self.adapter,
            "mode": self.config.mode,
            "steps": self.steps,
            "landed": self.duals.landed,
            "verdict": whole_verdict(self.config, self.sites, history, verdicts, self.steps),
            "folder": None if self.folder is None else relative(self.folder),
            "errors": errors,
            "sites": [
                {"name": name, "gamma": finite(g), "lambda": finite(la), "u": finite(u), "verdict": said}
                for name, (g, la, u), said in zip(self.sites, now, verdicts, strict=True)
            ],
        }


def _no_trace(error: OSError) -> None:
    warnings.warn(f"no trace is written: {error}; training goes on", AceWarning, stacklevel=2)
