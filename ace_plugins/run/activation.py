"""Prepare every process of a run, and start ACE in it when the script is about to import upstream.

All Python processes of a run import this module at start-up, also those that never train. So it must import neither
torch nor plugins. The environment variable ``ACE_RUN`` passes the run's settings from process to process.
"""

from __future__ import annotations

import atexit
import dataclasses
import json
import os
import sys
from collections.abc import MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from ..contract.upstreams import file_of
from ..errors import AceError
from ..output import say
from ..patch.imports import STAND_INS, install
from ..plugins.claims import is_file

if TYPE_CHECKING:
    from .process import ProcessRun

VARIABLE = "ACE_RUN"
SHIFT = "ACE_SEED_SHIFT"
"""Environment variable: a number to add to every seed the script sets. Comparisons of several seeds set it."""


@dataclass
class RunRequest:
    """Adapter, settings and checkout of a run. All processes of the run have the same request."""

    adapter: str
    settings: dict[str, Any]
    """Final value of every field of `Config`."""
    origins: dict[str, str]
    """Mapping from each setting that is not at its default to its source, such as a file or an option."""
    models: list[str]
    """Model classes of upstream, as "module:Class"."""
    packages: list[str]
    """Packages of upstream that need a shim before they can be imported."""
    cloned: bool
    """True if upstream is a checkout, where classes are matched by file; False for an installed package."""
    root: str | None
    """The checkout that contains the script, if any."""
    as_json: bool
    by_command: bool
    """True if the run was started by ``ace-patch run``, not by a patched script."""
    process: int
    """Process id of the first process of the run."""
    marker: str
    """Path of a file that shows that a process other than the first one has trained a model."""
    attended: bool
    """True if the first process runs Python, so that it can remove the marker file. False for programs such as sh."""

    @classmethod
    def from_environment(cls) -> RunRequest | None:
        """Read the request this process was started with, if any."""
        text = os.environ.get(VARIABLE)
        if not text:
            return None
        try:
            return cls(**json.loads(text))
        except (TypeError, ValueError):
            say(f"{VARIABLE} is ignored: ace-patch did not set it; to choose the folder for traces, set ACE_RUNS")
            return None

    def write_to(self, environment: MutableMapping[str, str]) -> None:
        """Write the request to an environment, so that processes started with this environment can read it."""
        environment[VARIABLE] = json.dumps(dataclasses.asdict(self))

    @property
    def is_first(self) -> bool:
        """True in the first process of the run."""
        return os.getpid() == self.process

    def mark_training(self) -> None:
        """Create the marker file, from which the first process learns that this process trains a model."""
        if self.attended and not self.is_first:
            with suppress(OSError):
                open(self.marker, "x").close()

    def take_marker(self) -> bool:
        """Remove the marker file. Returns True in the first process if another process has trained a model."""
        with suppress(OSError):
            if self.is_first:
                os.unlink(self.marker)
                return True
        return False

    def report_no_model(self, elsewhere: bool) -> None:
        """Print, in the first process of ``ace-patch run``, that it attached no model.

        ``elsewhere`` is True if another process of the run has trained one: then only JSON output is printed."""
        if not self.is_first or not self.by_command:
            return
        if self.as_json:
            print(json.dumps({"adapter": self.adapter, "models_attached": 0, "spawned": elsewhere, "runs": []}))
        elif not elsewhere and not had_traceback() and self.settings["mode"] != "off":
            say(f"no model was attached: this process built none of {', '.join(self.models)}")


def had_traceback() -> bool:
    """Return True if an exception ended the script. Ctrl-C does not count."""
    return isinstance(getattr(sys, "last_value", None), Exception)


def inherit() -> None:
    """Join the run that is described in the environment, if any."""
    if SHIFT in os.environ:
        from .seeds import shift_seeds

        shift_seeds()
    request = RunRequest.from_environment()
    if request is not None:
        if request.is_first:
            request.attended = True
            request.write_to(os.environ)
        Activation(request)


class Activation:
    """Import finder that never finds a module, but starts ACE when upstream is about to be imported.

    It stays in ``sys.meta_path`` afterwards: if it were removed, the import in progress would skip the next finder.
    """

    current: ClassVar[Activation | None] = None
    """The activation of this process."""

    def __init__(self, request: RunRequest, name: str = "") -> None:
        Activation.current = self
        self.request = request
        self.name = name
        """``__name__`` of the patched script; empty for ``ace-patch run``."""
        modules = {path.partition(":")[0] for path in request.models}
        # Files of a checkout may be imported under any package name, so only the last part of names is compared.
        last_parts = {module.rpartition(".")[2] for module in modules}
        self.names = {*(last_parts if request.cloned else modules), *request.packages}
        self.started = False
        self.run: ProcessRun | None = None
        atexit.register(self._finish)
        if "torch" in sys.modules:  # upstream may be imported already
            self.start()
            return
        # This finder must come before the one that `install` adds, since an import may concern both.
        install()
        sys.meta_path.insert(0, self)
        if request.root is not None:
            STAND_INS.on_missing = self._handle_missing
            STAND_INS.install()

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> None:
        if not self.started and self._may_be_upstream(name):
            self.start()

    def _may_be_upstream(self, name: str) -> bool:
        return (name.rpartition(".")[2] if self.request.cloned else name) in self.names

    def _handle_missing(self, module: str, file: str) -> None:
        """Start ACE if a file of the checkout imports a module that is not installed, so that a stub can replace it."""
        if any(path(file).startswith(f"{self.request.root}{os.sep}") for path in (os.path.abspath, os.path.realpath)):
            self.start()

    def start(self) -> None:
        """Start ACE in this process, once."""
        if self.started:
            return
        self.started = True
        STAND_INS.on_missing = None
        try:
            from .process import ProcessRun

            self.run = ProcessRun(self.request)
        except AceError as error:
            exit_with(error, self.name)

    def _finish(self) -> None:
        """Print the summary of the run, or the reason why ACE was never started in this process."""
        if self.run is not None:
            self.run.summarise()
        if self.started:
            return
        files = [file_of(path) for path in self.request.models]
        for name, module in list(sys.modules.items()):
            own_file = any(is_file(getattr(module, "__file__", None), file) for file in files)
            if self._may_be_upstream(name) and (own_file or not self.request.cloned):
                say(f"{name} was imported by another import hook before ACE's, so nothing was attached")
                return
        if os.environ.get("RANK", "0") in ("", "0"):
            self.request.report_no_model(self.request.take_marker())


def exit_with(error: AceError, name: str) -> NoReturn:
    """Print an error and exit with code 2. If the patched file was imported as a module, raise the error instead."""
    if name not in ("", "__main__", "__mp_main__"):
        raise error
    say(" ".join(str(error).split()), anyway=True)
    raise SystemExit(2) from None
