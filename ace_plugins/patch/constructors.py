"""patched: models of an upstream, built from now on, are attached when their constructor returns.

The class stays the class it is. Only its ``__init__`` is wrapped, in place, so it does not matter who imported
it before, under which name. A module that is not imported yet is met when it is. Classes of a checkout are found by
their file, since scripts import one file under several names.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping
from contextlib import AbstractContextManager
from types import ModuleType, TracebackType
from typing import Any

import wrapt
from torch import nn

from ..engine.attaching import attach, configured
from ..settings.config import Config
from ..contract.data import Upstream, file_of
from ..errors import AdapterError
from .imports import imported, when_imported
from ..plugins.registry import Plugin, registry
from ..engine.state import find
from .shims import apply_shims, offer_stand_ins, withdraw_stand_ins

_patches: dict[str, list[Patch]] = {}
"""Per model class ("module:Class") the patches in force; the last one counts."""
_hooked: set[tuple[str, bool]] = set()
_paths: weakref.WeakKeyDictionary[type, str] = weakref.WeakKeyDictionary()
"""Of the model classes that were met, what adapters call them."""
_wrapped: weakref.WeakSet[type] = weakref.WeakSet()
_watched: weakref.WeakSet[type] = weakref.WeakSet()


class Patch(AbstractContextManager["Patch"]):
    """A patch in force. Leave the ``with`` block, or call ``undo()``, to end it; attached models stay so."""

    def __init__(self, plugin: Plugin, settings: Mapping[str, Any], config: Config) -> None:
        self.plugin = plugin
        self.settings = dict(settings)
        self.config = config

    @property
    def upstream(self) -> Upstream:
        assert self.plugin.upstream is not None
        return self.plugin.upstream

    def undo(self) -> None:
        for patches in _patches.values():
            if self in patches:
                patches.remove(self)
        if not any(each.plugin is self.plugin for patches in _patches.values() for each in patches):
            withdraw_stand_ins(self.plugin)

    def __enter__(self) -> Patch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.undo()


def patched(name: str, **config: Any) -> Patch:
    """Attach every model of this upstream at its construction, from now on.

    A context manager, or a plain call that stays in force. Settings are checked now, not at the first model.
    """
    plugin = registry().adapter(name)
    settings = configured(plugin, config)
    patch = Patch(plugin, config, settings)
    if settings.shims:
        offer_stand_ins(plugin)
        if settings.device != "auto":
            apply_shims(plugin, settings.device)  # for models that are not ours to attach, too
    for path in patch.upstream.models:
        _patches.setdefault(path, []).append(patch)
    for path in patch.upstream.models:
        _watch(path, in_a_checkout=patch.upstream.checkout is not None)
    return patch


def _watch(path: str, *, in_a_checkout: bool) -> None:
    """Meet the module of this class: now where it is imported, and whenever it will be."""

    def met(module: ModuleType) -> None:
        if any(patch.upstream.holds(module, path) for patch in _patches.get(path, ())):
            _meet(module, path)

    where = {"file": file_of(path)} if in_a_checkout else {"name": path.partition(":")[0]}
    if (path, in_a_checkout) not in _hooked:
        _hooked.add((path, in_a_checkout))
        when_imported(met, **where)
    for module in imported(**where):
        if not in_a_checkout or _class_in(module, path) is not None:  # else it may still be running
            met(module)


def _meet(module: ModuleType, path: str) -> None:
    """A module that holds a patched class is there: wrap its constructor, once."""
    patch = _patches[path][-1]
    cls = _class_in(module, path)
    if cls is None:
        raise AdapterError(
            f"adapter {patch.plugin.name!r} expected class {path.partition(':')[2]} in {module.__name__} and found "
            "none: this version of the upstream does not fit"
        )
    if patch.config.shims:
        apply_shims(patch.plugin, patch.config.device)
    _paths[cls] = path
    _wrap(cls)
    # A subclass's own constructor goes on after upstream's returned: the model is born when it returns.
    _watch_subclasses(cls)
    for subclass in _subclasses(cls):
        _wrap(subclass)


def _class_in(module: ModuleType, path: str) -> type | None:
    found: Any = module
    for part in path.partition(":")[2].split("."):
        found = getattr(found, part, None)
    return found if isinstance(found, type) else None


def _wrap(cls: type) -> None:
    if cls not in _wrapped:
        _wrapped.add(cls)
        if "__init__" in vars(cls):
            wrapt.wrap_function_wrapper(cls, "__init__", _born)


def _subclasses(cls: type) -> list[type]:
    direct: list[type] = cls.__subclasses__()
    return [each for one in direct for each in (one, *_subclasses(one))]


def _watch_subclasses(cls: Any) -> None:
    """Wrap the constructors of classes that are derived later."""
    if cls in _watched:
        return
    _watched.add(cls)
    own = vars(cls).get("__init_subclass__")

    def init_subclass(subclass: Any, /, **options: Any) -> None:
        if own is not None:
            own.__get__(None, subclass)(**options)
        else:
            super(cls, subclass).__init_subclass__(**options)
        _wrap(subclass)

    cls.__init_subclass__ = classmethod(init_subclass)


class _UnderConstruction(threading.local):
    def __init__(self) -> None:
        self.models: set[int] = set()


_under_construction = _UnderConstruction()


def _born(init: Any, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Wrapper of ``__init__``: attaches when the outermost constructor of a model returns."""
    building = _under_construction.models
    if id(model) in building:
        init(*args, **kwargs)
        return
    building.add(id(model))
    try:
        init(*args, **kwargs)
    finally:
        building.discard(id(model))
    for base in type(model).__mro__:
        patches = _patches.get(_paths.get(base, ""))
        if patches and find(model) is None:
            attach(model, patches[-1].plugin.name, **patches[-1].settings)
            return
