"""attach: ACE on a model. patched: on every model of an upstream, when its constructor returns.

The class stays the class it is. Only its ``__init__`` is wrapped, in place, so it does not matter who imported it
before, under which name. A module that is not imported yet is met when it is. Classes of a checkout are found by their
file, since scripts import one file under several names.
"""

from __future__ import annotations

import threading
import weakref
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any, TypeVar

import wrapt
from torch import nn

from ..contract.upstreams import Upstream, file_of
from ..engine.attach import prepare, put_on
from ..engine.state import find
from ..errors import AdapterError, AttachError
from ..plugins.claims import class_in, holds
from ..plugins.plugin import Plugin
from ..plugins.registry import registry
from ..settings.config import Config
from .imports import imported, when_imported
from .shims import REPAIRS

M = TypeVar("M", bound=nn.Module)


def attach(model: M, adapter: str | None = None, **settings: Any) -> M:
    """Put ACE on a model, in place, and return it.

    ``adapter`` is the name of an adapter; without it the adapters are asked who claims the model. ``settings`` are
    fields of `Config`, and ``preset`` for a named set of the adapter's. Everything is checked before anything is
    changed. In mode "off" the model stays as it is, down to its parameters.
    """
    if not isinstance(model, nn.Module):
        raise AttachError(f"cannot attach to {type(model).__name__}: expected a torch.nn.Module")
    plugin = registry().adapter(adapter) if adapter is not None else registry().claiming(model)
    return attach_with(model, plugin, plugin.configure(settings))


def attach_with(model: M, plugin: Plugin, config: Config) -> M:
    """`attach`, with the adapter and the settings at hand, and the repairs that its upstream needs."""
    ace = prepare(model, plugin, config)
    if config.shims:
        REPAIRS.apply(plugin, config.device)
    if ace is not None:
        put_on(ace, model)
    return model


class Patch(AbstractContextManager["Patch"]):
    """A patch in force. Leave the ``with`` block, or call ``undo()``, to end it; attached models stay so."""

    def __init__(self, plugin: Plugin, config: Config) -> None:
        self.plugin = plugin
        self.config = config

    @property
    def upstream(self) -> Upstream:
        return self.plugin.patches

    def undo(self) -> None:
        CONSTRUCTORS.end(self)

    def __exit__(self, *error: object) -> None:
        self.undo()


def patched(name: str, **settings: Any) -> Patch:
    """Attach every model of this upstream at its construction, from now on.

    A context manager, or a plain call that stays in force. Settings are checked now, not at the first model.
    """
    plugin = registry().adapter(name)
    return patch_models(plugin, plugin.configure(settings))


def patch_models(plugin: Plugin, config: Config) -> Patch:
    """`patched`, with the adapter and the settings at hand."""
    if not plugin.patches.models:
        raise AdapterError(
            f"adapter {plugin.name!r} recognises models by looking at them and names no class to patch; call "
            f"attach(model, adapter={plugin.name!r}) where the model is built"
        )
    patch = Patch(plugin, config)
    if config.shims:
        REPAIRS.offer_stand_ins(plugin)
        REPAIRS.apply(plugin, config.device, importing=True)
        if config.device != "auto":
            REPAIRS.apply(plugin, config.device)  # for models that are not ours to attach, too
    CONSTRUCTORS.begin(patch)
    return patch


class _UnderConstruction(threading.local):
    def __init__(self) -> None:
        self.models: set[int] = set()


class Constructors:
    """The constructors that were wrapped in this process, and the patches in force."""

    def __init__(self) -> None:
        self.patches: dict[str, list[Patch]] = {}
        """Per model class ("module:Class") the patches in force; the last one counts."""
        self.hooked: set[tuple[str, bool]] = set()
        """Model classes whose modules are watched for, by name or by file."""
        self.paths: weakref.WeakKeyDictionary[type, str] = weakref.WeakKeyDictionary()
        """Of the model classes that were met, what adapters call them."""
        self.wrapped: weakref.WeakSet[type] = weakref.WeakSet()
        self.building = _UnderConstruction()

    def begin(self, patch: Patch) -> None:
        for path in patch.upstream.models:
            self.patches.setdefault(path, []).append(patch)
        for path in patch.upstream.models:
            self._watch(path, in_a_checkout=patch.upstream.checkout is not None)

    def end(self, patch: Patch) -> None:
        for patches in self.patches.values():
            if patch in patches:
                patches.remove(patch)
        if not any(each.plugin is patch.plugin for patches in self.patches.values() for each in patches):
            REPAIRS.withdraw_stand_ins(patch.plugin)

    def _watch(self, path: str, *, in_a_checkout: bool) -> None:
        """Meet the module of this class: now where it is imported, and whenever it will be."""

        def met(module: ModuleType) -> None:
            if any(holds(patch.upstream, module, path) for patch in self.patches.get(path, ())):
                self._meet(module, path)

        where = {"file": file_of(path)} if in_a_checkout else {"name": path.partition(":")[0]}
        if (path, in_a_checkout) not in self.hooked:
            self.hooked.add((path, in_a_checkout))
            when_imported(met, **where)
        for module in imported(**where):
            if not in_a_checkout or class_in(module, path) is not None:  # else it may still be running
                met(module)

    def _meet(self, module: ModuleType, path: str) -> None:
        """A module that holds a patched class is there: wrap its constructor, once."""
        patch = self.patches[path][-1]
        cls = class_in(module, path)
        if cls is None:
            raise AdapterError(
                f"adapter {patch.plugin.name!r} expected class {path.partition(':')[2]} in {module.__name__} and found "
                "none: this version of the upstream does not fit"
            )
        if patch.config.shims:
            REPAIRS.apply(patch.plugin, patch.config.device)
        known = cls in self.paths
        self.paths[cls] = path
        if not known:
            # A subclass's own constructor goes on after upstream's returned: the model is born when it returns.
            self._watch_subclasses(cls)
            for each in (cls, *_subclasses(cls)):
                self._wrap(each)

    def _wrap(self, cls: type) -> None:
        if cls not in self.wrapped:
            self.wrapped.add(cls)
            if "__init__" in vars(cls):
                wrapt.wrap_function_wrapper(cls, "__init__", self._born)

    def _watch_subclasses(self, cls: Any) -> None:
        """Wrap the constructors of classes that are derived later."""
        own = vars(cls).get("__init_subclass__")

        def init_subclass(subclass: Any, /, **options: Any) -> None:
            if own is not None:
                own.__get__(None, subclass)(**options)
            else:
                super(cls, subclass).__init_subclass__(**options)
            self._wrap(subclass)

        cls.__init_subclass__ = classmethod(init_subclass)

    def _born(self, init: Any, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Wrapper of ``__init__``: attaches when the outermost constructor of a model returns."""
        building = self.building.models
        if id(model) in building:
            init(*args, **kwargs)
            return
        building.add(id(model))
        try:
            init(*args, **kwargs)
        finally:
            building.discard(id(model))
        for base in type(model).__mro__:
            patches = self.patches.get(self.paths.get(base, ""))
            if patches and find(model) is None:
                attach_with(model, patches[-1].plugin, patches[-1].config)
                return


def _subclasses(cls: type) -> list[type]:
    direct: list[type] = cls.__subclasses__()
    return [each for one in direct for each in (one, *_subclasses(one))]


CONSTRUCTORS = Constructors()
