"""Finds, checks and loads plugins. A broken plugin is reported and does not affect the others."""

from __future__ import annotations

import importlib.metadata
import os
import shlex
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pluggy

from .. import __version__
from ..contract.hookspecs import Hooks, LazyHook
from ..contract.upstreams import class_path
from ..errors import AceWarning, AdapterError, one_of
from .claims import claims
from .plugin import EXPECTED, Plugin, one_line, requirements

if TYPE_CHECKING:
    from torch import nn

HOST = "ace-plugins"  # this distribution, whose loggers are plugins too
HOOKS = frozenset(name for name in vars(Hooks) if name.startswith("ace_"))


class Registry:
    """All plugins that were found, and the pluggy manager that holds the successfully loaded ones."""

    def __init__(self, entry_points: Iterable[importlib.metadata.EntryPoint], left_out: str = "") -> None:
        self.manager = pluggy.PluginManager("ace_plugins")
        self.manager.add_hookspecs(Hooks)
        self.plugins: dict[str, Plugin] = {}
        """Mapping from names to plugins. A plugin whose name is taken has the key "name (distribution)"."""
        self.left_out = left_out
        """Message about plugins that the variable ACE_LOAD_PLUGINS excludes, or about unknown names in it."""
        for entry_point in sorted(entry_points, key=lambda ep: (ep.name, ep.value)):
            self._load(entry_point)

    def __iter__(self) -> Iterator[Plugin]:
        """Iterate over all plugins except the observers that are part of ace-plugins."""
        return iter([p for p in self.plugins.values() if p.distribution != HOST])

    @property
    def adapters(self) -> list[Plugin]:
        return [p for p in self.plugins.values() if p.upstream is not None and p.problem is None]

    @property
    def with_checkouts(self) -> list[Plugin]:
        return [p for p in self.adapters if p.patches.checkout is not None]

    def adapter(self, name: str) -> Plugin:
        """Return the adapter of this name; raise an AdapterError if it is unknown or cannot be used."""
        plugin = self.plugins.get(name) or self.plugins.get(name.replace("-", "_"))
        if plugin is None:
            left_out = f"; not loaded: {self.left_out}" if self.left_out else ""
            if how := find_installable(name):
                raise AdapterError(how + left_out)
            do = f"'ace-patch list' shows the installed ones; the package of an adapter is usually called ace-{name}"
            raise AdapterError(one_of("adapter", name, [p.name for p in self], do=do + left_out))
        if plugin.problem is not None:
            raise AdapterError(f"{plugin}: {plugin.problem}")
        if plugin.upstream is None:
            raise AdapterError(f"plugin {name!r} ({plugin.distribution}) is an observer, not an adapter")
        return plugin

    def find_adapter(self, model: nn.Module) -> Plugin:
        """Return the only adapter that lists the class of the model or a base class, or else recognises the model."""
        cls = type(model)
        found = [p for p in self.adapters if claims(p.patches, cls)]
        found = found or [p for p in self.adapters if recognises(p, model)]
        if len(found) == 1:
            return found[0]
        if found:
            names = ", ".join(p.name for p in found)
            raise AdapterError(f"several adapters support {class_path(cls)} ({names}); pass adapter='...'")
        known = [f"{p.name} ({', '.join(p.patches.models) or p.patches.title})" for p in self.adapters]
        broken = [f"{p.name} is installed but not usable ({p.problem})" for p in self.plugins.values() if p.problem]
        raise AdapterError(
            f"no adapter supports the class {class_path(cls)}; installed adapters: {', '.join(known) or 'none'}; "
            + "".join(f"{text}; " for text in broken)
            + "if the model is inside a wrapper such as DDP, pass the inner model (model.module)"
        )

    def add(self, plugin: object, name: str, distribution: str = "(registered)", version: str = "") -> Plugin:
        """Register a plugin object directly, for tests and notebooks."""
        if name in self.plugins:
            raise AdapterError(f"a plugin named {name!r} is already loaded; choose another name")
        self.plugins[name] = self._register(Plugin(name, type(plugin).__name__, distribution, version), lambda: plugin)
        return self.plugins[name]

    def remove(self, name: str) -> None:
        """Remove a plugin that `add` registered."""
        self.plugins.pop(name, None)
        if self.manager.has_plugin(name):
            self.manager.unregister(name=name)

    def _load(self, entry_point: importlib.metadata.EntryPoint) -> None:
        dist = entry_point.dist
        assert dist is not None
        record = Plugin(entry_point.name, entry_point.value, dist.name, dist.version, requirements(dist.requires or []))
        name, problem = record.name, ""
        if name in self.plugins:
            other = self.plugins[name]
            problem = f"its name is taken by {other.distribution} ({other.target}); uninstall one of the two"
            name = f"{name} ({dist.name})"
        elif unmet := [r for r in record.requires if not r.met]:
            problem = f"{'; '.join(map(str, unmet))}; pip install {' '.join(repr(r.requirement) for r in unmet)}"
        # A plugin with a problem is not imported, because the import may fail with other versions than it requires.
        self.plugins[name] = replace(record, problem=problem) if problem else self._register(record, entry_point.load)

    def _register(self, record: Plugin, load: Callable[[], object]) -> Plugin:
        """Load a plugin and register its hooks. Return its record, with ``problem`` set if this fails."""
        done = "imported"
        try:
            plugin = load()
            done = "registered"
            hooks = {hook: value for hook in HOOKS if callable(value := getattr(plugin, hook, None))}
            problem = self._find_problem(plugin, hooks)
            if not problem:
                self.manager.register(plugin, name=record.name)
                known = replace(record, implementations=hooks)
                return replace(known, upstream=known.call("ace_upstream")) if known.has("ace_upstream") else known
        except AdapterError as error:
            problem = str(error).partition(": ")[2]  # without the plugin's name, which is shown anyway
        except (Exception, SystemExit) as error:  # a plugin that calls sys.exit must not end the process
            problem = f"could not be {done}: {one_line(error)}"
        self.remove(record.name)
        return replace(record, problem=problem)

    def _find_problem(self, plugin: object, hooks: Mapping[str, Any]) -> str:
        """Return the problem of a plugin's hooks, in one line; empty without a problem."""
        if isinstance(plugin, type):
            return f"is the class {plugin.__name__}, expected a module or an object; name an instance of it"
        lazy = {hook for hook, value in hooks.items() if isinstance(value, LazyHook)}
        marked = {name: opts for name in dir(plugin) if (opts := self.manager.parse_hookimpl_opts(plugin, name))}
        if unmarked := hooks.keys() - lazy - marked.keys():
            return f"{', '.join(sorted(unmarked))} not marked with @hookimpl; add the marker"
        if observers := lazy - EXPECTED.keys():
            return f"{', '.join(sorted(observers))}: an observer hook cannot be a LazyHook; define a function"
        if wrappers := [name for name, opts in marked.items() if opts["wrapper"] or opts["hookwrapper"]]:
            return f"{', '.join(wrappers)} is a hook wrapper, which is not supported; use a plain @hookimpl"
        if unknown := marked.keys() - HOOKS:
            known = ", ".join(sorted(HOOKS))
            return f"unknown hook {', '.join(sorted(unknown))}: the hooks of ace-plugins {__version__} are {known}"
        if not hooks:
            found = getattr(plugin, "__name__", type(plugin).__name__)
            return f"{found} implements no hook, expected functions such as ace_upstream marked with @hookimpl"
        return ""


def find_installable(name: str) -> str:
    """Return how to install or load an adapter that is missing; empty if the clone of ace-plugins has no such one."""
    if name.replace("-", "_") in importlib.metadata.entry_points(group="ace_plugins").names:
        return f"adapter {name!r} is installed but not loaded: add it to ACE_LOAD_PLUGINS, or unset this variable"
    for file in Path(__file__).parents[2].glob("adapters/*/pyproject.toml"):
        if file.parent.name == name.replace("-", "_"):
            extra = "[upstream]" if "\nupstream =" in file.read_text(encoding="utf-8") else ""
            return f"adapter {name!r} is not installed: run pip install {shlex.quote(f'{file.parent}{extra}')}"
    return ""


def recognises(plugin: Plugin, model: nn.Module) -> bool:
    """Return whether an adapter recognises this model by `Upstream.recognises`."""
    return plugin.patches.recognises is not None and bool(plugin.patches.recognises(model))


@cache
def registry() -> Registry:
    """Return the plugins of this process. The first call loads them: all, or those in ``ACE_LOAD_PLUGINS``."""
    found = list(importlib.metadata.entry_points(group="ace_plugins"))
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
            implementation.function(*(arguments[name] for name in implementation.argnames))
        except (Exception, SystemExit) as error:  # an observer that calls sys.exit must not end the training
            text = f"observer {implementation.plugin_name!r} failed in {hook}: {one_line(error)}; training continues"
            warnings.warn(text, AceWarning, stacklevel=2)
