"""Finds, checks and loads plugins. A broken plugin is reported and does not affect the others."""

from __future__ import annotations

import importlib.metadata
import os
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pluggy

from .. import __version__
from ..contract.hookspecs import Hooks, LazyHook
from ..contract.upstreams import class_path
from ..errors import AceWarning, AdapterError, one_of
from .claims import claims
from .plugin import EXPECTED, Plugin, find_version, invoke, one_line, requirements

if TYPE_CHECKING:
    from torch import nn

GROUP = "ace_plugins"
HOST = "ace-plugins"
"""Name of the host's own distribution, which has observers in the entry point group ``ace_plugins`` as well."""
HOOKS = frozenset(name for name in vars(Hooks) if name.startswith("ace_"))


class Registry:
    """All plugins that were found, and the pluggy manager that holds the successfully loaded ones."""

    def __init__(self, entry_points: Iterable[importlib.metadata.EntryPoint], left_out: str = "") -> None:
        self.manager = pluggy.PluginManager("ace_plugins")
        self.manager.add_hookspecs(Hooks)
        find_version.cache_clear()
        self.plugins: dict[str, Plugin] = {}
        self.shadowed: list[Plugin] = []
        """Plugins that were not loaded because an earlier plugin has the same name."""
        self.left_out = left_out
        """Message about plugins that the variable ACE_LOAD_PLUGINS excludes, or about unknown names in it."""
        for entry_point in sorted(entry_points, key=lambda ep: (ep.name, ep.value)):
            self._load(entry_point)

    def __iter__(self) -> Iterator[Plugin]:
        """Iterate over all plugins except the host's own observers."""
        return iter([p for p in (*self.plugins.values(), *self.shadowed) if p.distribution != HOST])

    @property
    def adapters(self) -> list[Plugin]:
        """The usable adapters."""
        return [p for p in self.plugins.values() if p.upstream is not None and p.problem is None]

    @property
    def with_checkouts(self) -> list[Plugin]:
        """The usable adapters for upstreams that are cloned."""
        return [p for p in self.adapters if p.patches.checkout is not None]

    def adapter(self, name: str) -> Plugin:
        """Return the adapter of this name; raise an AdapterError if it is unknown or cannot be used."""
        plugin = self.plugins.get(name) or self.plugins.get(name.replace("-", "_"))
        if plugin is None:
            why = f"; not loaded: {self.left_out}" if self.left_out else ""
            known = [p.name for p in self]
            raise AdapterError(one_of("adapter", name, known, do=f"'ace-patch list' shows them{why}"))
        plugin.check_usable()
        if plugin.upstream is None:
            raise AdapterError(f"plugin {name!r} ({plugin.distribution}) is an observer, not an adapter")
        return plugin

    def find_adapter(self, model: nn.Module) -> Plugin:
        """Return the one adapter that lists the model's class or a base class, or else recognises the model.

        Raises an AdapterError if no adapter or more than one is found.
        """
        cls = type(model)
        found = [p for p in self.adapters if claims(p.patches, cls)] or [
            p for p in self.adapters if recognises(p, model)
        ]
        if len(found) == 1:
            return found[0]
        if found:
            names = ", ".join(p.name for p in found)
            raise AdapterError(f"several adapters claim {class_path(cls)}: {names}; pass adapter='...'")
        known = [f"{p.name} ({', '.join(p.patches.models) or p.patches.title})" for p in self.adapters]
        broken = [f"{p.name}: {p.problem}" for p in self.plugins.values() if p.problem]
        raise AdapterError(
            f"no adapter claims a model of class {class_path(cls)}: "
            f"expected {'; '.join(known) or 'an adapter, none loaded'}"
            + (f" (not usable: {'; '.join(broken)})" if broken else "")
            + "; if the model is inside a wrapper such as DDP, pass the inner model; otherwise pass adapter='...'"
        )

    def add(self, plugin: object, name: str, distribution: str = "(registered)", version: str = "") -> Plugin:
        """Register a plugin object directly, for tests and notebooks."""
        if name in self.plugins:
            raise AdapterError(f"a plugin named {name!r} is already loaded; choose another name")
        self.plugins[name] = self._register(Plugin(name, type(plugin).__name__, distribution, version), plugin)
        return self.plugins[name]

    def remove(self, name: str) -> None:
        """Remove a plugin that `add` registered."""
        self.plugins.pop(name, None)
        self._unregister(name)

    def _load(self, entry_point: importlib.metadata.EntryPoint) -> None:
        dist = entry_point.dist
        assert dist is not None
        record = Plugin(entry_point.name, entry_point.value, dist.name, dist.version, requirements(dist.requires or []))
        taken = self.plugins.get(record.name)
        if taken is not None:
            why = f"its name is taken by {taken.distribution} ({taken.target}); uninstall one of the two"
            self.shadowed.append(replace(record, problem=why))
            return
        unmet = [r for r in record.requires if not r.met]  # before the import, which may fail with these versions
        if unmet:
            problem = f"{'; '.join(map(str, unmet))}; pip install {' '.join(repr(r.requirement) for r in unmet)}"
            self.plugins[record.name] = replace(record, problem=problem)
            return
        try:
            self.plugins[record.name] = self._register(record, entry_point.load())
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a plugin that calls sys.exit must not end the process
            self.plugins[record.name] = replace(record, problem=f"could not be imported: {one_line(error)}")

    def _register(self, record: Plugin, plugin: object) -> Plugin:
        try:
            problem = self._find_problem(plugin)
            if not problem:
                self.manager.register(plugin, name=record.name)
                callers = self.manager.get_hookcallers(plugin) or []
                found = {each.name: i for each in callers for i in each.get_hookimpls() if i.plugin is plugin}
                lazy = {hook: value for hook in HOOKS if isinstance(value := getattr(plugin, hook, None), LazyHook)}
                known = replace(record, implementations={**found, **lazy})
                return replace(known, upstream=known.call("ace_upstream")) if known.has("ace_upstream") else known
        except KeyboardInterrupt:
            raise
        except AdapterError as error:
            problem = str(error).partition(": ")[2]  # without the plugin's name, which is shown anyway
        except BaseException as error:
            problem = f"could not be registered: {one_line(error)}"
        self._unregister(record.name)
        return replace(record, problem=problem)

    def _find_problem(self, plugin: object) -> str:
        """Return what is wrong with a plugin's hooks, in one line; empty if nothing is wrong."""
        if isinstance(plugin, type):
            return f"is the class {plugin.__name__}, expected a module or an object; name an instance of it"
        values = {hook: value for hook in HOOKS if callable(value := getattr(plugin, hook, None))}
        lazy = {hook for hook, value in values.items() if isinstance(value, LazyHook)}
        marked = {name: opts for name in dir(plugin) if (opts := self.manager.parse_hookimpl_opts(plugin, name))}
        hooks = {opts["specname"] or name: opts for name, opts in marked.items()}
        wrappers = {hook for hook, opts in hooks.items() if opts["wrapper"] or opts["hookwrapper"]}
        if unmarked := values.keys() - lazy - marked.keys():
            return f"{', '.join(sorted(unmarked))} not marked with @hookimpl; add the marker"
        if observers := lazy - EXPECTED.keys():
            return f"{', '.join(sorted(observers))}: an observer hook cannot be a LazyHook; define a function"
        if wrappers:
            return f"{', '.join(sorted(wrappers))} is a hook wrapper, which is not supported; use a plain @hookimpl"
        if unknown := hooks.keys() - HOOKS:
            known = ", ".join(sorted(HOOKS))
            return f"unknown hook {', '.join(sorted(unknown))}: the hooks of ace-plugins {__version__} are {known}"
        if not hooks and not lazy:
            found = f"module {plugin.__name__}" if isinstance(plugin, ModuleType) else type(plugin).__name__
            return f"{found} implements no hook, expected functions such as ace_upstream marked with @hookimpl"
        return ""

    def _unregister(self, name: str) -> None:
        if self.manager.has_plugin(name):
            self.manager.unregister(name=name)


def recognises(plugin: Plugin, model: nn.Module) -> bool:
    """Return whether an adapter recognises this model by `Upstream.recognises`."""
    test = plugin.patches.recognises
    try:
        return test is not None and bool(test(model))
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise AdapterError(f"adapter {plugin.name!r}: recognises failed: {one_line(error)}") from error


@cache
def registry() -> Registry:
    """Return the plugins of this process. The first call loads them, or those that ``ACE_LOAD_PLUGINS`` names."""
    found = list(importlib.metadata.entry_points(group=GROUP))
    value = os.environ.get("ACE_LOAD_PLUGINS")
    if value is None:
        return Registry(found)
    wanted = {name.strip() for name in value.split(",") if name.strip()}
    others = {ep.name for ep in found if ep.dist is not None and ep.dist.name != HOST}
    messages = [one_of("plugin in ACE_LOAD_PLUGINS", name, others) for name in sorted(wanted - others)]
    if others - wanted:
        messages.append(f"{', '.join(sorted(others - wanted))} (ACE_LOAD_PLUGINS is {value!r})")
    return Registry((ep for ep in found if ep.name not in others - wanted), "; ".join(messages))


def notify(hook: str, **arguments: Any) -> None:
    """Call every implementation of an observer hook, in pluggy's order. Errors become warnings, so training goes on."""
    for implementation in reversed(getattr(registry().manager.hook, hook).get_hookimpls()):
        try:
            invoke(implementation, arguments)
        except Exception as error:
            name = implementation.plugin_name
            text = f"observer {name!r} failed in {hook}: {one_line(error)}; training goes on"
            warnings.warn(text, AceWarning, stacklevel=2)
