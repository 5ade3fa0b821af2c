"""Import finders: callbacks that run after an import, and stubs for modules that are not installed.

A stub is visible to the files of one upstream only, and only if all other finders fail. Libraries probe for optional
packages and change their behaviour if they find one: PyTorch Geometric looks for torch_scatter, trainers for wandb.
"""

from __future__ import annotations

import linecache
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.machinery import ModuleSpec
from types import FrameType, ModuleType
from typing import Any

from ..contract.upstreams import StandIn
from ..plugins.claims import belongs, is_file

Callback = Callable[[ModuleType], None]


class ImportHook:
    """An import finder that asks the other finders for a module, and makes its loader run the callbacks afterwards."""

    def __init__(self) -> None:
        # The callbacks, each with the last part of a module's name ("net"), its name, and its file or "".
        self.watched: list[tuple[str, str, str, Callback]] = []
        self.searching: set[str] = set()  # modules that the other finders search for, to prevent endless recursion

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        last_parts = {last for last, _, _, _ in self.watched}  # to skip all other imports quickly
        if name.rpartition(".")[2] not in last_parts or name in self.searching:
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
        execute(module)
        for callback in self._callbacks(module.__name__, getattr(module.__spec__, "origin", None)):
            callback(module)

    def _callbacks(self, name: str, origin: str | None) -> list[Callback]:
        return [call for _, known, file, call in self.watched if known == name or (file and is_file(origin, file))]


_HOOK = ImportHook()


def install() -> None:
    """Install the import hook."""
    if _HOOK not in sys.meta_path:
        sys.meta_path.insert(0, _HOOK)


def whenever_imported(callback: Callback, *, name: str = "", file: str = "") -> Callable[[], None]:
    """Call a function with every module that has this name or file, already imported or imported later.

    Args:
        callback: Called with the module after its code has run.
        name: Full name of the module.
        file: Path of the module's file relative to any root, for example "models/net.py".

    Returns:
        A function that stops the calls.
    """
    for module in find_imported(name=name, file=file):
        callback(module)
    module_path = name.replace(".", "/") or file.removesuffix(".py").removesuffix("/__init__")
    entry = (module_path.rpartition("/")[2], name, file, callback)
    _HOOK.watched.append(entry)
    install()

    def undo() -> None:
        _HOOK.watched.remove(entry)
        if not _HOOK.watched and _HOOK in sys.meta_path:
            sys.meta_path.remove(_HOOK)

    return undo


def find_imported(*, name: str = "", file: str = "") -> Iterator[ModuleType]:
    """Yield the modules of this name, or from this file, that are already imported."""
    for known, module in list(sys.modules.items()):
        try:
            spec = getattr(module, "__spec__", None)
        except Exception:
            continue  # some libraries put objects that are not modules into sys.modules
        fits = (name and known == name) or (file and is_file(getattr(spec, "origin", None), file))
        if fits and spec is not None and not getattr(spec, "_initializing", False):  # a module whose code has run
            yield module


class StandIns:
    """Import finder and loader of stubs for missing modules. It is at the end of ``sys.meta_path``."""

    def __init__(self) -> None:
        # Mapping from the files that identify an upstream to the stubs that this upstream may import.
        self.offered: dict[tuple[str, ...], Sequence[StandIn]] = {}
        self.active: set[str] = set()  # names of the stubs that were imported
        # Called with the name of each module that no other finder has found, and the importing file.
        self.on_missing: Callable[[str, str], None] | None = None

    def offer(self, stand_ins: Sequence[StandIn], files: tuple[str, ...]) -> None:
        """Let the upstream that has these files import these stubs and no others."""
        self.offered.pop(files, None)
        if stand_ins:
            self.offered[files] = stand_ins
            self.install()
        elif not self.offered and self.on_missing is None and self in sys.meta_path:
            sys.meta_path.remove(self)

    def install(self) -> None:
        if self not in sys.meta_path:
            sys.meta_path.append(self)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        importer, line = _find_import_statement()
        if self.on_missing is not None:
            self.on_missing(name, importer)
        for files, stand_ins in self.offered.items():
            for stand_in in stand_ins:
                if stand_in.name == name and belongs(importer, files) and not _is_optional(importer, line):
                    loader: Any = self
                    return ModuleSpec(name, loader, origin=f"stub of ace-plugins for {name}", loader_state=stand_in)
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module: ModuleType = spec.loader_state.make()
        self.active.add(spec.name)
        return module

    def exec_module(self, module: ModuleType) -> None:
        pass  # create_module has already filled the module


def _find_import_statement() -> tuple[str, int]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        ours = str(frame.f_globals.get("__name__")).startswith("ace_plugins.")
        # Skip code that is in no file ("<string>", "<frozen importlib._bootstrap>"): code in a file has called it.
        if not ours and not file.startswith("<") and os.path.basename(os.path.dirname(file)) != "importlib":
            return file, frame.f_lineno
        frame = frame.f_back
    return "", 0


def _is_optional(file: str, line: int) -> bool:
    """Return whether an import is in a ``try`` with an ``except``. The script can do without such a module."""
    import ast  # slow to import, and every patched script imports this module

    tree = ast.parse("".join(linecache.getlines(file)))
    tries = [node for node in ast.walk(tree) if isinstance(node, ast.Try) and node.handlers]
    return any(node.body[0].lineno <= line <= (node.body[-1].end_lineno or line) for node in tries)


STAND_INS = StandIns()
