"""Callbacks that run when a module is imported. The module is identified by its name, or by its file under any name."""

from __future__ import annotations

import sys
from functools import partial

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
