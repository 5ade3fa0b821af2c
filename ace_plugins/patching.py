"""patched: models of an upstream, built from now on, are attached when their constructor returns.

The class stays the class it is. Only its ``__init__`` is wrapped, in place, so it does not matter who imported
it before, under which name. A module that is not imported yet is met when it is.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Mapping
from contextlib import AbstractContextManager
from types import ModuleType, TracebackType
from typing import Any

import wrapt
from torch import nn

from .attaching import attach, configured
from .errors import AdapterError
from .plugins import Plugin, registry
from .relaxation import find
from .shims import apply_shims

_patches: dict[str, list[Patch]] = {}
"""Per model class ("module:Class") the patches in force; the last one counts."""
_hooked: set[str] = set()
_wrapped: weakref.WeakSet[type] = weakref.WeakSet()


class Patch(AbstractContextManager["Patch"]):
    """A patch in force. Leave the ``with`` block, or call ``undo()``, to end it; attached models stay so."""

    def __init__(self, plugin: Plugin, settings: Mapping[str, Any]) -> None:
        self.plugin = plugin
        self.settings = dict(settings)
        self.models: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        """What was attached under this patch and is still alive."""

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
        if cls not in _wrapped:
            _wrapped.add(cls)
            wrapt.wrap_function_wrapper(cls, "__init__", _Born(path))


class _Born:
    """Wrapper of a model's ``__init__``."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __call__(self, init: Any, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        init(*args, **kwargs)
        patches = _patches[self.path]
        if patches and find(model) is None:
            patch = patches[-1]
            attach(model, patch.plugin.name, **patch.settings)
            patch.models.add(model)
