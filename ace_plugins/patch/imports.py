"""Callbacks that run when a module is imported. The module is identified by its name, or by its file under any name."""

from __future__ import annotations

import sys

from ..plugins.claims import is_file

TYPE_CHECKING = False  # importing typing would slow down every script that is patched
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

    Callback = Callable[[ModuleType], None]


class ImportHook:
    """An import finder that asks the other finders for a module, and makes its loader run the callbacks afterwards."""

    def __init__(self) -> None:
        self.names: dict[str, list[Callback]] = {}
        self.files: dict[str, list[Callback]] = {}
        """Mapping from a file's path relative to any root ("models/net.py") to the callbacks for that file."""
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
            if not isinstance(loader.exec_module, _Execute):  # a loader of zip files may be wrapped already
                loader.exec_module = _Execute(loader.exec_module, self)
        return spec

    def update_stems(self) -> None:
        names = {name.rpartition(".")[2] for name in self.names}
        files = {file.removesuffix(".py").removesuffix("/__init__").rpartition("/")[2] for file in self.files}
        self.stems = names | files

    def _callbacks(self, name: str, file: str | None) -> list[Callback]:
        by_file = [each for known, callbacks in self.files.items() if is_file(file, known) for each in callbacks]
        return [*self.names.get(name, ()), *by_file]

    def run_callbacks(self, module: ModuleType) -> None:
        spec = getattr(module, "__spec__", None)
        for callback in self._callbacks(module.__name__, getattr(spec, "origin", None)):
            callback(module)


class _Execute:
    """Replacement for a loader's ``exec_module`` that runs the callbacks after the module's code."""

    def __init__(self, execute: Callback, hook: ImportHook) -> None:
        self.execute = execute
        self.hook = hook

    def __call__(self, module: ModuleType) -> None:
        self.execute(module)
        self.hook.run_callbacks(module)


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
    install()
    if name:
        _HOOK.names.setdefault(name, []).append(callback)
    if file:
        _HOOK.files.setdefault(file, []).append(callback)
    _HOOK.update_stems()

    def undo() -> None:
        for known, key in ((_HOOK.names, name), (_HOOK.files, file)):
            known[key] = [each for each in known.get(key, ()) if each is not callback]
            if not known[key]:
                del known[key]
        _HOOK.update_stems()
        if not _HOOK.stems and _HOOK in sys.meta_path:
            sys.meta_path.remove(_HOOK)

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
