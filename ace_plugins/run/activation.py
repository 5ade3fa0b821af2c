"""Prepare every process of a run, and start ACE in it when the script is about to import upstream.

All Python processes of a run import this module at start-up, also those that never train. So it must import neither
torch nor plugins. The environment variable ``ACE_RUN`` passes the run's settings from process to process.
"""

from __future__ import annotations

import atexit
import dataclasses
import errno
import json
import os
import random
import sys
import tempfile
from collections.abc import Callable, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from ..contract.upstreams import file_of
from ..errors import AceError
from ..output import say
from ..patch.imports import STAND_INS, install, whenever_imported
from ..plugins.claims import is_file

if TYPE_CHECKING:
    from .process import ProcessRun

VARIABLE = "ACE_RUN"
SHIFT = "ACE_SEED_SHIFT"  # environment variable: a number to add to every seed the script sets
LINKS = "ACE_LINKS"  # environment variable: a folder, in which links to files outside of it are read-only
SEEDS = 2**32  # larger seeds are taken modulo this number, because numpy does not accept them


@dataclass
class RunRequest:
    """Adapter, settings and checkout of a run. All processes of the run have the same request."""

    adapter: str
    settings: dict[str, Any]  # final value of every field of `Config`
    origins: dict[str, str]  # source, such as a file or an option, of each setting that is not at its default
    models: list[str]  # model classes of upstream, as "module:Class"
    packages: list[str]  # packages of upstream that need a shim before they can be imported
    cloned: bool  # True if upstream is a checkout, where classes are matched by file; False for an installed package
    root: str | None  # the checkout that contains the script, if any
    process: int  # process id of the first process of the run
    as_json: bool = False
    by_command: bool = False  # True if the run was started by ``ace-patch run``, not by a patched script
    # Path of a file that other processes create when they train. The first process deletes it, so the path stays empty
    # if the first process is not Python but a program such as sh.
    marker: str = ""

    @classmethod
    def from_environment(cls) -> RunRequest | None:
        """Read the request that this process was started with, if any."""
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
        return os.getpid() == self.process

    def choose_marker(self) -> None:
        """Choose the path of the marker file, and pass it on to the processes that this process starts."""
        self.marker = os.path.join(tempfile.gettempdir(), f"ace-{os.getpid()}-{os.urandom(8).hex()}")
        self.write_to(os.environ)

    def mark_training(self) -> None:
        """Create the marker file, if this is not the first process of the run."""
        if self.marker and not self.is_first:
            with suppress(OSError):
                open(self.marker, "x").close()

    def take_marker(self) -> bool:
        """Delete the marker file. Returns True in the first process if another process has trained a model."""
        with suppress(OSError):
            if self.is_first:
                os.unlink(self.marker)
                return True
        return False

    def report_no_model(self) -> None:
        """Print, in the first process of ``ace-patch run``, that this process attached no model."""
        elsewhere = self.take_marker()
        if not self.is_first or not self.by_command:
            return
        if self.as_json:
            print(json.dumps({"adapter": self.adapter, "models_attached": 0, "spawned": elsewhere, "runs": []}))
        elif not elsewhere and self.settings["mode"] != "off":
            when = " before the error" if had_traceback() else ""
            say(
                f"no model was attached{when}: this process built none of {', '.join(self.models)}; if the script "
                f"trains another model, {self.adapter} is the wrong adapter: 'ace-patch list' shows the others"
            )


def had_traceback() -> bool:
    """Return True if an exception ended the script. Ctrl-C does not count."""
    return isinstance(getattr(sys, "last_value", None), Exception)


def inherit() -> None:
    """Join the run that is described in the environment, if any."""
    if LINKS in os.environ:
        sys.addaudithook(partial(_refuse_links, os.path.join(os.environ[LINKS], "")))
    if SHIFT in os.environ:
        shift = SeedShift(int(os.environ[SHIFT]))
        shift.patch(random, "seed")
        whenever_imported(lambda numpy: shift.patch(numpy.random, "seed"), name="numpy")
        whenever_imported(shift.patch_torch, name="torch")
    if request := RunRequest.from_environment():
        if request.is_first:
            request.choose_marker()
        Activation(request)


def _refuse_links(folder: str, event: str, arguments: tuple[Any, ...]) -> None:
    """Audit hook of a comparison's runs: raises a PermissionError if Python writes through a link out of ``folder``."""
    if event not in ("open", "os.truncate") or not isinstance(arguments[0], (str, bytes)):
        return
    path = os.fsdecode(arguments[0])
    if (event == "os.truncate" or arguments[2] & (os.O_WRONLY | os.O_RDWR)) and os.path.islink(path):
        of_link, of_data = (os.path.realpath(each) + os.sep for each in (os.path.dirname(path), path))
        if of_link.startswith(folder) and not of_data.startswith(folder):
            do = "is a link to data that all runs share: let the script write another file"
            raise PermissionError(errno.EACCES, do, path)


class SeedShift:
    """Adds a number to every seed that a script sets, for comparisons of scripts that have no option for the seed.

    A script that sets no seed is seeded with the number, so that it is reproducible too."""

    def __init__(self, by: int) -> None:
        self.by = by
        self.inside = False  # True during a call to a seed function: functions that it calls must not shift again

    def patch(self, module: Any, *names: str) -> None:
        """Seed a module with the shift, and replace its seed functions by ones that add the shift."""
        for name in names:
            seed = getattr(module, name)
            seed(self.by % SEEDS)
            setattr(module, name, partial(self._call, seed))

    def patch_torch(self, torch: ModuleType) -> None:
        self.patch(torch, "manual_seed")
        torch.random.manual_seed = torch.manual_seed
        self.patch(torch.cuda, "manual_seed", "manual_seed_all")

    def _call(self, seed: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        value, *more = (*args, *kwargs.values(), None)
        if self.inside or not hasattr(value, "__index__"):
            return seed(*args, **kwargs)
        self.inside = True
        try:
            return seed((int(value) + self.by) % SEEDS, *more[:-1])
        finally:
            self.inside = False


class Activation:
    """Import finder that never finds a module, but starts ACE when upstream is about to be imported."""

    current: ClassVar[Activation | None] = None  # the activation of this process

    def __init__(self, request: RunRequest, name: str = "") -> None:
        Activation.current = self
        self.request = request
        self.name = name  # ``__name__`` of the patched script; empty for ``ace-patch run``
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
        # This finder must come before the one that `install` adds, since an import may concern both. It is never
        # removed, because the import in progress would skip the next finder.
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
                do = "call attach(model) in the script instead"
                say(f"{name} was imported by another import hook, so ACE was not attached: {do}")
                return
        if os.environ.get("RANK", "0") in ("", "0"):
            self.request.report_no_model()


def exit_with(error: AceError, name: str) -> NoReturn:
    """Print an error and exit with code 2. If the patched file was imported as a module, raise the error instead."""
    if name not in ("", "__main__", "__mp_main__"):
        raise error
    say(" ".join(str(error).split()), anyway=True)
    raise SystemExit(2) from None
