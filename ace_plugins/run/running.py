"""A run of a script with ACE: what is told when a model is attached, and what came of it when the process ends.

The same for ``ace-patch run``, which patches nothing on disk, and for a script that ``ace-patch`` has marked.
Everything is told on stderr: stdout is the script's.
"""

from __future__ import annotations

import atexit
import json
import mmap
import multiprocessing.spawn
import multiprocessing.util
import os
import sys
import traceback
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import wrapt
from torch import nn

from ..engine.attaching import configured
from ..telling import quiet, say
from ..errors import AceError, AceWarning
from ..checkout.layout import layout
from ..contract.hookspecs import hookimpl
from ..plugins.observers import rank
from ..report.outcome import Outcome, relative
from ..patch.constructors import Patch, patched
from ..plugins.registry import registry
from ..engine.state import find
from .runner import ScriptError, run_script
from ..settings.file import NAME, unchecked
from ..patch.shims import active
from ..engine.status import status
from ..settings.sources import Sources
from ..patch.stand_ins import holding
from ..report.trace import TRACE

_running: PatchedRun | None = None


def running() -> PatchedRun | None:
    """The run this process is, if it is one."""
    return _running


class PatchedRun:
    """One run, in the process that began it or in one that its script started."""

    def __init__(
        self,
        adapter: str,
        settings: Mapping[str, Any],
        *,
        root: Path | None = None,
        explicit: bool = False,
        as_json: bool = False,
    ) -> None:
        global _running
        self.adapter = registry().adapter(adapter).name
        self.patch: Patch | None = None
        self.root = root
        """The checkout, where there is one."""
        self.explicit = explicit
        """Somebody asked for this very run, and wants to hear if nothing came of it."""
        self.as_json = as_json
        self.attached: list[Outcome] = []
        self._of: weakref.WeakKeyDictionary[nn.Module, Outcome] = weakref.WeakKeyDictionary()
        self.spawned = False
        """The script has started processes whose models are theirs to tell of."""
        self._children = mmap.mmap(-1, 1)
        """Shared with processes forked from this one: whether one of them has trained a model."""
        self.code: Any = None
        """What the script exited with, as far as that is known."""
        self.process = os.getpid()
        self._begun = 0
        self._at: str | None = None
        self.set(settings)
        registry().manager.register(self, name="ace_plugins.run")
        self._plain_warning = warnings.showwarning
        warnings.showwarning = self._warn
        self._plain_excepthook = sys.excepthook
        sys.excepthook = self._uncaught
        wrapt.wrap_function_wrapper(multiprocessing.spawn, "get_preparation_data", self._prepare)
        _running = self
        if root is not None:
            TRACE.home = root
        if self.mode == "off" and rank() == 0 and not _inheriting():
            say(f"{self.adapter}{self._commit()}: mode off, plain upstream")

    def set(self, settings: Mapping[str, Any]) -> None:
        """From now on models are attached with these settings."""
        if self.patch is not None:
            self.patch.undo()
        self.settings = dict(settings)
        self.patch = patched(self.adapter, **settings)
        self.upstream, self.plugin = self.patch.upstream, self.patch.plugin
        self.mode = configured(self.plugin, settings).mode

    def _warn(self, message: Any, category: type[Warning], *where: Any, **more: Any) -> None:
        """ACE's own notices without the line of torch they came from."""
        if issubclass(category, AceWarning):
            say(str(message), anyway=True)
        else:
            self._plain_warning(message, category, *where, **more)

    def _uncaught(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Of ACE's own errors the line that says what to do, and the script's line where it happened."""
        if kind is not KeyboardInterrupt:  # after which people want to see how far it got
            self.code = 1
        if not isinstance(error, AceError):
            self._plain_excepthook(kind, error, trace)
            return
        say(" ".join(str(error).split()) + self._place(trace), anyway=True)

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

    @hookimpl
    def ace_attached(self, model: nn.Module) -> None:
        if rank() == 0:
            say(self._banner(model))
        self._known(model)

    @hookimpl
    def ace_stepped(self, model: nn.Module, step: int) -> None:
        if os.getpid() != self._begun:
            self._begin_here()
        # A model may come by pickle from the process that built it, and so be new here.
        known = self._of.get(model) or self._known(model)
        known.history.record(step, known.gamma, known.duals.lambda_)

    def _begin_here(self) -> None:
        """The first step in this process. One that the script has started tells of what it trains itself."""
        # For the table at exit: an import there makes Python forget that it was ended by Ctrl-C.
        from ..report import tables  # noqa: F401

        if os.getpid() != self.process:  # forked from a process with models of its own
            self._children[0] = 1
            self.process = os.getpid()
            self.attached = []
            self._of = weakref.WeakKeyDictionary()
        if multiprocessing.parent_process() is not None:  # it will end without running what atexit holds
            self.spawned = True
            multiprocessing.util.Finalize(None, self.summarise, exitpriority=0)
        self._begun = os.getpid()

    def _known(self, model: nn.Module) -> Outcome:
        ace = find(model)
        assert ace is not None
        attached = self._of[model] = Outcome.of(model, ace)
        self.attached.append(attached)
        return attached

    def _banner(self, model: nn.Module) -> str:
        now = status(model)
        ace = find(model)
        assert ace is not None
        shims = ", ".join(shim.name for shim in active(self.plugin))
        return (
            f"{now.adapter}{self._commit()}: attached to {type(model).__name__}, {len(now.sites)} sites, "
            f"{now.upstream_parameters:,} parameters + {now.ace_parameters:,} of ACE, mode {now.mode}, "
            f"dual lr {ace.config.dual_lr} ({ace.config.dual_optimizer})" + (f"; shims: {shims}" if shims else "")
        )

    def _commit(self) -> str:
        """Which state of its upstream the models come from."""
        if self._at is None:
            self._at = self._found_commit()
        return self._at

    def _found_commit(self) -> str:
        checkout = self.upstream.checkout
        if self.root is None or checkout is None:
            return ""
        found = layout(self.root, checkout)
        for difference in found.differences:  # it was another when it was patched
            say(f"this checkout has changed: {difference}")
        return f" at commit {found.commit[:7]}" if found.commit else " without a git commit"

    def _prepare(self, wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        """What a spawned process gets before it imports the script: unpickling our entry makes it a run like this."""
        self.spawned = True
        return {**wrapped(*args, **kwargs), "ace_plugins": Bequest(self)}

    def at_exit(self) -> None:
        """Have the summary told when this process ends, unless multiprocessing is just setting it up for the script."""
        if not _inheriting():
            atexit.register(self.summarise)

    def summarise(self) -> None:
        if os.getpid() != self.process or rank() != 0:  # a forked worker of the script inherits this
            return
        if self.as_json:
            runs = [each.to_dict() for each in self.attached]
            told = {"adapter": self.adapter, "models_attached": len(runs), "spawned": self.spawned, "runs": runs}
            print(json.dumps(told))
            return
        if quiet():
            return
        # After a traceback that is what matters, and it explains why no model was built.
        short = self.code not in (None, 0) or self.spawned or bool(self._children[0]) or self.mode == "off"
        if not self.attached and not short and self.explicit:
            say(f"no model was attached: this process built none of {', '.join(self.upstream.models)}")
        for each in self.attached:
            if each.duals.count and self.code == 1:
                if each.duals in TRACE.folders:  # a line, not a table: the traceback above is what matters
                    say(f"trace in {relative(TRACE.folders[each.duals])}")
            elif each.duals.count and sys.stderr is not None:
                from ..report.tables import print_run

                print_run(each.to_dict())
        idle = sorted({each.model for each in self.attached if not each.duals.count})
        if idle and len(idle) == len({each.model for each in self.attached}) and not short:
            say(
                f"attached to {', '.join(idle)}, but its dual loop made no step: expected optimizer.step() of a "
                "torch.optim optimizer after a backward in model.train()"
            )


def _inheriting() -> bool:
    """Whether multiprocessing is just setting this process up."""
    return bool(getattr(multiprocessing.process.current_process(), "_inheriting", False))


class Bequest:
    """Pickled as a call: where it is unpickled, models are attached as in the process that sent it."""

    def __init__(self, run: PatchedRun) -> None:
        self.arguments = (run.adapter, run.settings, run.root)

    def __reduce__(self) -> tuple[Any, ...]:
        return (_inherit, self.arguments)


def _inherit(adapter: str, settings: Mapping[str, Any], root: Path | None) -> None:
    run = running()
    if run is None:
        PatchedRun(adapter, settings, root=root).at_exit()
    else:  # forked from a server that imported the script: that read its settings itself, perhaps later ones
        run.set(settings)


def prepared(adapter: str, options: Mapping[str, Any], command: Sequence[str], *, as_json: bool) -> Callable[[], int]:
    """Patch, and return what runs the script. The summary comes when the process ends, after the script's own exits."""
    plugin = registry().adapter(adapter)
    root = _root(adapter, command)
    file = unchecked(root / NAME) if root and (root / NAME).is_file() else None
    sources = Sources(file if file and file.adapter == plugin.name else None, options)
    sources.tell_notices()
    sources.checked(plugin.presets)
    run = PatchedRun(plugin.name, sources.settings, root=root, explicit=True, as_json=as_json)

    def start() -> int:
        atexit.register(run.summarise)
        try:
            return run_script(command)
        except ScriptError:
            atexit.unregister(run.summarise)  # it was never started
            raise
        except BaseException as ended:
            run.code = ended.code if isinstance(ended, SystemExit) else None
            raise

    return start


def _root(adapter: str, command: Sequence[str]) -> Path | None:
    """The checkout that the script is in, if it is in one."""
    upstream = registry().adapter(adapter).upstream
    if upstream is None or upstream.checkout is None:
        return None
    script = next((word for word in command if word.endswith(".py")), None)
    here = Path(script).resolve().parent if script else Path.cwd()
    found = holding(str(here), upstream.files)
    return None if found is None else Path(found)
