"""Knowing when a module is imported: by its name, or by its file whatever name it is imported under."""

from __future__ import annotations

import sys

from ..plugins.claims import is_file

TYPE_CHECKING = False  # as typing has it, without waiting for typing: scripts wait for this module
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

    Met = Callable[[ModuleType], None]


class Watch:
    """Finds nothing itself: asks the other finders, and has their loader tell when the module has run."""

    def __init__(self) -> None:
        self.names: dict[str, list[Met]] = {}
        self.files: dict[str, list[Met]] = {}
        """By the path of the file relative to some root: "models/net.py"."""
        self.stems: set[str] = set()
        """Last parts of the names that can matter, for a quick no to all others."""
        self.asking: set[str] = set()
        """What the other finders are being asked for: they may ask in turn. Other threads wait for the import lock."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name.rpartition(".")[2] not in self.stems or name in self.asking:
            return None
        self.asking.add(name)
        try:
            others = [finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec")]
            answers: Iterator[ModuleSpec | None] = (finder.find_spec(name, path, target) for finder in others)
            spec = next(filter(None, answers), None)
        finally:
            self.asking.discard(name)
        if spec is not None and spec.loader is not None and self._callbacks(name, spec.origin):
            _tell_after(spec.loader, self)
        return spec

    def _callbacks(self, name: str, file: str | None) -> list[Met]:
        by_file = [met for known, mets in self.files.items() if is_file(file, known) for met in mets]
        return [*self.names.get(name, ()), *by_file]

    def met(self, module: ModuleType) -> None:
        spec = getattr(module, "__spec__", None)
        for met in self._callbacks(module.__name__, getattr(spec, "origin", None)):
            met(module)


_WATCH = Watch()


def install() -> None:
    """Watch imports from now on."""
    if _WATCH not in sys.meta_path:
        sys.meta_path.insert(0, _WATCH)


def when_imported(met: Met, *, name: str = "", file: str = "") -> None:
    """Call ``met(module)`` after the module of that name, or any module from that file, will have been imported.

    A file is named relative to a root: "models/net.py".
    """
    install()
    if name:
        _WATCH.names.setdefault(name, []).append(met)
        _WATCH.stems.add(name.rpartition(".")[2])
    if file:
        _WATCH.files.setdefault(file, []).append(met)
        _WATCH.stems.add(file.removesuffix(".py").removesuffix("/__init__").rpartition("/")[2])


def whenever_imported(met: Met, *, name: str = "", file: str = "") -> None:
    """Call ``met(module)`` for the modules of that name or file that are there, and for those that will be."""
    when_imported(met, name=name, file=file)
    for module in imported(name=name, file=file):
        met(module)


def imported(*, name: str = "", file: str = "") -> Iterator[ModuleType]:
    """The modules of that name, or from that file, that are there already."""
    for known, module in list(sys.modules.items()):
        try:
            spec = getattr(module, "__spec__", None)
        except Exception:
            continue  # no module: there are libraries that put other things there
        if spec is None or getattr(spec, "_initializing", False):
            continue  # still running
        if (name and known == name) or (file and is_file(getattr(spec, "origin", None), file)):
            yield module


def _tell_after(loader: Any, watch: Watch) -> None:
    """Have this module's own loader tell. It stays the loader it is: inspect and pickle ask for its type."""
    if not isinstance(loader.exec_module, _Telling):  # some loaders serve many modules, as that of a zip file
        loader.exec_module = _Telling(loader.exec_module, watch)


class _Telling:
    def __init__(self, execute: Met, watch: Watch) -> None:
        self.execute = execute
        self.watch = watch

    def __call__(self, module: ModuleType) -> None:
        self.execute(module)
        self.watch.met(module)
