"""The part of a run in one process: patches upstream, observes its models and prints a summary at the end.

Used by ``ace-patch run`` and by patched scripts. Prints on stderr, since stdout belongs to the script.
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
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from torch import nn

from ..checkout.layout import read_layout
from ..contract.hookspecs import hookimpl
from ..engine.distributed import rank
from ..errors import AceError, AceWarning
from ..output import quiet, say
from ..patch.constructors import patch_models
from ..plugins.registry import registry
from ..report.observers import ANNOUNCER
from ..report.record import RECORDER, Record
from ..report.terminal import print_summary  # here: an import at exit would hide that Ctrl-C ended the process
from ..report.trace import shorten_path
from ..settings.config import Config
from .activation import RunRequest, had_traceback


class ProcessRun:
    """Observer of the models in this process."""

    def __init__(self, request: RunRequest) -> None:
        self.request = request
        self.plugin = registry().adapter(request.adapter)
        self.records: list[Record] = []
        # Id of the process that made the last training step: this process, or the process it was forked from.
        self.training_process: int | None = None
        # Rank at the first step. It is kept because the script may destroy its process group before the end.
        self.rank: int | None = None
        self._summarised = False
        config = Config(**request.settings)
        self.tells = config.tell
        self.patch = patch_models(self.plugin, config)
        registry().manager.register(self, name="ace_plugins.run")
        self._show_warning = warnings.showwarning
        warnings.showwarning = self._warn
        self._excepthook = sys.excepthook
        sys.excepthook = self._handle_uncaught
        commit, checkout = "", self.plugin.patches.checkout
        if request.root is not None:
            RECORDER.home = Path(request.root)
        if request.root is not None and checkout is not None:
            layout = read_layout(Path(request.root), checkout)
            commit = f" at commit {layout.commit[:7]}" if layout.commit else " without a git commit"
            for difference in layout.differences:
                say(f"this checkout differs from the layout that the adapter expects: {difference}")
        RECORDER.about = {"origins": request.origins, "upstream": f"{self.plugin.patches.title}{commit}"}
        ANNOUNCER.commit, ANNOUNCER.summarises = commit, False
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)):  # Windows has no SIGHUP
                if signal.getsignal(number) is signal.SIG_DFL:  # keep a handler that the script has set
                    signal.signal(number, self._handle_signal)
        if config.mode == "off" and config.tell and rank() == 0 and request.is_first:
            say(f"{self.plugin.name}{commit}: mode off, ACE is not attached")

    def _handle_signal(self, number: int, frame: FrameType | None) -> None:
        """Print the summary on SIGTERM and SIGHUP, then let the same signal end the process."""
        RECORDER.interrupted = True
        if signal.getsignal(number) != self._handle_signal:
            return  # called by a later handler (Lightning): it decides, and atexit prints the summary
        for record in self.records:
            record.finish()
        self.summarise()
        sys.stderr.flush()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    def _warn(self, message: Any, category: type[Warning], *where: Any, **more: Any) -> None:
        """Print warnings of ACE without the source line in torch that triggered them."""
        if issubclass(category, AceWarning):
            say(str(message), anyway=True)
        else:
            self._show_warning(message, category, *where, **more)

    def _handle_uncaught(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Print an error of ACE in one line, with the last place in the script that led to it."""
        if not isinstance(error, AceError):
            self._excepthook(kind, error, trace)
            return
        ours = ("ace_plugins", self.plugin.target.partition(":")[0].partition(".")[0])
        place = ""
        for frame, line in traceback.walk_tb(trace):
            file, package = frame.f_code.co_filename, str(frame.f_globals.get("__name__")).partition(".")[0]
            if package not in ours and "site-packages" not in file and not file.startswith("<"):
                place = f" ({shorten_path(file)} line {line})"
        say(" ".join(str(error).split()) + place, anyway=True)

    @hookimpl
    def ace_attached(self, model: nn.Module) -> None:
        self._add_record(model)

    @hookimpl
    def ace_stepped(self, model: nn.Module) -> None:
        if self.training_process != os.getpid():
            self.training_process, self.rank = os.getpid(), rank()
            self.request.mark_training()
            if multiprocessing.parent_process() is not None:  # such a process may end without running atexit functions
                multiprocessing.util.Finalize(None, self.summarise, exitpriority=0)
        self._add_record(model)  # a new record if the model was built in another process (pickle, fork)

    def _add_record(self, model: nn.Module) -> None:
        record = RECORDER.get_record(model)
        if record not in self.records:
            self.records.append(record)

    def summarise(self) -> None:
        """Print the outcome of the run, once, at the end of the process."""
        if self._summarised or (rank() if self.rank is None else self.rank) != 0:
            return
        self._summarised = True
        # A forked process also has copies of its parent's records, which the parent prints.
        records = [record for record in self.records if record.process == os.getpid()]
        if not records:
            self.request.report_no_model()
            return
        elsewhere = self.request.take_marker()
        if self.request.as_json and self.request.is_first:
            runs = [record.to_dict() for record in records]
            summary = {"adapter": self.plugin.name, "models_attached": len(runs), "spawned": elsewhere, "runs": runs}
            print(json.dumps(summary))
        elif not quiet() and self.tells:
            self._print_tables(records, elsewhere)

    def _print_tables(self, records: list[Record], elsewhere: bool) -> None:
        trained = [record for record in records if record.steps]
        # A model that loaded a checkpoint has steps, but it has not begun to train in this process.
        for record in trained if self.training_process == os.getpid() else ():
            if record.begun and not had_traceback() and sys.stderr is not None:
                print_summary(record)
            elif record.begun and record.folder is not None:
                say(f"trace in {shorten_path(record.folder)}")
        if not (trained or elsewhere or had_traceback()) and self.request.is_first:
            models = ", ".join(sorted({record.model for record in records}))
            expected = "expected optimizer.step() of a torch.optim optimizer after a backward in model.train()"
            say(f"attached to {models}, but there was no training step: {expected}")
