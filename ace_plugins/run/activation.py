"""What happens in a script that carries the marked line: it trains with ACE, as its ``ace.toml`` says.

The line is the script's first import, so this must be light. Reading the settings comes first; all that needs torch
waits until the script is about to import a module of upstream.
"""

from __future__ import annotations

import os
import sys
from itertools import islice
from pathlib import Path

from ..telling import say
from ..errors import AceError
from ..patch.imports import install
from ..settings.file import NAME, SettingsFile, unchecked
from ..settings.sources import Sources
from ..patch.stand_ins import STAND_INS

TYPE_CHECKING = False  # as typing has it, without waiting for typing: scripts wait for this module
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import FrameType, ModuleType
    from typing import Any, NoReturn


MANY = 500
"""Entries of a folder past which it holds data, not modules."""


def activate(importer: FrameType) -> None:
    """Train the models of the script that imports this, as the ``ace.toml`` beside it says."""
    already = sys.modules.get(f"{__package__}.running")
    if already is not None and already.running() is not None:
        return  # 'ace-patch run' of a marked script, or a process that a marked script has started: as these say
    scope = importer.f_globals
    name = str(scope.get("__name__"))
    try:
        activation = Activation(_settings_beside(scope.get("__file__")))
    except AceError as error:
        _give_up(error, name)
    activation.wait(name)


class Activation:
    """The settings of this process, and what they will start."""

    def __init__(self, file: SettingsFile) -> None:
        self.adapter = file.adapter
        self.root = file.path.parent
        self.sources = Sources(file)
        self.sources.checked(None)  # what can be told without the adapter is told before torch is waited for
        self.sources.tell_notices()
        self.started = False

    def wait(self, name: str) -> None:
        """Start when the script imports one of upstream's modules, or one that upstream needs and that is missing."""

        def start() -> None:
            if not self.started:
                self.started = True
                STAND_INS.asked = None
                try:
                    self.start()
                except AceError as error:
                    _give_up(error, name)

        def missing(module: str, file: str) -> None:
            if any(path(file).startswith(f"{self.root}{os.sep}") for path in (os.path.abspath, os.path.realpath)):
                start()

        if "torch" in sys.modules:  # the line is not the first: upstream may be there already
            start()
            return
        # Before the trigger: the import that sets it off may be the one to watch.
        install()
        sys.meta_path.insert(0, _Trigger(_modules_in(self.root) | {self.root.name}, start))
        STAND_INS.asked = missing
        STAND_INS.install()
        import atexit

        atexit.register(self.check)

    def check(self) -> None:
        """At the end: whether modules of upstream were imported past us."""
        if self.started:
            return
        inside = f"{self.root}{os.sep}"
        for name, module in list(sys.modules.items()):
            file = getattr(module, "__file__", None)
            if isinstance(file, str) and file.startswith(inside) and name not in ("__main__", "__mp_main__"):
                say(f"{name} was imported past ACE, so nothing was attached: another import hook comes before it")
                return

    def start(self) -> None:
        from ..plugins.registry import registry
        from .running import PatchedRun

        if self.adapter not in registry().plugins:
            raise AceError(
                f"adapter {self.adapter!r}, which {self.sources.where('adapter')} names, is not installed in this "
                f"environment: install it, or run 'ace-patch revert'; 'ace-patch list' shows what there is"
            )
        plugin = registry().adapter(self.adapter)
        self.sources.checked(plugin.presets)
        PatchedRun(plugin.name, self.sources.settings, root=self.root).at_exit()


class _Trigger:
    """Finds nothing: tells, before it is imported, that a module of upstream is asked for."""

    def __init__(self, modules: frozenset[str], tell: Callable[[], None]) -> None:
        self.modules = modules
        self.tell = tell

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        # It stays in sys.meta_path: the import that is going on would skip a finder if the list became shorter.
        if self.modules and name.partition(".")[0] in self.modules:
            self.modules = frozenset()
            self.tell()
        return None


def _modules_in(folder: str | Path, depth: int = 3) -> frozenset[str]:
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


def _settings_beside(script: Any) -> SettingsFile:
    """The ``ace.toml`` of the folder the script is in, or of one above it."""
    if not isinstance(script, str):
        raise AceError(f"no script to activate ACE for: expected import ace_plugins.activate in a file beside {NAME}")
    starts = dict.fromkeys((Path(script).absolute().parent, Path(script).resolve().parent))
    for start in starts:
        for folder in (start, *start.parents):
            if (folder / NAME).is_file():
                return unchecked(folder / NAME)
    raise AceError(
        f"{script} was patched by ace-patch, but there is no {NAME} beside it: run 'ace-patch revert' in its folder to "
        "take the marked line out, or patch it again"
    )


def _give_up(error: AceError, name: str) -> NoReturn:
    """Before anything was changed. A script ends with one line; other importers get the exception."""
    if name not in ("__main__", "__mp_main__"):
        raise error
    say(" ".join(str(error).split()), anyway=True)
    raise SystemExit(2) from None


def importing_frame() -> FrameType:
    """The frame of the import statement that brought in the caller's module."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith("<frozen importlib"):
        frame = frame.f_back
    assert frame is not None
    return frame
