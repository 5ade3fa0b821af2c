"""What happens in a script that carries the marked line: it trains with ACE, as its ``ace.toml`` says.

The line is the script's first import, so this must be light. Reading the settings comes first; all that needs torch
waits until the script is about to import a module of upstream.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from .environment import quiet, settings_in, variable
from .errors import AceError
from .imports import install
from .settings_file import NAME, SettingsFile, checked, load
from .stand_ins import STAND_INS

TYPE_CHECKING = False  # as typing has it, without waiting for typing: scripts wait for this module
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import FrameType, ModuleType
    from typing import Any, NoReturn


def activate(importer: FrameType) -> None:
    """Train the models of the script that imports this, as the ``ace.toml`` beside it says."""
    scope = importer.f_globals
    script = scope.get("__file__")
    name = str(scope.get("__name__"))
    try:
        activation = Activation(_settings_beside(script))
    except AceError as error:
        _give_up(error, name)
    activation.wait(name)


class Activation:
    """The settings of this process, and what they will start."""

    def __init__(self, file: SettingsFile) -> None:
        self.file = file
        self.root = file.path.parent
        environment, notices = settings_in(os.environ)
        self.settings = {**file.settings, **environment}
        self.started = False

        def where(key: str) -> str:
            return variable(key) if key in environment else file.where(key)

        self.where: Callable[[str], str] = where
        if environment:
            checked({key: value for key, value in self.settings.items() if key != "preset"}, None, where)
        if not quiet():
            for notice in notices:
                print(f"ace: {notice}", file=sys.stderr)

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
            if os.path.realpath(file).startswith(str(self.root.resolve()) + os.sep):
                start()

        if "torch" in sys.modules:  # the line is not the first: upstream may be there already
            start()
            return
        # Before the trigger: the import that sets it off may be the one to watch.
        install()
        sys.meta_path.insert(0, _Trigger(_modules_in(self.root), start))
        STAND_INS.asked = missing
        STAND_INS.install()

    def start(self) -> None:
        from .plugins import registry
        from .running import PatchedRun, running

        if running() is not None:
            return  # 'ace-patch run' of a marked script: what the command says goes
        plugin = registry().adapter(self.file.adapter)
        if plugin.has("ace_preset"):
            checked(self.settings, plugin.call("ace_preset"), self.where)
        PatchedRun(plugin.name, self.settings, root=self.root).at_exit()


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


def _modules_in(root: Path) -> frozenset[str]:
    """First parts of the names under which files of this folder can be imported."""
    found: set[str] = set()
    for folder in (root, *(each for each in root.iterdir() if each.is_dir() and each.name.isidentifier())):
        try:
            found.update(each.stem for each in folder.iterdir() if each.suffix == ".py")
        except OSError:
            continue
        found.add(folder.name)
    return frozenset(found)


def _settings_beside(script: Any) -> SettingsFile:
    """The ``ace.toml`` of the folder the script is in, or of one above it."""
    if not isinstance(script, str):
        raise AceError(f"no script to activate ACE for: expected import ace_plugins.activate in a file beside {NAME}")
    starts = dict.fromkeys((Path(script).absolute().parent, Path(script).resolve().parent))
    for start in starts:
        for folder in (start, *start.parents):
            if (folder / NAME).is_file():
                return load(folder / NAME)
    raise AceError(
        f"{script} was patched by ace-patch, but there is no {NAME} beside it: run 'ace-patch revert' in its folder to "
        "take the marked line out, or patch it again"
    )


def _give_up(error: AceError, name: str) -> NoReturn:
    """Before anything was changed. A script ends with one line; other importers get the exception."""
    if name not in ("__main__", "__mp_main__"):
        raise error
    print(f"ace: {' '.join(str(error).split())}", file=sys.stderr)
    raise SystemExit(2) from None


def importing_frame() -> FrameType:
    """The frame of the import statement that brought in the caller's module."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith("<frozen importlib"):
        frame = frame.f_back
    assert frame is not None
    return frame
