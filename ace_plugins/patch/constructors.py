"""Attaches ACE to a model, or to every model of an upstream when it is constructed.

A patch wraps the ``__init__`` of a model class, now or when the module of the class is imported. The class itself stays
the same, so the patch also works for code that has imported the class before.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from types import ModuleType
from typing import Any, TypeVar

from torch import nn

from ..contract.upstreams import file_of
from ..engine.attach import prepare, put_on
from ..engine.state import find
from ..engine.step import wrap
from ..errors import AdapterError, AttachError
from ..plugins.claims import class_in, is_module_of
from ..plugins.plugin import Plugin
from ..plugins.registry import registry
from ..settings.config import Config
from .imports import STAND_INS, whenever_imported
from .shims import REPAIRS

M = TypeVar("M", bound=nn.Module)


def attach(model: M, adapter: str | None = None, **settings: Any) -> M:
    """Attach ACE to a model in place. Call it before the optimizer is built.

        model = attach(SchNet(...), mode="resilient")

    Everything is checked before anything is changed. In mode "off" the model is not changed at all.

    Args:
        model: A model that an adapter supports. If it is inside a wrapper such as DDP, pass the inner model.
        adapter: Name of the adapter; by default the only adapter that supports the model.
        settings: Fields of `Config`, and ``preset`` for one of the adapter's presets. Environment variables such as
            ``ACE_MODE`` override them.

    Returns:
        The same model.

    Raises:
        AttachError: If the object is not a module, or ACE cannot be attached to it.
        AdapterError: If no adapter or several support the model, or the adapter fails.
        ConfigError: If a setting is unknown or invalid.
    """
    if not isinstance(model, nn.Module):
        raise AttachError(f"expected a torch.nn.Module to attach ACE to, found {type(model).__name__}")
    plugin = registry().adapter(adapter) if adapter is not None else registry().find_adapter(model)
    return attach_with(model, plugin, plugin.resolve(environment=os.environ, arguments=settings).config)


def attach_with(model: M, plugin: Plugin, config: Config) -> M:
    """Attach ACE to a model with this adapter and config, and apply the shims that its upstream needs."""
    ace = prepare(model, plugin, config)
    if config.shims:
        REPAIRS.apply(plugin, config.device)
    if ace is not None:
        put_on(ace, model)
    return model


class Patch(AbstractContextManager["Patch"]):
    """A patch in effect until its ``with`` block ends or ``undo()`` is called. Attached models stay attached."""

    def __init__(self, plugin: Plugin, config: Config) -> None:
        self.plugin, self.config = plugin, config

    def undo(self) -> None:
        """End the patch: ACE is not attached to models that are constructed from now on."""
        CONSTRUCTORS.end(self)

    def __exit__(self, *error: object) -> None:
        self.undo()


def patched(name: str, **settings: Any) -> Patch:
    """Attach ACE to every model of an upstream that is constructed from now on.

        with patched("schnet", mode="strict"):
            model = SchNet(...)

    Without a ``with`` block, the patch stays in effect until ``undo()`` is called.

    Args:
        name: Name of the adapter.
        settings: Fields of `Config`, and ``preset`` for one of the adapter's presets. They are checked immediately.

    Returns:
        The patch, a context manager with a method ``undo()``.

    Raises:
        AdapterError: If the adapter is unknown, unusable, or names no model classes.
        ConfigError: If a setting is unknown or invalid.
    """
    plugin = registry().adapter(name)
    return patch_models(plugin, plugin.resolve(environment=os.environ, arguments=settings).config)


def patch_models(plugin: Plugin, config: Config) -> Patch:
    """Start a patch with this adapter and config."""
    if not plugin.patches.models:
        raise AdapterError(
            f"adapter {plugin.name!r} names no model class, so models cannot be patched when they are built; call "
            f"attach(model, adapter={plugin.name!r}) in your script instead"
        )
    patch = Patch(plugin, config)
    if config.shims:
        REPAIRS.offer_stand_ins(plugin)
        REPAIRS.apply(plugin, config.device, importing=config.device == "auto")  # device cpu: apply all shims now
    CONSTRUCTORS.begin(patch)
    return patch


class Constructors:
    """The constructors that were wrapped in this process, and the patches in effect."""

    def __init__(self) -> None:
        self.patches: dict[str, list[Patch]] = {}
        """Mapping from each model class ("module:Class") to its patches in effect, of which the newest applies."""
        self.paths: dict[type, str] = {}
        """Mapping from each imported model class to its "module:Class", and from each of its subclasses to ""."""
        self.undo: list[Callable[[], None]] = []  # functions that each undo one wrapper or import hook
        self.building: set[int] = set()  # ids of the models whose constructors are running

    def begin(self, patch: Patch) -> None:
        for path in patch.plugin.patches.models:
            self.patches.setdefault(path, []).append(patch)
        try:
            self._update()
        except BaseException:
            self.end(patch)
            raise

    def end(self, patch: Patch) -> None:
        remaining = {path: [each for each in patches if each is not patch] for path, patches in self.patches.items()}
        self.patches = {path: patches for path, patches in remaining.items() if patches}
        if not any(each.plugin is patch.plugin for patches in self.patches.values() for each in patches):
            STAND_INS.offer([], patch.plugin.patches.files)
        self._update()

    def _update(self) -> None:
        """Undo all wrappers and make those for the patches in effect. Adapters may share a class or a module."""
        while self.undo:
            self.undo.pop()()
        self.paths.clear()
        for path, patches in self.patches.items():
            upstream = patches[-1].plugin.patches
            where = {"name": path.partition(":")[0]} if upstream.checkout is None else {"file": file_of(path)}
            self.undo.append(whenever_imported(partial(self._wrap_class, path, patches[-1]), **where))

    def _wrap_class(self, path: str, patch: Patch, module: ModuleType) -> None:
        """Wrap the constructors of a model class and its subclasses after the import of its module."""
        if not is_module_of(patch.plugin.patches, module, path):
            return
        cls = class_in(module, path)
        if cls is None:
            missing = f"the upstream's module {module.__name__} has no class {path.partition(':')[2]}"
            raise AdapterError(f"{patch.plugin}: {missing}; the adapter does not support this version of the upstream")
        if patch.config.shims:
            REPAIRS.apply(patch.plugin, patch.config.device)
        if not self.paths.get(cls):
            self._watch_subclasses(cls)
            self._wrap(cls)
        self.paths[cls] = path

    def _wrap(self, cls: type) -> None:
        """Wrap the constructors of a class and its subclasses: ACE is attached after the outermost one has returned."""
        if cls not in self.paths:
            self.paths[cls] = ""
            if "__init__" in vars(cls):
                self.undo.append(wrap(cls, "__init__", self._construct))
            for subclass in list[type](cls.__subclasses__()):
                self._wrap(subclass)

    def _watch_subclasses(self, cls: Any) -> None:
        """Wrap the constructors of subclasses that are defined later."""

        def define(subclass: Any, /, **options: Any) -> None:
            super(cls, subclass).__init_subclass__(**options)
            self._wrap(subclass)

        if "__init_subclass__" not in vars(cls):
            cls.__init_subclass__ = classmethod(define)
            self.undo.append(lambda: delattr(cls, "__init_subclass__"))

    def _construct(self, init: Any, model: nn.Module, /, *args: Any, **kwargs: Any) -> None:
        """Call ``__init__`` and attach ACE when the outermost constructor of a model returns."""
        if id(model) in self.building:
            init(model, *args, **kwargs)
            return
        self.building.add(id(model))
        try:
            init(model, *args, **kwargs)
        finally:
            self.building.discard(id(model))
        for base in type(model).__mro__:
            patches = self.patches.get(self.paths.get(base, ""))
            if patches and find(model) is None:
                attach_with(model, patches[-1].plugin, patches[-1].config)
                return


CONSTRUCTORS = Constructors()
