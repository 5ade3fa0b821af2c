"""A process that is part of a run: what is told when a model is attached, and what came of it when the process ends.

The same for ``ace-patch run`` and for a script with the marked line. Everything is told on stderr: stdout is the
script's.
"""

from __future__ import annotations

import json
import multiprocessing
import multiprocessing.util
import os
import signal
import sys
import threading
import traceback
import warnings
from functools import cached_property
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from torch import nn

from ..checkout.layout import layout
from ..contract.hookspecs import hookimpl
from ..engine.distributed import rank
from ..errors import AceError, AceWarning
from ..later import later
from ..output import quiet, say
from ..patch.constructors import patch_models
from ..plugins.registry import registry
from ..report.observers import ANNOUNCER, banner
from ..report.record import RECORDER, Record
from ..report.trace import relative
from ..settings.config import Config
from .request import RunRequest, had_traceback


class ProcessRun:
    """The part of a run that is in this process: an observer of its models."""

    def __init__(self, request: RunRequest) -> None:
        self.request = request
        self.root = None if request.root is None else Path(request.root)
        """The checkout, where there is one."""
        self.plugin = registry().adapter(request.adapter)
        self.config = Config(**request.settings)
        self.records: list[Record] = []
        self.training_in: int | None = None
        """The process that is known to train: this one, or one that it was forked from."""
        self.rank: int | None = None
        """Known from the first step on, also after the script has ended its process group."""
        self._told = False
        ANNOUNCER.silent = True
        self.patch = patch_models(self.plugin, self.config)
        registry().manager.register(self, name="ace_plugins.run")
        self._plain_warning = warnings.showwarning
        warnings.showwarning = self._warn
        self._plain_excepthook = sys.excepthook
        sys.excepthook = self._uncaught
        if self.root is not None:
            RECORDER.home = self.root
        RECORDER.about = {"origins": request.origins, "upstream": f"{self.plugin.patches.title}{self._commit}"}
        self._end_by_signal()
        if self.config.mode == "off" and rank() == 0 and request.is_first:
            say(f"{self.plugin.name}{self._commit}: mode off, plain upstream")

    def _end_by_signal(self) -> None:
        """What a cluster sends ends with the summary, as Ctrl-C does; the script's own handlers stay what they are."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, self._ended_by)

    def _ended_by(self, number: int, frame: FrameType | None) -> None:
        for record in self.records:
            record.finish()
        self.summarise()
        sys.stderr.flush()
        # The same end as without ACE, for whoever waits for this process.
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    # What is told on the way.

    def _warn(self, message: Any, category: type[Warning], *where: Any, **more: Any) -> None:
        """ACE's own notices without the line of torch they came from."""
        if issubclass(category, AceWarning):
            say(str(message), anyway=True)
        else:
            self._plain_warning(message, category, *where, **more)

    def _uncaught(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Of ACE's own errors the line that says what to do, and the script's line where it happened."""
        if isinstance(error, AceError):
            say(" ".join(str(error).split()) + self._place(trace), anyway=True)
        else:
            self._plain_excepthook(kind, error, trace)

    def _place(self, trace: TracebackType | None) -> str:
        """The last line of a traceback that is the user's own, or upstream's."""
        ours = {"ace_plugins", self.plugin.target.partition(":")[0].partition(".")[0]}
        found = ""
        for frame, line in traceback.walk_tb(trace):
            file = frame.f_code.co_filename
            package = str(frame.f_globals.get("__name__")).partition(".")[0]
            if package not in ours and "site-packages" not in file and not file.startswith("<"):
                found = f" ({relative(file)} line {line})"
        return found

    @cached_property
    def _commit(self) -> str:
        """Which state of its upstream the models come from."""
        checkout = self.patch.upstream.checkout
        if self.root is None or checkout is None:
            return ""
        found = layout(self.root, checkout)
        for difference in found.differences:  # it was another when it was patched
            say(f"this checkout has changed: {difference}")
        return f" at commit {found.commit[:7]}" if found.commit else " without a git commit"

    # What the models of this process do.

    @hookimpl
    def ace_attached(self, model: nn.Module) -> None:
        if rank() == 0:
            say(banner(model, self._commit))
        self._know(model)

    @hookimpl
    def ace_stepped(self, model: nn.Module, step: int) -> None:
        if self.training_in != os.getpid():
            self._begin_training()
        if self.rank == 0:
            ANNOUNCER.tell_budget(model, step)
        # A model may come by pickle or by fork from the process that built it, and so be new here.
        self._know(model)

    def _know(self, model: nn.Module) -> None:
        record = RECORDER.of(model)
        if record not in self.records:
            self.records.append(record)

    def _begin_training(self) -> None:
        """The first step in this process."""
        # For the table at exit: an import there makes Python forget that it was ended by Ctrl-C.
        later("ace_plugins.report.tables")
        self.training_in = os.getpid()
        self.rank = rank()
        self.request.note_training()
        if multiprocessing.parent_process() is not None:  # it may end without running what atexit holds
            multiprocessing.util.Finalize(None, self.summarise, exitpriority=0)

    # What came of it.

    def summarise(self) -> None:
        """Tell, once, at the end of the process."""
        if self._told or (rank() if self.rank is None else self.rank) != 0:
            return
        self._told = True
        elsewhere = self.request.trained_elsewhere()
        # A forked process has those of its parent too.
        records = [record for record in self.records if record.process == os.getpid()]
        if not records:
            self.request.tell_of_no_model(elsewhere)
        elif self.request.as_json and self.request.is_first:
            runs = [record.to_dict() for record in records]
            told = {"adapter": self.plugin.name, "models_attached": len(runs), "spawned": elsewhere, "runs": runs}
            print(json.dumps(told))
        elif not quiet():
            self._print_tables(records, elsewhere)

    def _print_tables(self, records: list[Record], elsewhere: bool) -> None:
        trained = [record for record in records if record.steps]
        if trained and self.training_in != os.getpid():
            return  # a checkpoint was loaded, to be deployed or evaluated: what its training came to was told then
        for record in trained:
            if not record.begun:
                continue  # likewise: the best checkpoint, which many scripts build a second model for
            if not had_traceback():
                if sys.stderr is not None:
                    later("ace_plugins.report.tables").print_run(record.to_dict())
            elif record.folder is not None:  # a line, not a table: the traceback above is what matters
                say(f"trace in {relative(record.folder)}")
        if trained or elsewhere or not self.request.is_first or had_traceback():
            return
        say(
            f"attached to {', '.join(sorted({record.model for record in records}))}, but its dual loop made no step: "
            "expected optimizer.step() of a torch.optim optimizer after a backward in model.train()"
        )
