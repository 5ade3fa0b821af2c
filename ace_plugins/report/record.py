"""Where gamma, lambda and u went over a run, in a bounded number of points.

The record of a run: of one model in one process, from its first step to its verdicts.

Observers come in through the entry point group, and so this must not import torch.

The host's own observer, which keeps a record of every attached model and has it write its trace.

It comes in through the entry point group like anyone's, and so this must not import torch.
"""

from __future__ import annotations

import dataclasses
import math
import os
import platform
import sys
import time
import warnings
import weakref
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packaging.requirements import Requirement

from ..contract.hookspecs import hookimpl
from ..errors import AceWarning
from ..later import later
from ..plugins.registry import registry
from ..settings.config import NONE
from ..settings.sources import RUNS
from .trace import TraceFile, finite, relative
from .verdicts import sites_verdicts, whole_verdict

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ..engine.state import Ace
    from ..symmetry.measure import Call


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
    """The run of one model in one process: what it was, where gamma, lambda and u went, what was measured, its end.

    It outlives the model: it holds ACE's small tensors, not the model."""

    def __init__(self, model: nn.Module, ace: Ace) -> None:
        self.model = type(model).__name__
        self.adapter = ace.adapter
        self.config = ace.config
        self.sites = [site.name for site in ace.sites]
        self.gamma = ace.gamma
        self.duals = ace.duals
        self.budget = ace.budget
        self.turned = ace.action is not None
        """It trains in random frames."""
        self.process = os.getpid()
        self.position = 0
        """Steps as the trace counts them. It never runs backwards, as the model's own count does when a checkpoint of
        an earlier step is loaded."""
        self.offset = 0
        """What was added to the model's own count since."""
        self.loaded: int | None = None
        """The step of a checkpoint that was loaded, and not told yet."""
        self.trace: TraceFile | None = None
        self.begun = False
        """It has made a step."""
        self.leads = False
        """It is of the process that writes and logs, of those that train together. Known once it has begun."""
        self.errors: list[dict[str, Any]] = []
        """The equivariance errors that were measured."""
        self.measurable = True
        self.finished = False
        self.landings: frozenset[int] = frozenset()
        """Sites whose landing is in the trace."""
        self.history = History()
        self._warned = False

    @property
    def folder(self) -> Path | None:
        return None if self.trace is None else self.trace.folder

    @property
    def steps(self) -> int:
        return max(self.position, self.duals.count)

    def pass_step(self, step: int) -> None:
        """The model has made this step, by its own count."""
        if step + self.offset <= self.position:
            self.loaded = step - 1
            self.offset = self.position + 1 - step
        self.position = step + self.offset

    @property
    def read(self) -> bool:
        """Whether anyone reads what is measured: a trace or a log."""
        return self.trace is not None or (self.leads and self.config.log != NONE)

    @property
    def error_now(self) -> dict[str, Any] | None:
        """The equivariance error after the last step, if it was measured."""
        last = self.errors[-1] if self.errors else None
        return last if last is not None and last["step"] == self.steps else None

    @property
    def gradients(self) -> float:
        """Of how many gradients at 0 a site that has landed knows the mean."""
        averaged: float = later("ace_plugins.engine.paced_loop").averaged_over(self.budget.planned_horizon)
        return averaged

    def new_landings(self) -> frozenset[int]:
        """Sites that have landed by themselves since the last line of the trace."""
        return self.duals.landed_sites - self.landings if self.config.paced else frozenset()

    def snapshot(self) -> Tensor:
        """gamma, lambda and u of every site now, [3, sites]."""
        return self.duals.snapshot(self.gamma)

    def open_trace(self, runs: Path, more: Mapping[str, Any]) -> None:
        """Make the folder of this run. A full disk must not cost anyone their training run."""
        about = {
            "adapter": self.adapter,
            "sites": self.sites,
            "config": dataclasses.asdict(self.config),
            "frames": self.turned,
            "command": sys.argv,
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "seed": later("torch").initial_seed(),
            "torch": version("torch"),
            "versions": _versions(self.adapter),
            **more,
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
        if self.duals.count + self.offset < self.position and self.loaded is None:
            self.loaded = self.duals.count  # at the end: the best one, most likely
        if self.loaded is not None:
            more["event"] = f"a checkpoint of step {self.loaded:,} was loaded"
            self.loaded = None
        if new := sorted(self.new_landings()):
            # What verdicts are made of, in case that the run does not come to its end.
            held = self.duals.held().tolist()
            told = [finite(held[site]) for site in new]
            more["landed"] = {"sites": new, "held": told, "gradients": self.gradients}
            self.landings = self.duals.landed_sites
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
            if self.trace is not None:
                told = self.to_dict()
                verdicts = [site["verdict"] for site in told["sites"]]
                # Only here is all known that verdicts are made of: who reads the trace later takes these.
                self.write(finished=True, verdicts=verdicts, verdict=told["verdict"])

    def to_dict(self) -> dict[str, Any]:
        """How the run ended, with a verdict on each site and on the whole."""
        history = self.history.per_site(now=self.snapshot())
        landed = self.duals.landed_sites
        held = self.duals.held().tolist()
        verdicts = sites_verdicts(
            self.config, history, landed=landed, held=held, gradients=self.gradients, turned=self.turned
        )
        now = [tuple(values[-1] for values in site) for site in history]
        errors = [self.errors[0], self.errors[-1]] if len(self.errors) > 1 else self.errors
        return {
            "model": self.model,
            "adapter": self.adapter,
            "mode": self.config.mode,
            "steps": self.steps,
            "landed": self.duals.landed,
            "verdict": whole_verdict(
                self.config,
                self.sites,
                history,
                verdicts,
                self.steps,
                landed=self.duals.landed,
                budget=self.budget.expected_steps,
            ),
            "budget": str(self.budget) if self.config.paced else None,
            "folder": None if self.folder is None else relative(self.folder),
            "errors": errors,
            "sites": [
                {"name": name, "gamma": finite(g), "lambda": finite(la), "u": finite(u), "verdict": said}
                for name, (g, la, u), said in zip(self.sites, now, verdicts, strict=True)
            ],
        }


def _versions(adapter: str) -> dict[str, str]:
    """Of what made the run: Python, torch, the host, the adapter, and the packages that it patches."""
    found = {"python": platform.python_version(), "torch": version("torch")}
    with suppress(PackageNotFoundError):
        found["ace-plugins"] = version("ace-plugins")
    plugin = registry().plugins.get(adapter)
    if plugin is not None:
        found |= {plugin.distribution: plugin.version}
        found |= {Requirement(r.requirement).name: r.found for r in plugin.requires if r.found}
    return found


def _no_trace(error: OSError) -> None:
    warnings.warn(f"no trace is written: {error}; training goes on", AceWarning, stacklevel=2)


class Recorder:
    """The records of this process."""

    def __init__(self) -> None:
        self.records: weakref.WeakKeyDictionary[nn.Module, Record] = weakref.WeakKeyDictionary()
        self.home = Path()
        """The folder whose runs these are: the current one, or a patched checkout."""
        self.about: dict[str, Any] = {}
        """What a record says of its run besides: upstream and its commit, where settings come from."""

    def of(self, model: nn.Module) -> Record:
        """The record of an attached model. In a forked process it begins anew."""
        record = self.records.get(model)
        if record is None or record.process != os.getpid():
            record = self.records[model] = Record(model, _ace(model))
        return record

    @hookimpl
    def ace_stepped(self, model: nn.Module, step: int) -> None:
        ace = _ace(model)
        record = self.of(model)
        if not record.begun:
            self._begin(model, record)
        record.pass_step(step)
        record.history.record(record.position, record.snapshot())
        batch, ace.passes.batch = ace.passes.batch, None
        if record.finished or not record.read:
            return
        error = None if batch is None else _measured(model, record, batch)
        if record.trace is not None and (batch is not None or ace.config.traces(step) or record.new_landings()):
            record.write(**_observed(ace), **({} if error is None else {"error": error}))

    @hookimpl
    def ace_finished(self, model: nn.Module) -> None:
        record = self.records.pop(model, None)
        if record is not None:
            record.finish()

    def _begin(self, model: nn.Module, record: Record) -> None:
        """At the first step: by then processes that train together have found each other."""
        record.begun = True
        record.leads = later("ace_plugins.engine.distributed").rank() == 0
        if record.leads and record.config.trace and os.environ.get("ACE_TRACE") != "0":
            record.open_trace(Path(os.environ.get("ACE_RUNS") or self.home / RUNS), self.about)
            # Holds the record, never the model: a model dropped inside a function still gets its last line.
            weakref.finalize(model, record.finish)


def _ace(model: nn.Module) -> Ace:
    ace: Any = model.ace
    found: Ace = ace
    return found


def _observed(ace: Ace) -> dict[str, Any]:
    """What the last step was made of, as numbers."""
    seen = ace.session.observed
    told: dict[str, Any] = {}
    if seen.loss is not None:
        told["loss"] = finite(float(seen.loss))
    if seen.gradient is not None:
        told["gradient"] = [finite(value) for value in seen.gradient.tolist()]
    if seen.rates:
        told["lr"] = [finite(float(rate)) for rate in seen.rates]
    return told


def _measured(model: nn.Module, record: Record, batch: Call | Exception) -> dict[str, Any] | None:
    """How far the model with its branches is from equivariant, on a batch it has just trained on."""
    if not record.measurable:
        return None
    try:
        if isinstance(batch, Exception):
            raise batch
        found = later("ace_plugins.engine.measure").equivariance_error(model, batch, branches_on=True)
    except Exception as error:
        record.measurable = False
        warnings.warn(
            f"the equivariance error of {type(model).__name__} cannot be measured: {error}; training goes on",
            AceWarning,
            stacklevel=2,
        )
        return None
    told = {name: finite(v) if isinstance(v, float) else v for name, v in found.to_dict().items()}
    record.errors.append({"step": record.steps, **told})
    return told


RECORDER = Recorder()
