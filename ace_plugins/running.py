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
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import wrapt
from torch import Tensor, nn

from .attaching import configured
from .config import Config
from .duals import Duals
from .environment import quiet
from .errors import AceError, AceWarning
from .fingerprint import fingerprint
from .history import History
from .hookspecs import hookimpl
from .observers import rank
from .patching import patched
from .plugins import registry
from .relaxation import Ace, find
from .runner import ScriptError, run_script
from .shims import active
from .site_status import status
from .trace import TRACE
from .verdicts import MEANING, NEAR, verdict

_running: PatchedRun | None = None


def running() -> PatchedRun | None:
    """The run this process is, if it is one."""
    return _running


@dataclass
class Attached:
    """The small part of an attached model that says how it ended, also when the model itself is gone."""

    model: str
    adapter: str
    config: Config
    sites: list[str]
    gamma: Tensor
    duals: Duals
    history: History = field(default_factory=History)

    @classmethod
    def of(cls, model: nn.Module, ace: Ace) -> Attached:
        sites = [site.name for site in ace.sites]
        return cls(type(model).__name__, ace.adapter, ace.config, sites, ace.gamma, ace.duals)

    @property
    def mode(self) -> str:
        return self.config.mode

    def to_dict(self) -> dict[str, Any]:
        values = zip(
            self.sites,
            self.gamma.tolist(),
            self.duals.lambda_.tolist(),
            self.duals.u.tolist(),
            self.verdicts(),
            strict=True,
        )
        folder = TRACE.folders.get(self.duals)
        return {
            "model": self.model,
            "adapter": self.adapter,
            "mode": self.mode,
            "steps": self.duals.count,
            "landed": self.duals.landed,
            "verdict": self.verdict(),
            "folder": None if folder is None else os.path.relpath(folder),
            "sites": [{"name": n, "gamma": g, "lambda": la, "u": u, "verdict": v} for n, g, la, u, v in values],
        }

    def verdicts(self) -> list[str]:
        """Per site a key of `MEANING`."""
        histories = self.history.per_site() or [([], [])] * len(self.sites)
        now = zip(self.gamma.tolist(), self.duals.lambda_.tolist(), self.duals.u.tolist(), strict=True)
        return [
            verdict(
                self.mode,
                [*gamma, last_gamma],
                [*lambda_, last_lambda],
                self.config.epsilon if self.mode == "bounded" else u,
                landed=self.duals.landed,
            )
            for (gamma, lambda_), (last_gamma, last_lambda, u) in zip(histories, now, strict=True)
        ]

    def verdict(self) -> str:
        """What the user should know about how the run ended; empty if there is nothing to say."""
        found = self.verdicts()
        largest = float(self.gamma.detach().abs().max())
        if "diverged" in found:
            return MEANING["diverged"]
        if self.mode == "strict" and largest > NEAR:
            return (
                f"|gamma| is still up to {largest:.2f}: the f_eq that model.eval() shows is not yet the model that "
                "trains, and early stopping or a falling learning rate can leave it there; on a short budget let gamma "
                f"move faster and land: gamma_lr = 10, augmented = 5, land_at = {max(1, self.duals.count // 5)}"
            )
        if self.mode != "strict":
            most = int(self.duals.u.argmax())
            return f"{self.sites[most]} keeps the most slack: u = {float(self.duals.u[most]):.3g}"
        return "the symmetry holds: gamma is at 0" if largest < 0.01 else ""


class PatchedRun:
    """One run, in the process that began it or in one that its script started."""

    def __init__(
        self, adapter: str, settings: Mapping[str, Any], *, root: Path | None = None, as_json: bool = False
    ) -> None:
        global _running
        self.adapter = registry().adapter(adapter).name
        self.settings = dict(settings)
        self.root = root
        """The checkout, where there is one."""
        self.as_json = as_json
        self.attached: list[Attached] = []
        self._of: weakref.WeakKeyDictionary[nn.Module, Attached] = weakref.WeakKeyDictionary()
        self.spawned = False
        """The script has started processes whose models are theirs to tell of."""
        self._children = mmap.mmap(-1, 1)
        """Shared with processes forked from this one: whether one of them has trained a model."""
        self.code: Any = None
        """What the script exited with, as far as that is known."""
        self.process = os.getpid()
        self._begun = 0
        self.patch = patched(adapter, **settings)
        self.mode = configured(self.patch.plugin, settings).mode
        registry().manager.register(self, name="ace_plugins.run")
        self._plain_warning = warnings.showwarning
        warnings.showwarning = self._warn
        self._plain_excepthook = sys.excepthook
        sys.excepthook = self._uncaught
        wrapt.wrap_function_wrapper(multiprocessing.spawn, "get_preparation_data", self._prepare)
        _running = self

    def _warn(self, message: Any, category: type[Warning], *where: Any, **more: Any) -> None:
        """ACE's own notices without the line of torch they came from."""
        if issubclass(category, AceWarning):
            print(f"ace: {message}", file=sys.stderr)
        else:
            self._plain_warning(message, category, *where, **more)

    def _uncaught(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Of ACE's own errors the line that says what to do, and the script's line where it happened."""
        self.code = 1
        if not isinstance(error, AceError):
            self._plain_excepthook(kind, error, trace)
            return
        here = os.path.dirname(os.path.abspath(__file__))
        theirs = [f for f in traceback.extract_tb(trace) if not os.path.abspath(f.filename).startswith(here + os.sep)]
        script = [f for f in theirs if "site-packages" not in f.filename and not f.filename.startswith("<")]
        where = f" ({os.path.relpath(script[-1].filename)} line {script[-1].lineno})" if script else ""
        print(f"ace: {' '.join(str(error).split())}{where}", file=sys.stderr)

    @hookimpl
    def ace_attached(self, model: nn.Module) -> None:
        if rank() == 0 and not quiet():
            print(self._banner(model), file=sys.stderr)
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
        from . import tables  # noqa: F401

        if os.getpid() != self.process:  # forked from a process with models of its own
            self._children[0] = 1
            self.process = os.getpid()
            self.attached = []
            self._of = weakref.WeakKeyDictionary()
        if multiprocessing.parent_process() is not None:  # it will end without running what atexit holds
            self.spawned = True
            multiprocessing.util.Finalize(None, self.summarise, exitpriority=0)
        self._begun = os.getpid()

    def _known(self, model: nn.Module) -> Attached:
        ace = find(model)
        assert ace is not None
        attached = self._of[model] = Attached.of(model, ace)
        self.attached.append(attached)
        return attached

    def _banner(self, model: nn.Module) -> str:
        now = status(model)
        ace = find(model)
        assert ace is not None
        shims = ", ".join(shim.name for shim in active(self.patch.plugin))
        return (
            f"ace: {now.adapter}{self._commit()}: attached to {type(model).__name__}, {len(now.sites)} sites, "
            f"{now.upstream_parameters:,} + {now.ace_parameters:,} parameters, mode {now.mode}, "
            f"dual lr {ace.config.dual_lr} ({ace.config.dual_optimizer})" + (f"; shims: {shims}" if shims else "")
        )

    def _commit(self) -> str:
        """Which state of its upstream the model comes from."""
        checkout = self.patch.upstream.checkout
        if self.root is None or checkout is None:
            return ""
        found = fingerprint(self.root, checkout)
        for difference in found.differences:  # it was another when it was patched
            print(f"ace: this checkout has changed: {difference}", file=sys.stderr)
        commit = found.known or found.commit
        if commit is None:
            return " without a git commit"
        return f" at commit {commit[:7]}" + ("" if found.known else " (edited)" if found.edited else "")

    def _prepare(self, wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        """What a spawned process gets before it imports the script."""
        self.spawned = True
        return wrapped(*args, **kwargs)

    def at_exit(self) -> None:
        """Have the summary told when this process ends, unless multiprocessing is just setting it up for the script."""
        if not getattr(multiprocessing.process.current_process(), "_inheriting", False):
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
        if not self.attached and not short:
            models = ", ".join(self.patch.upstream.models)
            print(f"ace: no model was attached: this process built none of {models}", file=sys.stderr)
        for each in self.attached:
            if each.duals.count and self.code == 1:
                if each.duals in TRACE.folders:  # a line, not a table: the traceback above is what matters
                    print(f"ace: trace in {os.path.relpath(TRACE.folders[each.duals])}", file=sys.stderr)
            elif each.duals.count:
                from .tables import print_run

                print_run(each.to_dict())
        idle = sorted({each.model for each in self.attached if not each.duals.count})
        if idle and len(idle) == len({each.model for each in self.attached}) and not short:
            print(
                f"ace: attached to {', '.join(idle)}, but its dual loop made no step: expected optimizer.step() of a "
                "torch.optim optimizer after a backward in model.train()",
                file=sys.stderr,
            )


class Inherited(PatchedRun):
    """A run whose spawned processes have to be told, since the script they import does not know of ACE."""

    def _commit(self) -> str:
        """Which state of its upstream the model comes from."""
        checkout = self.patch.upstream.checkout
        if self.root is None or checkout is None:
            return ""
        found = fingerprint(self.root, checkout)
        for difference in found.differences:  # it was another when it was patched
            print(f"ace: this checkout has changed: {difference}", file=sys.stderr)
        commit = found.known or found.commit
        if commit is None:
            return " without a git commit"
        return f" at commit {commit[:7]}" + ("" if found.known else " (edited)" if found.edited else "")

    def _prepare(self, wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        return {**super()._prepare(wrapped, instance, args, kwargs), "ace_plugins": Bequest(self)}


class Bequest:
    """Pickled as a call: where it is unpickled, models are attached as in the process that sent it."""

    def __init__(self, run: PatchedRun) -> None:
        self.arguments = (run.adapter, run.settings, run.root)

    def __reduce__(self) -> tuple[Any, ...]:
        return (_inherit, self.arguments)


def _inherit(adapter: str, settings: Mapping[str, Any], root: Path | None) -> None:
    Inherited(adapter, settings, root=root).at_exit()


def prepared(adapter: str, settings: Mapping[str, Any], command: Sequence[str], *, as_json: bool) -> Callable[[], int]:
    """Patch, and return what runs the script. The summary comes when the process ends, after the script's own exits."""
    run = Inherited(adapter, settings, root=_root(adapter, command), as_json=as_json)

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
    script = next((word for word in command if word.endswith(".py")), "")
    folders = [Path(script).resolve().parent, *Path(script).resolve().parents]
    return next((f for f in folders if all((f / each).is_file() for each in upstream.files)), None)
