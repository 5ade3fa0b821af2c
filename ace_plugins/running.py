"""``ace-patch run``: patch, run the script, tell what was attached and what came of it."""

from __future__ import annotations

import atexit
import json
import multiprocessing.spawn
import multiprocessing.util
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import wrapt
from torch import Tensor, nn

from .duals import Duals
from .errors import AceWarning
from .hookspecs import hookimpl
from .observers import rank
from .patching import patched
from .plugins import registry
from .relaxation import find
from .runner import ScriptError, run_script
from .site_status import status

# Not when it is needed, at exit: an import there makes Python forget that it was ended by Ctrl-C.
from .tables import print_run
from .trace import TRACE


@dataclass
class Attached:
    """The small part of an attached model that says how it ended, also when the model itself is gone."""

    model: str
    adapter: str
    mode: str
    sites: list[str]
    gamma: Tensor
    duals: Duals

    def to_dict(self) -> dict[str, Any]:
        values = zip(self.sites, self.gamma.tolist(), self.duals.lambda_.tolist(), self.duals.u.tolist(), strict=True)
        folder = TRACE.folders.get(self.duals)
        return {
            "model": self.model,
            "adapter": self.adapter,
            "mode": self.mode,
            "steps": self.duals.count,
            "landed": self.duals.landed,
            "verdict": self.verdict(),
            "folder": None if folder is None else os.path.relpath(folder),
            "sites": [{"name": name, "gamma": g, "lambda": la, "u": u} for name, g, la, u in values],
        }

    def verdict(self) -> str:
        """What the user should know about how the run ended; empty if there is nothing to say."""
        gamma = self.gamma.detach().abs()
        largest = float(gamma.max())
        if not largest < float("inf"):
            return "gamma is not finite: the run has diverged; lower the learning rate"
        if self.mode == "strict" and largest > FAR:
            return (
                f"|gamma| is still up to {largest:.2f}: the f_eq that model.eval() shows is not yet the model that "
                "trains, and early stopping or a falling learning rate can leave it there; on a short budget let gamma "
                f"move faster and land: --gamma-lr 10 --augmented 5 --land-at {max(1, self.duals.count // 5)}"
            )
        if self.mode != "strict":
            most = int(self.duals.u.argmax())
            return f"{self.sites[most]} keeps the most slack: u = {float(self.duals.u[most]):.3g}"
        return "the symmetry holds: gamma is at 0" if largest < 0.01 else ""


FAR = 0.05
"""A strict run whose gamma is larger than this at its end has not converged."""


class PatchedRun:
    """One ``ace-patch run``, in the process of the command or in one that its script spawned."""

    def __init__(self, adapter: str, settings: Mapping[str, Any], *, as_json: bool = False) -> None:
        self.adapter = adapter
        self.settings = dict(settings)
        self.as_json = as_json
        self.attached: list[Attached] = []
        self.spawned = False
        """The script has started processes whose models are theirs to tell of."""
        self.code: Any = None
        """What the script exited with, if it did."""
        self.process = os.getpid()
        self.patch = patched(adapter, **settings)
        registry().manager.register(self, name="ace_plugins.run")
        self._plain_warning = warnings.showwarning
        warnings.showwarning = self._warn
        wrapt.wrap_function_wrapper(multiprocessing.spawn, "get_preparation_data", self._prepare)

    def _warn(self, message: Any, category: type[Warning], *where: Any, **more: Any) -> None:
        """ACE's own notices without the line of torch they came from."""
        if issubclass(category, AceWarning):
            print(f"ace: {message}", file=sys.stderr)
        else:
            self._plain_warning(message, category, *where, **more)

    @hookimpl
    def ace_attached(self, model: nn.Module) -> None:
        ace = find(model)
        assert ace is not None
        now = status(model)
        sites = [site.name for site in now.sites]
        self.attached.append(Attached(type(model).__name__, now.adapter, now.mode, sites, ace.gamma, ace.duals))
        if rank() == 0:  # on stderr: stdout is the script's
            print(
                f"ace: attached to {type(model).__name__}: {len(sites)} sites, mode {now.mode}, "
                f"{now.upstream_parameters:,} + {now.ace_parameters:,} parameters",
                file=sys.stderr,
            )

    def _prepare(self, wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        """What a spawned process gets before it imports the script: unpickling our entry patches it too."""
        self.spawned = True
        return {**wrapped(*args, **kwargs), "ace_plugins": Inherited(self.adapter, self.settings)}

    def summarise(self) -> None:
        if os.getpid() != self.process or rank() != 0:  # a forked worker of the script inherits this
            return
        if self.as_json:
            runs = [each.to_dict() for each in self.attached]
            told = {"adapter": self.adapter, "models_attached": len(runs), "spawned": self.spawned, "runs": runs}
            print(json.dumps(told))
            return
        # After a traceback that is what matters, and it explains why no model was built.
        quiet = self.code not in (None, 0) or self.spawned or self.settings.get("mode") == "off"
        if not self.attached and not quiet:
            models = ", ".join(self.patch.plugin.upstream.models) if self.patch.plugin.upstream else ""
            print(f"ace: no model was attached: this process built none of {models}", file=sys.stderr)
        for each in self.attached:
            if each.duals.count and self.code == 1:
                if each.duals in TRACE.folders:  # a line, not a table: the traceback above is what matters
                    print(f"ace: trace in {os.path.relpath(TRACE.folders[each.duals])}", file=sys.stderr)
            elif each.duals.count:
                print_run(each.to_dict())
        idle = sorted({each.model for each in self.attached if not each.duals.count})
        if idle and len(idle) == len({each.model for each in self.attached}) and not quiet:
            print(
                f"ace: attached to {', '.join(idle)}, but its dual loop made no step: expected optimizer.step() of a "
                "torch.optim optimizer after a backward in model.train()",
                file=sys.stderr,
            )


class Inherited:
    """Pickled as a call: where it is unpickled, models are attached as in the process that sent it."""

    def __init__(self, adapter: str, settings: Mapping[str, Any]) -> None:
        self.arguments = (adapter, dict(settings))

    def __reduce__(self) -> tuple[Any, ...]:
        return (_inherit, self.arguments)


def _inherit(adapter: str, settings: Mapping[str, Any]) -> None:
    patched_run = PatchedRun(adapter, settings)
    patched_run.spawned = True  # a worker without a model, as of a data loader, is nothing to tell
    multiprocessing.util.Finalize(None, patched_run.summarise, exitpriority=0)


def prepared(adapter: str, settings: Mapping[str, Any], command: Sequence[str], *, as_json: bool) -> Callable[[], int]:
    """Patch, and return what runs the script. The summary comes when the process ends, after the script's own exits."""
    patched_run = PatchedRun(adapter, settings, as_json=as_json)

    def start() -> int:
        atexit.register(patched_run.summarise)
        try:
            return run_script(command)
        except ScriptError:
            atexit.unregister(patched_run.summarise)  # it was never started
            raise
        except BaseException as ended:
            patched_run.code = ended.code if isinstance(ended, SystemExit) else None
            raise

    return start
