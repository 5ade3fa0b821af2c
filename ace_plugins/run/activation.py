"""Waits in a process of a run until the script is about to import upstream. Only then is torch needed.

Every Python process of a run passes here when it starts, also those that never train, so this imports little.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any, ClassVar, NoReturn

from ..contract.upstreams import file_of
from ..errors import AceError
from ..later import later
from ..output import say
from ..patch.imports import install
from ..patch.stand_ins import STAND_INS
from ..plugins.claims import is_file
from .request import SHIFT, RunRequest


def inherit() -> None:
    """Make this process one of the run whose request is in the environment."""
    if SHIFT in os.environ:
        later("ace_plugins.run.seeds").shift()
    request = RunRequest.in_environment()
    if request is not None:
        if request.is_first:
            request.attended = True
            request.hand_on(os.environ)
        Activation(request)


class Activation:
    """Starts this process's part of a run, once, when upstream is about to be imported.

    It is a finder that finds nothing. It stays in ``sys.meta_path`` after the start: the import that is going on would
    skip a finder if the list became shorter.
    """

    current: ClassVar[Activation | None] = None
    """That of this process, if there is one."""

    def __init__(self, request: RunRequest, name: str = "") -> None:
        Activation.current = self
        self.request = request
        self.name = name
        """The module that carries the marked line; empty without one."""
        modules = {path.partition(":")[0] for path in request.models}
        last_names = {module.rpartition(".")[2] for module in modules}
        self.names = {*(last_names if request.cloned else modules), *request.begins}
        """Modules that hold upstream's models, and what is repaired before it is imported. A file of a checkout has one
        of these last names, whatever the first."""
        self.started = False
        self.run: Any = None
        atexit.register(self.at_exit)
        if "torch" in sys.modules:  # upstream may be there already
            self.start()
            return
        # The watch comes after this one: the import that sets it off may be the one to watch.
        install()
        sys.meta_path.insert(0, self)
        if request.root is not None:
            STAND_INS.asked = self._missing
            STAND_INS.install()

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> None:
        if not self.started and self.may_be_upstream(name):
            self.start()

    def may_be_upstream(self, name: str) -> bool:
        """Whether a module of this name may hold models of upstream, told without importing anything."""
        return (name.rpartition(".")[2] if self.request.cloned else name) in self.names

    def _missing(self, module: str, file: str) -> None:
        """A module that is not installed is imported, perhaps by a file of upstream: then it gets a stand-in."""
        if any(path(file).startswith(f"{self.request.root}{os.sep}") for path in (os.path.abspath, os.path.realpath)):
            self.start()

    def start(self) -> None:
        if self.started:
            return
        self.started = True
        STAND_INS.asked = None
        try:
            self.run = later("ace_plugins.run.process").ProcessRun(self.request)
        except AceError as error:
            give_up(error, self.name)

    def at_exit(self) -> None:
        if self.run is not None:
            self.run.summarise()
        elif not self.started:
            self._tell_of_nothing()

    def _tell_of_nothing(self) -> None:
        """Upstream was not imported, or it was imported past this finder."""
        files = [file_of(path) for path in self.request.models]
        for name, module in list(sys.modules.items()):
            origin = getattr(module, "__file__", None)
            if self.may_be_upstream(name) and (not self.request.cloned or any(is_file(origin, each) for each in files)):
                say(f"{name} was imported past ACE, so nothing was attached: another import hook comes before it")
                return
        if os.environ.get("RANK", "0") in ("", "0"):
            self.request.tell_of_no_model(self.request.trained_elsewhere())


def give_up(error: AceError, name: str) -> NoReturn:
    """Before anything was changed. A script ends with one line; other importers of a marked file get the exception."""
    if name not in ("", "__main__", "__mp_main__"):
        raise error
    say(" ".join(str(error).split()), anyway=True)
    raise SystemExit(2) from None
