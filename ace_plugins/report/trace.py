"""The trace of a run: gamma, lambda and u as JSON lines under ``.ace/runs/<time>-<adapter>/``, and the equivariance
error where the settings ask for it.

Every line is handed to the operating system when it is written, so a killed process loses none of them.
The folder is made at a model's first step: a model that is never trained leaves nothing behind.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import sys
import time
import warnings
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..engine.duals import Duals
from ..settings.environment import RUNS
from ..symmetry.measuring import Call
from ..errors import AceError, AceWarning
from ..contract.hookspecs import hookimpl
from ..plugins.observers import rank
from ..engine.state import Ace, find

ABOUT, LINES = "run.json", "trace.jsonl"


class Run:
    """One model's run and its folder."""

    def __init__(self, ace: Ace, runs: Path) -> None:
        self.started = time.time()
        self.folder = _fresh(runs, f"{time.strftime('%Y%m%d-%H%M%S')}-{ace.adapter}")
        about = {
            "adapter": ace.adapter,
            "sites": [site.name for site in ace.sites],
            "config": dataclasses.asdict(ace.config),
            "command": sys.argv,
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "torch": torch.__version__,
        }
        (self.folder / ABOUT).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
        self.process = os.getpid()
        self.warned = False
        self.finished = False
        self.at_the_end: weakref.finalize[Any, Any] | None = None

    def write(self, ace: Ace, **more: Any) -> None:
        step = ace.duals.count
        # One transfer for all three, since each is a wait for the device.
        values = torch.stack([ace.gamma.detach(), ace.duals.lambda_, ace.duals.u]).tolist()
        if not self.warned and not all(map(math.isfinite, values[0])):
            self.warned = True
            sites = [site.name for site, g in zip(ace.sites, values[0], strict=True) if not math.isfinite(g)]
            warnings.warn(
                f"gamma is not finite at step {step} (sites {', '.join(sites)}): the run has diverged; "
                "lower the learning rate",
                AceWarning,
                stacklevel=2,
            )
        gamma, lambda_, u = (list(map(finite, row)) for row in values)
        seconds = round(time.time() - self.started, 3)
        line = {"step": step, "seconds": seconds, "gamma": gamma, "lambda": lambda_, "u": u, **more}
        # Opened for each line: nothing to leak when a model is dropped, nothing shared with a forked worker.
        with (self.folder / LINES).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def finish(self, ace: Ace) -> None:
        """The last line, once: when the process ends, the model is projected, or nobody holds it any more."""
        if not self.finished and self.process == os.getpid():  # a forked child ends without ending the run
            self.finished = True
            if self.at_the_end is not None:
                self.at_the_end.detach()  # it holds ace
            try:
                self.write(ace, finished=True)
            except OSError as error:
                _no_trace(error)


class Trace:
    """The observer that writes the trace of every model whose config asks for it."""

    def __init__(self) -> None:
        self.runs: weakref.WeakKeyDictionary[nn.Module, Run | None] = weakref.WeakKeyDictionary()
        self.folders: weakref.WeakKeyDictionary[Duals, Path] = weakref.WeakKeyDictionary()
        """Where the run of a model went, by its duals, which people may hold longer than the model."""
        self.errors: weakref.WeakKeyDictionary[Duals, list[dict[str, Any] | None]] = weakref.WeakKeyDictionary()
        """The equivariance errors measured in a run; None where that failed, after which it is left."""
        self.home = Path()
        """The folder whose runs these are: the current one, or a patched checkout."""

    @hookimpl
    def ace_stepped(self, model: nn.Module, step: int) -> None:
        ace = find(model)
        if ace is None:
            return
        batch, ace.batch = ace.batch, None
        if not ace.config.traces(step) and batch is None:
            return
        if model not in self.runs:
            run = self.runs[model] = self._open(ace)
            if run is not None:
                # Holds ace, never the model: a model dropped inside a function still gets its last line.
                run.at_the_end = weakref.finalize(model, run.finish, ace)
        run = self.runs[model]
        if run is not None and not run.finished:
            error = None if batch is None else self._measured(model, ace, batch)
            try:
                run.write(ace, **({} if error is None else {"error": error}))
            except OSError as error:
                self.runs[model] = None
                _no_trace(error)

    @hookimpl
    def ace_finished(self, model: nn.Module) -> None:
        run = self.runs.pop(model, None)
        ace = find(model)
        if run is not None and ace is not None:
            run.finish(ace)

    def _measured(self, model: nn.Module, ace: Ace, batch: Call | Exception) -> dict[str, Any] | None:
        """How far the model with its branches is from equivariant, on a batch it has just trained on."""
        from ..engine.attaching import equivariance_error  # which tells observers of what it does, this one among them

        errors = self.errors.setdefault(ace.duals, [])
        if errors and errors[-1] is None:
            return None  # it could not be measured before
        try:
            if isinstance(batch, Exception):
                raise batch
            found = equivariance_error(model, batch, branches_on=True)
        except Exception as error:
            errors.append(None)
            warnings.warn(
                f"the equivariance error of {type(model).__name__} cannot be measured: {error}; training goes on",
                AceWarning,
                stacklevel=2,
            )
            return None
        told = {name: finite(v) if isinstance(v, float) else v for name, v in found.to_dict().items()}
        errors.append({"step": ace.duals.count, **told})
        return told

    def _open(self, ace: Ace) -> Run | None:
        if os.environ.get("ACE_TRACE") == "0" or rank() != 0:
            return None
        try:
            run = Run(ace, Path(os.environ.get("ACE_RUNS") or self.home / RUNS))
            self.folders[ace.duals] = run.folder
            return run
        except OSError as error:
            # A full disk or a read-only folder must not cost anyone their training run.
            _no_trace(error)
            return None


def finite(value: float) -> float | None:
    """JSON knows no others."""
    return value if math.isfinite(value) else None


def _no_trace(error: OSError) -> None:
    warnings.warn(f"no trace is written: {error}; training goes on", AceWarning, stacklevel=2)


def _fresh(runs: Path, name: str) -> Path:
    """A folder that did not exist: runs that start in the same second do not share one."""
    number = 1
    while True:
        folder = runs / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir(parents=True)
            if runs.match(RUNS):
                _hide_from_git(runs.parent)
            return folder.resolve()
        except FileExistsError:
            number += 1


def _hide_from_git(folder: Path) -> None:
    """Runs are not the work of whoever's checkout this is: git need not see them."""
    ignore = folder / ".gitignore"
    if not ignore.exists():
        ignore.write_text("*\n", encoding="utf-8")


def read_trace(folder: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The lines of a run. A last line cut off by a kill is left out."""
    path = Path(folder) / LINES
    if not path.is_file():
        raise AceError(f"no trace in {folder}: expected {LINES}; runs are under {RUNS}")
    return list(_whole_lines(path.read_text(encoding="utf-8").splitlines(keepends=True)))


def _whole_lines(lines: Iterable[str]) -> Iterable[dict[str, Any]]:
    for line in lines:
        if line.endswith("\n"):
            yield json.loads(line)


TRACE = Trace()
