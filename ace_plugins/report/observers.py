"""Observers: loggers (TensorBoard, Weights & Biases, trackio) and the announcer of attached models.

Observers are loaded before torch, so this module must not import torch. Loggers import their library at the first log.
"""

from __future__ import annotations

import atexit
import dataclasses
import os
import sys
import weakref
from contextlib import redirect_stdout
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..contract.hookspecs import hookimpl
from ..output import quiet, say
from ..plugins.plugin import one_line
from ..plugins.registry import registry
from ..settings.config import NONE
from ..settings.sources import HOME
from .record import RECORDER, Record, get_ace, warn
from .trace import QUANTITIES, create_run_folder, hide_from_git, refuse_links

if TYPE_CHECKING:
    from torch import nn

PROJECT = "ace"  # project name of the wandb and trackio runs that this module starts


class TensorBoardLogger:
    """Writes an event file into the folder of the run, or into a new folder if the run has none."""

    def __init__(self, record: Record) -> None:
        folder = record.folder or create_run_folder(RECORDER.home / HOME / "tensorboard", record.adapter)
        self.writer: Any = import_module("torch.utils.tensorboard").SummaryWriter(str(folder))

    def log(self, values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()  # a killed process loses nothing

    def close(self) -> None:
        self.writer.close()


class _TrackerLogger:
    def __init__(self, record: Record) -> None:
        self.config = dataclasses.asdict(record.config)
        self.library: Any = import_module(record.config.log)
        self.own: Any = None  # the run that this logger has started, if any
        self.defined: Any = None  # wandb: the run in which ACE's step metric is defined


class WandbLogger(_TrackerLogger):
    """Logs to the script's open run of Weights & Biases, or to a new run if there is none."""

    def log(self, values: dict[str, float], step: int) -> None:
        if self.library.run is None:
            folder = Path(os.environ.get("WANDB_DIR") or RECORDER.home / HOME)
            refuse_links(folder)
            folder.mkdir(parents=True, exist_ok=True)
            hide_from_git(folder)
            project = os.environ.get("WANDB_PROJECT", PROJECT)
            self.own = self.library.init(project=project, dir=str(folder), config=self.config)
        run = self.library.run
        if run is not self.defined:
            run.define_metric("ace/*", step_metric="ace/step")
            self.defined = run
        # In the script's run, ACE's values are added to the script's next row. A separate row would advance wandb's
        # step, and wandb drops rows of the script that have a smaller step.
        run.log({**values, "ace/step": step}, commit=run is self.own)

    def close(self) -> None:
        if self.own is not None:
            self.own.finish()


class TrackioLogger(_TrackerLogger):
    """Logs to the script's open run of trackio, or to a new run if there is none."""

    @property
    def run(self) -> Any:
        return self.library.context_vars.current_run.get()

    def log(self, values: dict[str, float], step: int) -> None:
        if self.run is None:
            with redirect_stdout(sys.stderr):  # stdout belongs to the script
                self.own = self.library.init(project=PROJECT, config=self.config)
        # The script's run numbers all its rows itself, also those of ACE.
        self.run.log({**values, "ace/step": step}, step=step if self.run is self.own else None)

    def close(self) -> None:
        if self.own is not None and self.run is self.own:
            with redirect_stdout(sys.stderr):
                self.library.finish()


class Log:
    """The log of one run. At the first failure it warns and stops logging. It must not refer to the model."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self.logger: Any = None
        self.closed = False

    def write(self) -> None:
        if self.closed:
            return
        record, values = self.record, dict[str, float]()
        try:
            for name, row in zip(QUANTITIES, record.snapshot().tolist(), strict=True):
                values |= {f"ace/{name}/{site}": value for site, value in zip(record.sites, row, strict=True)}
            error = {k: record.current_error.get(k) for k in ("relative", "absolute")}
            values |= {f"ace/error/{k}": value for k, value in error.items() if value is not None}
            first = self.logger is None
            self.logger = self.logger or KINDS[record.config.log](record)
            self.logger.log(values, record.steps)
            if first:
                # Exit functions are called in reverse order of registration. This one is registered after that of the
                # logging library and so runs first. The library's function would end the run and print to stdout.
                atexit.register(self.close)
        except Exception as error:
            self._fail(error)

    def close(self) -> None:
        if self.closed or self.record.process != os.getpid():  # a forked child must not end the parent's log
            return
        self.closed = True
        atexit.unregister(self.close)
        try:
            self.logger.close()
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self.closed = True
        warn(f"logging to {self.record.config.log} stopped: {one_line(error)}; training continues")


class Loggers:
    """The observer that keeps one log for each attached model of this process."""

    def __init__(self) -> None:
        self.logs: weakref.WeakKeyDictionary[nn.Module, Log] = weakref.WeakKeyDictionary()

    @hookimpl(trylast=True)  # after the recorder, which creates the folder and measures the error
    def ace_stepped(self, model: nn.Module, step: int) -> None:
        record = RECORDER.get_record(model)
        config = record.config
        if config.log == NONE or not record.leads or not (config.may_wait(step) or record.current_error):
            return
        log = self.logs.get(model)
        if log is None or log.record is not record:  # a forked process has a new record
            log = self.logs[model] = Log(record)
            weakref.finalize(model, log.close)
        log.write()

    @hookimpl
    def ace_finished(self, model: nn.Module) -> None:
        if log := self.logs.pop(model, None):
            log.close()


KINDS = {"tensorboard": TensorBoardLogger, "wandb": WandbLogger, "trackio": TrackioLogger}
LOGGERS = Loggers()


class Announcer:
    """The observer that prints a line when a model is attached, the budget of the run, and a summary at the end."""

    def __init__(self) -> None:
        self.silent = False
        self.summarises = True  # False in `ace-patch run` and patched scripts, where `ProcessRun` prints the summary
        self.commit = ""  # phrase on the commit of the upstream repository
        self._announced: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # models whose budget was printed

    @hookimpl
    def ace_attached(self, model: nn.Module) -> None:
        if not self._may_print(model):
            return
        from ..patch.shims import REPAIRS
        from .status import status

        now = status(model)
        plugin = registry().plugins.get(now.adapter)
        shims = ", ".join(shim.name for shim in REPAIRS.active(plugin)) if plugin is not None else ""
        say(
            f"{now.adapter}{self.commit}: attached to {type(model).__name__}, {len(now.sites)} sites, "
            f"{now.upstream_parameters:,} parameters + {now.ace_parameters:,} of ACE, {get_ace(model).config.summary}"
            + (f"; shims: {shims}" if shims else "")
        )

    @hookimpl
    def ace_stepped(self, model: nn.Module, step: int) -> None:
        ace = get_ace(model)
        if model in self._announced or not ace.config.paced or not ace.budget.is_settled(step):
            return
        self._announced.add(model)
        if self._may_print(model):
            say(f"budget: {ace.budget}")

    @hookimpl(tryfirst=True)  # before the recorder closes the record
    def ace_finished(self, model: nn.Module) -> None:
        record = RECORDER.records.get(model)
        if self.summarises and record and not record.finished and record.steps and self._may_print(model):
            from .terminal import print_summary

            print_summary(record)

    def _may_print(self, model: nn.Module) -> bool:
        from ..engine.distributed import rank

        return get_ace(model).config.tell and not self.silent and not quiet() and rank() == 0


ANNOUNCER = Announcer()
