"""Records the run of each attached model in this process and writes its trace.

The recorder is loaded through the entry point group before torch, so this module must not import torch.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import platform
import sys
import time
import warnings
import weakref
from collections import deque
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packaging.requirements import Requirement

from .. import __version__
from ..contract.hookspecs import hookimpl
from ..errors import AceError, AceWarning
from ..output import publish, say
from ..plugins.registry import registry
from ..settings.config import NONE
from .trace import (
    ABOUT,
    LEFT,
    LINES,
    MOST_LINES,
    QUANTITIES,
    create_run_folder,
    default_runs,
    shorten_path,
    thin_trace,
    to_json,
)
from .verdicts import RunOutcome, judge

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ..engine.loop import Observed
    from ..engine.state import Ace
    from ..symmetry.measure import Call

FEWEST = 12  # number of steps without a gradient after which a site counts as unused; a branch may start at 0


class Record:
    """The record of one model's training in one process. It outlives the model, so it must not refer to it."""

    def __init__(self, model: nn.Module, ace: Ace) -> None:
        self.model = type(model).__name__
        self.adapter = ace.adapter
        self.config = ace.config
        self.sites = [site.name for site in ace.sites]
        self.gamma = ace.gamma
        self.duals, self.budget = ace.duals, ace.budget
        self.process = os.getpid()
        self.folder: Path | None = None  # folder of the trace, if one is written
        self.position = 0  # number of the last step in the trace, which never decreases
        self.offset = 0  # position minus the model's step count; above 0 after an earlier checkpoint was loaded
        self.loaded: int | None = None  # step of a loaded checkpoint, until the trace mentions it
        self.begun = False  # True once the model has made a step in this process
        self.leads = False  # True in rank 0, which writes and logs; set at the first step
        self.errors: list[dict[str, Any]] = []  # the first and the last equivariance error that was measured
        self.measurable = True
        self.landed_at: int | None = None  # step in which the last site landed; 0: before this process; None: not yet
        self.landed: frozenset[int] = frozenset()  # indices of the sites that had landed at the last line of the trace
        self.finished = False
        self.written = 0  # position of the last line in the trace
        self.lines = 0  # number of lines in the trace
        self.every = 1  # only one of this many due lines is written; doubled each time the trace is thinned
        self.observed: Observed | None = None  # loss, gradient and learning rates of the last step
        self.batches: deque[Call] = deque(maxlen=6)  # training batches to find the symmetry that is left
        self.silent: Tensor | None = None  # True for sites whose gamma had no gradient yet in this process, [sites]

    @property
    def steps(self) -> int:
        return max(self.position, self.duals.count)

    @property
    def current_error(self) -> dict[str, Any]:
        """Equivariance error after the last step; empty if it was not measured."""
        return self.errors[-1] if self.errors and self.errors[-1]["step"] == self.steps else {}

    @property
    def interrupted(self) -> bool:
        """True if a signal, Ctrl-C or an error ended the script before the run had all its steps."""
        ended = RECORDER.interrupted or (hasattr(sys, "last_value") and not hasattr(sys, "ps1"))
        return ended and self.steps < (self.budget.total or math.inf)

    def count_step(self, step: int) -> None:
        """Record that the model has made a step; ``step`` is its number in the model's own count."""
        if step + self.offset <= self.position:
            self.loaded = step - 1
            self.offset = self.position + 1 - step
        self.position = step + self.offset

    def snapshot(self) -> Tensor:
        return self.duals.snapshot(self.gamma)

    def open_trace(self, runs: Path, more: Mapping[str, Any]) -> None:
        """Create the folder of this run in ``runs``. If that fails, training continues without a trace."""
        import torch

        about = {
            "adapter": self.adapter,
            "sites": self.sites,
            "config": dataclasses.asdict(self.config),
            "command": sys.argv,
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "seed": torch.initial_seed(),
            "versions": find_versions(self.adapter),
            **more,
        }
        self.started = time.time()
        try:
            self.folder = create_run_folder(runs, self.adapter)
            (self.folder / ABOUT).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
        except (AceError, OSError) as error:
            self.folder = None
            warn(f"no trace is written: {error}; training continues")

    def write(self, **more: Any) -> None:
        """Write a line of the trace: the current values and ``more``."""
        if self.folder is None:
            return
        self.landed, self.written = self.duals.landed_sites, self.position
        if self.duals.count + self.offset < self.position and self.loaded is None:
            self.loaded = self.duals.count  # a checkpoint, usually the best, was loaded after the last step
        if self.loaded is not None:
            more["event"] = f"a checkpoint of step {self.loaded:,} was loaded"
            self.loaded = None
        line = {"seconds": round(time.time() - self.started, 3), **self.describe(), **more}
        try:  # the file is closed after each line, so that forked processes do not share it
            with (self.folder / LINES).open("a", encoding="utf-8") as file:
                file.write(json.dumps(to_json(line)) + "\n")
            self.lines += 1
            if self.lines > MOST_LINES:
                self.lines, self.every = thin_trace(self.folder), 2 * self.every
        except (AceError, OSError, ValueError) as error:
            self.folder = None
            warn(f"no trace is written from now on: {error}; training continues")

    def finish(self) -> None:
        """Write the last line of the trace, once: when the process ends, or the model is projected or deleted."""
        if self.finished or self.process != os.getpid():  # a forked child must not end the parent's run
            return
        self.finished = True
        if self.folder is not None:
            seen = _read_observed(self.observed) if self.written < self.position else {}
            self.write(**seen, **{"interrupted" if self.interrupted else "finished": True})

    def describe(self) -> dict[str, Any]:
        """Return the present state as entries of a line of the trace."""
        found = {
            "step": self.steps,
            **dict(zip(QUANTITIES, self.snapshot().tolist(), strict=True)),
            "landed": sorted(self.duals.landed_sites),
            "budget": self.budget.total,
            "expected": self.budget.expected_steps,
        }
        found |= self._find_unused() if self.config.mode != "auto" else {"test": self.duals.evidence.summarise()}
        found |= {"diverged": True} if self.duals.diverged else {}
        return found | ({"loaded": self.duals.count} if self.duals.count + self.offset < self.position else {})

    def judge(self) -> RunOutcome:
        line = self.describe()
        return judge(self.config, self.sites, line | line.get("test", {}), ended=not self.interrupted)

    def _find_unused(self) -> dict[str, list[int]]:
        """Return the sites whose gamma has never had a gradient, also before a resume: {"unused": indices} or {}."""
        if self.silent is None or self.steps < FEWEST:
            return {}
        silent = self.silent
        if self.config.paced:  # ``square`` is saved in checkpoints; a site that has landed has no gradient any more
            silent = silent & (self.duals.square == 0)
        unused = silent.nonzero().flatten().tolist()
        return {"unused": unused} if unused else {}

    def to_dict(self) -> dict[str, Any]:
        outcome = self.judge()
        return {
            "model": self.model,
            "adapter": self.adapter,
            "mode": self.config.mode,
            "steps": self.steps,
            "landed": self.duals.landed,
            "interrupted": self.interrupted,
            "verdict": outcome.advice,
            "budget": str(self.budget) if self.config.paced else None,
            "folder": None if self.folder is None else shorten_path(self.folder),
            "errors": self.errors,
            "sites": [site.to_dict() for site in outcome.sites],
        }


def find_versions(adapter: str) -> dict[str, str]:
    """Return the versions of Python, torch, ace-plugins, the adapter and the packages that the adapter requires."""
    found = {"python": platform.python_version(), "torch": version("torch"), "ace-plugins": __version__}
    if plugin := registry().plugins.get(adapter):
        found[plugin.distribution] = plugin.version
        found |= {Requirement(r.requirement).name: r.found for r in plugin.requires if r.found}
    return found


class Recorder:
    """The observer that keeps one record for each attached model of this process."""

    def __init__(self) -> None:
        self.records: weakref.WeakKeyDictionary[nn.Module, Record] = weakref.WeakKeyDictionary()
        self.home = Path()  # folder that contains .ace: the current folder, or a patched checkout
        self.interrupted = False  # True once a signal that ends the script was received
        self.about: dict[str, Any] = {}  # further content of run.json: upstream with its commit, origins of settings

    def get_record(self, model: nn.Module) -> Record:
        """Return the record of an attached model. In a forked process, a new record is started."""
        record = self.records.get(model)
        if record is None or record.process != os.getpid():
            record = self.records[model] = Record(model, get_ace(model))
        return record

    @hookimpl
    def ace_stepped(self, model: nn.Module, step: int) -> None:
        ace = get_ace(model)
        record = self.get_record(model)
        first = not record.begun
        if first:  # the rank of this process in distributed training is known only now
            from ..engine.distributed import rank

            record.begun = True
            record.leads = rank() == 0
            if record.leads and record.config.trace and os.environ.get("ACE_TRACE") != "0":
                record.open_trace(default_runs(self.home), self.about)
                # This callback holds the record, not the model, so the trace of a deleted model gets its last line.
                weakref.finalize(model, record.finish)
        record.count_step(step)
        record.observed = ace.session.observed
        if (gradient := record.observed.gradient) is not None:
            record.silent = gradient == 0 if record.silent is None else record.silent & (gradient == 0)
        if not ace.landed:
            record.landed_at = None  # also after an earlier checkpoint was loaded
        elif record.landed_at is None:
            record.landed_at = 0 if first else record.position
        batch, ace.passes.batch = ace.passes.batch, None
        if record.finished or (record.folder is None and (not record.leads or ace.config.log == NONE)):
            return  # neither a trace nor a logger would use a measurement
        if ace.config.symmetry_left and batch is not None and not isinstance(batch, Exception):
            record.batches.append(batch)
        measured = batch if ace.config.measures(step) else None
        error = {} if measured is None or not record.measurable else _measure_error(model, record, measured)
        # A landing is written at once, so that its step is known.
        new = record.landed != record.duals.landed_sites
        due = ace.config.may_wait(step) and step // ace.config.trace_every % record.every == 0
        if record.folder is not None and (measured is not None or due or new):
            record.write(**_read_observed(record.observed), **error)
        # Often the script's model no longer exists when the script ends.
        if record.steps == record.budget.total:
            _find_left(model, record)

    @hookimpl
    def ace_finished(self, model: nn.Module) -> None:
        if record := self.records.pop(model, None):
            if not record.interrupted:
                _find_left(model, record)
            record.finish()


def warn(text: str) -> None:
    warnings.warn(text, AceWarning, stacklevel=3)


def get_ace(model: Any) -> Ace:
    return model.ace  # type: ignore[no-any-return]


def _read_observed(seen: Observed | None) -> dict[str, Any]:
    """Return the loss, the gradient and the learning rates of the last step, if they were observed."""
    if seen is None:
        return {}
    values = {} if seen.loss is None else {"loss": float(seen.loss)}
    gradient = {} if seen.gradient is None else {"gradient": seen.gradient.tolist()}
    return values | gradient | ({"lr": list(map(float, seen.rates))} if seen.rates else {})


def _measure_error(model: nn.Module, record: Record, batch: Call | Exception) -> dict[str, Any]:
    """Measure the equivariance error of the model with its branches, on the batch of the last step."""
    from ..engine.measure import equivariance_error

    try:
        if isinstance(batch, Exception):
            raise batch
        values = equivariance_error(model, batch, branches_on=True).to_dict()
    except Exception as error:
        record.measurable = False
        warn(f"the equivariance error of {record.model} cannot be measured: {error}; training continues")
        return {}
    record.errors[1:] = [to_json({"step": record.steps, **values})]
    return {"error": values}


def _find_left(model: nn.Module, record: Record) -> None:
    """Find the subgroup that the model keeps, print it and write it into the folder of the run, once per run."""
    from ..engine.measure import one_thread, symmetry_left

    if not record.batches:
        return
    try:
        with one_thread():
            left = symmetry_left(model, [*record.batches])
        if record.config.tell:
            say(left.sentence)
        if record.folder is not None:
            publish(record.folder / LEFT, json.dumps(to_json(left.to_dict()), indent=1).encode())
    except Exception as error:
        warn(f"the symmetry that is left in {record.model} cannot be found: {error}")
    finally:
        record.batches = deque(maxlen=0)  # stays empty


RECORDER = Recorder()
