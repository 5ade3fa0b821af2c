"""Import finders: callbacks that run after an import, and stubs for modules that are not installed.

For a callback, a module is identified by its name, or by its file under any name.

A stub is visible to the files of one upstream only, and only if all other finders fail. Libraries probe for optional
packages and change their behaviour if they find one: PyTorch Geometric looks for torch_scatter, trainers for wandb.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from importlib.machinery import ModuleSpec

from ..plugins.claims import belongs, is_file

TYPE_CHECKING = False  # importing typing would slow down every script that is patched
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import FrameType, ModuleType
    from typing import Any

    from ..contract.upstreams import StandIn

    Callback = Callable[[ModuleType], None]


class ImportHook:
    """An import finder that asks the other finders for a module, and makes its loader run the callbacks afterwards."""

    def __init__(self) -> None:
        self.watched: list[tuple[str, str, Callback]] = []
        """The callbacks, each with a module's name, or with its file relative to any root ("models/net.py")."""
        self.stems: set[str] = set()
        """Last parts ("net") of the module names that can have callbacks, to skip all other imports quickly."""
        self.searching: set[str] = set()
        """Modules that the other finders are searching for now. It prevents endless recursion if they import them."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name.rpartition(".")[2] not in self.stems or name in self.searching:
            return None
        self.searching.add(name)
        try:
            others = [finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec")]
            found: Iterator[ModuleSpec | None] = (finder.find_spec(name, path, target) for finder in others)
            spec = next(filter(None, found), None)
        finally:
            self.searching.discard(name)
        if spec is not None and spec.loader is not None and self._callbacks(name, spec.origin):
            loader: Any = spec.loader  # only its method is replaced, since inspect and pickle look at its type
            if not isinstance(loader.exec_module, partial):  # a loader of zip files may be wrapped already
                loader.exec_module = partial(self._execute, loader.exec_module)
        return spec

    def _execute(self, execute: Callback, module: ModuleType) -> None:
        """Run a module's code, and then the callbacks."""
        execute(module)
        for callback in self._callbacks(module.__name__, getattr(module.__spec__, "origin", None)):
            callback(module)

    def _callbacks(self, name: str, origin: str | None) -> list[Callback]:
        return [call for known, file, call in self.watched if known == name or (file and is_file(origin, file))]

    def update(self) -> None:
        """Install this hook if there are callbacks, otherwise remove it."""
        names = {name.rpartition(".")[2] for name, _, _ in self.watched}
        files = (file.removesuffix(".py").removesuffix("/__init__") for _, file, _ in self.watched)
        self.stems = names | {file.rpartition("/")[2] for file in files}
        if self.watched:
            install()
        elif self in sys.meta_path:
            sys.meta_path.remove(self)


_HOOK = ImportHook()


def install() -> None:
    """Install the import hook."""
    if _HOOK not in sys.meta_path:
        sys.meta_path.insert(0, _HOOK)


def add_callback(callback: Callback, *, name: str = "", file: str = "") -> Callable[[], None]:
    """Register a function to be called with every module of this name, or from this file, that is imported later.

    Returns:
        A function that cancels the registration. Cancelling the last registration also removes the import hook.
    """
    entry = (name, file, callback)
    _HOOK.watched.append(entry)
    _HOOK.update()

    def undo() -> None:
        _HOOK.watched.remove(entry)
        _HOOK.update()

    return undo


def whenever_imported(callback: Callback, *, name: str = "", file: str = "") -> None:
    """Call a function with every module that has this name or file, already imported or imported later.

    Args:
        callback: Called with the module after its code has run.
        name: Full name of the module.
        file: Path of the module's file relative to any root, for example "models/net.py".
    """
    add_callback(callback, name=name, file=file)
    for module in find_imported(name=name, file=file):
        callback(module)


def find_imported(*, name: str = "", file: str = "") -> Iterator[ModuleType]:
    """Yield the modules of this name, or from this file, that are already imported."""
    for known, module in list(sys.modules.items()):
        try:
            spec = getattr(module, "__spec__", None)
        except Exception:
            continue  # some libraries put objects that are not modules into sys.modules
        if spec is None or getattr(spec, "_initializing", False):
            continue  # not a module, or its code is still running
        if (name and known == name) or (file and is_file(getattr(spec, "origin", None), file)):
            yield module


class StandIns:
    """Import finder and loader of stubs for missing modules. It is at the end of ``sys.meta_path``."""

    def __init__(self) -> None:
        self.offered: dict[str, list[tuple[StandIn, tuple[str, ...]]]] = {}
        """Mapping from a module's name to its stubs, one per upstream, each with files that identify the upstream."""
        self.active: dict[str, StandIn] = {}
        """Mapping from the name of each stub that was imported to the stub."""
        self.on_missing: Callable[[str, str], None] | None = None
        """Function to call with the name of each module that no other finder has found, and the importing file."""

    def offer(self, stand_in: StandIn, files: tuple[str, ...]) -> None:
        """Make a stub importable from upstreams that have these files."""
        self.withdraw(stand_in)
        self.offered.setdefault(stand_in.name, []).append((stand_in, files))
        self.install()

    def withdraw(self, stand_in: StandIn) -> None:
        """Make a stub unavailable for new imports."""
        others = [each for each in self.offered.pop(stand_in.name, []) if each[0].reason != stand_in.reason]
        if others:
            self.offered[stand_in.name] = others
        if not self.offered and self.on_missing is None and self in sys.meta_path:
            sys.meta_path.remove(self)

    def install(self) -> None:
        """Install the finder."""
        if self not in sys.meta_path:
            sys.meta_path.append(self)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        importer, line = _find_import_statement()
        if self.on_missing is not None:
            self.on_missing(name, importer)
        for stand_in, files in self.offered.get(name, ()):
            if belongs(importer, files) and not is_optional(importer, line):
                loader: Any = self
                return ModuleSpec(name, loader, origin=f"stub of ace-plugins for {name}", loader_state=stand_in)
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        stand_in: StandIn = spec.loader_state
        module = stand_in.make()
        self.active[spec.name] = stand_in
        return module

    def exec_module(self, module: ModuleType) -> None:
        pass  # create_module has already filled the module


def _find_import_statement() -> tuple[str, int]:
    """Return the file and line of the import statement that is being executed."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        ours = str(frame.f_globals.get("__name__")).startswith("ace_plugins.")
        # Skip code that is in no file ("<string>", "<frozen importlib._bootstrap>"): code in a file has called it.
        if not ours and not file.startswith("<") and os.path.basename(os.path.dirname(file)) != "importlib":
            return file, frame.f_lineno
        frame = frame.f_back
    return "", 0


def is_optional(file: str, line: int) -> bool:
    """Return whether an import is in a ``try`` that catches an ImportError. Such an import gets no stub."""
    import ast  # slow to import, and every patched script imports this module

    try:
        with open(file, "rb") as source:
            tree = ast.parse(source.read())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return False
    caught = {"ImportError", "ModuleNotFoundError", "Exception", "BaseException"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Try) and node.body[0].lineno <= line <= (node.body[-1].end_lineno or line):
            for handler in node.handlers:
                types = ast.walk(handler.type) if handler.type else ()
                if handler.type is None or caught & {each.id for each in types if isinstance(each, ast.Name)}:
                    return True
    return False


STAND_INS = StandIns()
