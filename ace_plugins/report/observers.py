"""gamma, lambda and u of a run in TensorBoard, Weights & Biases or trackio: whichever the setting ``log`` names.

An observer as anyone could write one. It comes in through the entry point group, and so this must not import torch. The
logger's own library is imported at the first step that is logged.

What is told of a model that a script attaches itself: a line when it is attached, its budget, a table at the end.

``ace-patch run`` and patched scripts tell the same, and more of the process around it; then this one is silent.
"""

from __future__ import annotations

import atexit
import dataclasses
import os
import sys
import warnings
import weakref
from contextlib import redirect_stdout
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ..contract.hookspecs import hookimpl
from ..errors import AceWarning
from ..later import later
from ..output import quiet, say
from ..plugins.registry import registry
from ..settings.config import NONE
from ..settings.sources import HOME
from .record import RECORDER, Record
from .trace import fresh, keep_out_of_git

if TYPE_CHECKING:
    from torch import nn


PROJECT = "ace"
"""The project of runs that are started here."""


class Logger(Protocol):
    """Where values go."""

    def log(self, values: dict[str, float], step: int) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """An event file in the folder of the run's record; of a run without one, in a folder of its own."""

    def __init__(self, record: Record) -> None:
        folder = record.folder or fresh(RECORDER.home / HOME / "tensorboard", record.adapter)
        self.writer: Any = import_module("torch.utils.tensorboard").SummaryWriter(str(folder))

    def log(self, values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()  # a process that is killed loses nothing

    def close(self) -> None:
        self.writer.close()


class Wandb:
    """The script's run, whenever it has one open; else a run of our own."""

    def __init__(self, record: Record) -> None:
        self.wandb = import_module("wandb")
        self.record = record
        self.own: Any = None
        self.defined: Any = None
        """The run that knows what our values are drawn over."""

    def log(self, values: dict[str, float], step: int) -> None:
        if self.wandb.run is None:
            folder = Path(os.environ.get("WANDB_DIR") or RECORDER.home / HOME)
            folder.mkdir(parents=True, exist_ok=True)
            keep_out_of_git(folder)
            project = os.environ.get("WANDB_PROJECT", PROJECT)
            self.own = self.wandb.init(project=project, dir=str(folder), config=dataclasses.asdict(self.record.config))
        run = self.wandb.run
        if run is not self.defined:
            run.define_metric("ace/*", step_metric="ace/step")
            self.defined = run
        # In the script's run the values wait for the script's next row. A row of our own would move wandb's step, and
        # wandb drops rows of the script's whose step is below that.
        run.log({**values, "ace/step": step}, commit=run is self.own)

    def close(self) -> None:
        if self.own is not None:
            self.own.finish()


class Trackio:
    """The script's run, whenever it has one open; else a run of our own."""

    def __init__(self, record: Record) -> None:
        self.trackio = import_module("trackio")
        self.record = record
        self.own: Any = None

    @property
    def run(self) -> Any:
        return self.trackio.context_vars.current_run.get()

    def log(self, values: dict[str, float], step: int) -> None:
        if self.run is None:
            config = dataclasses.asdict(self.record.config)
            with redirect_stdout(sys.stderr):  # stdout is the script's
                self.own = self.trackio.init(project=PROJECT, config=config)
        # The script's run counts its own rows: ours are numbered among them.
        self.run.log({**values, "ace/step": step}, step=step if self.run is self.own else None)

    def close(self) -> None:
        if self.own is not None and self.run is self.own:
            with redirect_stdout(sys.stderr):
                self.trackio.finish()


class Log:
    """One run in its logger. What fails is told once, and training goes on without the log.

    It holds the record, never the model: the log of a model that is dropped inside a function is closed too."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self.logger: Logger | None = None
        self.closed = False

    def write(self) -> None:
        """How things are now, under the step that the trace has: it never goes back."""
        if self.closed:
            return
        first = self.logger is None
        try:
            self.logger = self.logger or KINDS[self.record.config.log](self.record)
            self.logger.log(self._values(), self.record.steps)
        except Exception as error:
            self.closed = True
            self._warn(error)
        if first and not self.closed:
            # What is registered last is called first. The library's own would end the run, and say so on stdout.
            atexit.register(self.close)

    def close(self) -> None:
        if self.closed or self.record.process != os.getpid():  # a forked child ends without ending the run
            return
        self.closed = True
        atexit.unregister(self.close)
        try:
            if self.logger is not None:
                self.logger.close()
        except Exception as error:
            self._warn(error)

    def _values(self) -> dict[str, float]:
        rows = zip(("gamma", "lambda", "u"), self.record.snapshot().tolist(), strict=True)
        values = {
            f"ace/{name}/{site}": value
            for name, row in rows
            for site, value in zip(self.record.sites, row, strict=True)
        }
        error = self.record.error_now or {}
        measured = {f"ace/error/{name}": error.get(name) for name in ("relative", "absolute")}
        return values | {name: value for name, value in measured.items() if value is not None}

    def _warn(self, error: Exception) -> None:
        told = f"{type(error).__name__}: {' '.join(str(error).split())}"
        warnings.warn(f"nothing more is logged to {self.record.config.log}: {told}; training goes on", AceWarning, 2)


class Loggers:
    """The logs of this process."""

    def __init__(self) -> None:
        self.logs: weakref.WeakKeyDictionary[nn.Module, Log] = weakref.WeakKeyDictionary()

    @hookimpl(trylast=True)  # after the recorder, which makes the folder and measures the error
    def ace_stepped(self, model: nn.Module, step: int) -> None:
        record = RECORDER.of(model)
        config = record.config
        if config.log == NONE or not record.leads or not (config.logs(step) or record.error_now):
            return
        log = self.logs.get(model)
        if log is None or log.record is not record:  # the record of a forked process is its own
            log = self.logs[model] = Log(record)
            weakref.finalize(model, log.close)
        log.write()

    @hookimpl
    def ace_finished(self, model: nn.Module) -> None:
        log = self.logs.pop(model, None)
        if log is not None:
            log.close()


KINDS: dict[str, type[TensorBoard | Wandb | Trackio]] = {
    "tensorboard": TensorBoard,
    "wandb": Wandb,
    "trackio": Trackio,
}
LOGGERS = Loggers()


class Announcer:
    """An observer of all attached models of the process."""

    def __init__(self) -> None:
        self.silent = False
        """Somebody else tells."""
        self._budgets_told: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    @hookimpl
    def ace_attached(self, model: nn.Module) -> None:
        if self._speaks(model):
            say(banner(model))

    @hookimpl
    def ace_stepped(self, model: nn.Module, step: int) -> None:
        if self._speaks(model):
            self.tell_budget(model, step)

    @hookimpl(tryfirst=True)  # before the recorder closes the record
    def ace_finished(self, model: nn.Module) -> None:
        record = RECORDER.records.get(model)
        if record is not None and not record.finished and record.steps and self._speaks(model):
            later("ace_plugins.report.tables").print_run(record.to_dict())

    def tell_budget(self, model: nn.Module, step: int) -> None:
        """Once, when it is known."""
        ace: Any = model.ace
        if ace.config.paced and model not in self._budgets_told and ace.budget.is_settled(step):
            self._budgets_told.add(model)
            say(f"budget: {ace.budget}")

    def _speaks(self, model: nn.Module) -> bool:
        ace: Any = model.ace
        told: bool = ace.config.tell and not self.silent and not quiet()
        return told and later("ace_plugins.engine.distributed").rank() == 0


def banner(model: nn.Module, commit: str = "") -> str:
    """What was attached to what; ``commit`` says which state of its upstream the model comes from."""
    now = later("ace_plugins.report.status").status(model)
    ace: Any = model.ace
    plugin = registry().plugins.get(now.adapter)
    repairs = later("ace_plugins.patch.shims").REPAIRS
    shims = ", ".join(shim.name for shim in repairs.active(plugin)) if plugin is not None else ""
    return (
        f"{now.adapter}{commit}: attached to {type(model).__name__}, {len(now.sites)} sites, "
        f"{now.upstream_parameters:,} parameters + {now.ace_parameters:,} of ACE, {ace.config.summary}"
        + (f"; shims: {shims}" if shims else "")
    )


ANNOUNCER = Announcer()
