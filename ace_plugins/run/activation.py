"""Waits in a process of a run until the script is about to import upstream. Only then is torch needed.

Every Python process of a run passes here when it starts, also those that never train, so this imports little.
"""

from __future__ import annotations

import atexit
import os
import sys
from itertools import islice

from ..errors import AceError
from ..later import later
from ..patch.imports import install
from ..patch.stand_ins import STAND_INS
from ..telling import say
from .request import RunRequest

TYPE_CHECKING = False  # as typing has it, without waiting for typing: scripts wait for this module
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any, NoReturn


MANY = 500
"""Entries of a folder past which it holds data, not modules."""

_current: Activation | None = None


def current() -> Activation | None:
    """The activation of this process, if there is one."""
    return _current


def inherit() -> None:
    """Make this process one of the run whose request is in the environment."""
    request = RunRequest.in_environment()
    if request is not None:
        if request.is_first:
            request.attended = True
            request.hand_on(os.environ)
        Activation(lambda: request, watched(request.models, cloned=request.cloned, root=request.root), request.root)


class Activation:
    """Starts this process's part of a run, once, when upstream is about to be imported."""

    def __init__(
        self, request: Callable[[], RunRequest], is_upstream: Callable[[str], bool], root: str | None, name: str = ""
    ) -> None:
        global _current
        self.request = request
        """Called once, before the start: settings may still have to be resolved."""
        self.is_upstream = is_upstream
        """Whether a module of that name may be upstream's."""
        self.root = root
        self.name = name
        """The module that carries the marked line; empty without one."""
        self.started = False
        self.run: Any = None
        _current = self
        atexit.register(self.at_exit)
        if "torch" in sys.modules:  # upstream may be there already
            self.start()
            return
        # Before the trigger: the import that sets it off may be the one to watch.
        install()
        sys.meta_path.insert(0, _Trigger(self))
        if root is not None:
            STAND_INS.asked = self._missing
            STAND_INS.install()

    def _missing(self, module: str, file: str) -> None:
        """A module that is not installed is imported, perhaps by a file of upstream: then it gets a stand-in."""
        if any(path(file).startswith(f"{self.root}{os.sep}") for path in (os.path.abspath, os.path.realpath)):
            self.start()

    def start(self) -> None:
        if self.started:
            return
        self.started = True
        STAND_INS.asked = None
        try:
            request = self.request()
            self.run = later("ace_plugins.run.process").ProcessRun(request)
        except AceError as error:
            give_up(error, self.name)

    def at_exit(self) -> None:
        if self.run is not None:
            self.run.summarise()
        elif not self.started:
            self._tell_of_nothing()

    def _tell_of_nothing(self) -> None:
        """Upstream was not imported, or it was imported past the trigger."""
        for name, module in list(sys.modules.items()):
            if name not in ("__main__", "__mp_main__") and self._holds(name, module):
                say(f"{name} was imported past ACE, so nothing was attached: another import hook comes before it")
                return
        request = RunRequest.in_environment()
        if request is not None and os.environ.get("RANK", "0") in ("", "0"):
            request.tell_of_no_model(request.trained_elsewhere())

    def _holds(self, name: str, module: object) -> bool:
        if self.root is None:
            return self.is_upstream(name)
        file = getattr(module, "__file__", None)
        return isinstance(file, str) and file.startswith(f"{self.root}{os.sep}")


class _Trigger:
    """Finds nothing: tells, before it is imported, that a module of upstream is asked for."""

    def __init__(self, activation: Activation) -> None:
        self.activation = activation

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        # It stays in sys.meta_path: the import that is going on would skip a finder if the list became shorter.
        if not self.activation.started and self.activation.is_upstream(name):
            self.activation.start()
        return None


def watched(models: Sequence[str], *, cloned: bool, root: str | None) -> Callable[[str], bool]:
    """Whether a module of some name may be upstream's, told without importing anything."""
    modules = frozenset(path.partition(":")[0] for path in models)
    if not cloned:
        return modules.__contains__
    if root is not None:
        return inside(root)
    files = frozenset(module.rpartition(".")[2] for module in modules)
    return lambda name: name.rpartition(".")[2] in files


def inside(root: str) -> Callable[[str], bool]:
    """Whether a module of some name may be a file of this folder, under whatever name it is imported."""
    names = _modules_in(root) | {os.path.basename(root)}
    return lambda name: name.partition(".")[0] in names


def _modules_in(folder: str, depth: int = 3) -> frozenset[str]:
    """Names of files and folders, one of which begins every name under which a file of this folder is imported."""
    found: set[str] = set()
    try:
        with os.scandir(folder) as entries:
            for entry in islice(entries, MANY):
                stem, dot, ending = entry.name.partition(".")
                if not stem.isidentifier():
                    continue
                if ending == "py" and dot:
                    found.add(stem)
                elif not dot and depth and entry.is_dir():
                    found |= {stem, *_modules_in(entry.path, depth - 1)}
    except OSError:
        pass
    return frozenset(found)


def give_up(error: AceError, name: str) -> NoReturn:
    """Before anything was changed. A script ends with one line; other importers of a marked file get the exception."""
    if name not in ("", "__main__", "__mp_main__"):
        raise error
    say(" ".join(str(error).split()), anyway=True)
    raise SystemExit(2) from None
