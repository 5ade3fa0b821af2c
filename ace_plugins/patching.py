"""patched: models of an upstream, built from now on, are attached when their constructor returns.

The class stays the class it is. Only its ``__init__`` is wrapped, in place, so it does not matter who imported
it before, under which name. A module that is not imported yet is met when it is.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Mapping
from contextlib import AbstractContextManager
from types import ModuleType, TracebackType
from typing import Any

import wrapt
from torch import nn

from .attaching import attach, configured
from .contract import class_path
from .errors import AdapterError
from .plugins import Plugin, registry
from .relaxation import find
from .shims import apply_shims

_patches: dict[str, list[Patch]] = {}
"""Per model class ("module:Class") the patches in force; the last one counts."""
_hooked: set[str] = set()
_wrapped: weakref.WeakSet[type] = weakref.WeakSet()
_watched: weakref.WeakSet[type] = weakref.WeakSet()


class Patch(AbstractContextManager["Patch"]):
    """A patch in force. Leave the ``with`` block, or call ``undo()``, to end it; attached models stay so."""

    def __init__(self, plugin: Plugin, settings: Mapping[str, Any]) -> None:
        self.plugin = plugin
        self.settings = dict(settings)

    def undo(self) -> None:
        for patches in _patches.values():
            if self in patches:
                patches.remove(self)

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
    configured(plugin, config)
    assert plugin.upstream is not None
    patch = Patch(plugin, config)
    for path in plugin.upstream.models:
        _patches.setdefault(path, []).append(patch)
        module = path.partition(":")[0]
        if module in sys.modules:
            _meet(sys.modules[module])
        elif module not in _hooked:
            _hooked.add(module)
            wrapt.register_post_import_hook(_meet, module)
    return patch


def _meet(module: ModuleType) -> None:
    """A module that holds patched classes is there: wrap their constructors, once."""
    for path, patches in _patches.items():
        name, _, attribute = path.partition(":")
        if name != module.__name__ or not patches:
            continue
        cls: Any = module
        for part in attribute.split("."):
            cls = getattr(cls, part, None)
        plugin = patches[-1].plugin
        if not isinstance(cls, type):
            raise AdapterError(
                f"adapter {plugin.name!r} expected class {attribute} in {module.__name__} and found none: this "
                "version of the upstream does not fit"
            )
        apply_shims(plugin)
        _wrap(cls)
        # A subclass's own constructor goes on after upstream's returned: the model is born when it returns.
        _watch_subclasses(cls)
        for subclass in _subclasses(cls):
            _wrap(subclass)


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
        patches = _patches.get(class_path(base))
        if patches and find(model) is None:
            attach(model, patches[-1].plugin.name, **patches[-1].settings)
            return
