"""Finding, checking, loading and telling plugins, each on its own: a broken one is reported and the rest work."""

from __future__ import annotations

import difflib
import importlib.metadata
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pluggy

from .. import __version__
from ..contract import hookspecs
from ..contract.upstreams import class_path
from ..errors import AceWarning, AdapterError, one_of
from .claims import claims
from .plugin import UPSTREAM_EXTRA, Plugin, one_line, requirements

if TYPE_CHECKING:
    from torch import nn

GROUP = "ace_plugins"
HOST = "ace-plugins"
"""The host's own distribution, whose observers come in through the same door."""
HOOKS = frozenset(name for name in vars(hookspecs) if name.startswith("ace_"))


class Registry:
    """Every plugin that was found, and the pluggy manager that holds those that loaded."""

    def __init__(self, entry_points: Iterable[importlib.metadata.EntryPoint]) -> None:
        self.manager = pluggy.PluginManager("ace_plugins")
        self.manager.add_hookspecs(hookspecs)
        self.plugins: dict[str, Plugin] = {}
        self.shadowed: list[Plugin] = []
        """Plugins whose name an earlier one had taken."""
        self.left_out = ""
        """What ACE_LOAD_PLUGINS keeps out or names in vain, in words."""
        for entry_point in sorted(entry_points, key=lambda ep: (ep.name, ep.value)):
            self._load(entry_point)

    def __iter__(self) -> Iterator[Plugin]:
        """Everybody's plugins; the host's own observers are no news to anyone."""
        return iter([p for p in (*self.plugins.values(), *self.shadowed) if p.distribution != HOST])

    @property
    def adapters(self) -> list[Plugin]:
        """The usable adapters."""
        return [p for p in self.plugins.values() if p.upstream is not None and p.problem is None]

    @property
    def with_checkouts(self) -> list[Plugin]:
        """Those whose upstream people clone."""
        return [p for p in self.adapters if p.patches.checkout is not None]

    def adapter(self, name: str) -> Plugin:
        """The adapter of that name, or an error that says what there is or why it cannot be used."""
        plugin = self.plugins.get(name) or self.plugins.get(name.replace("-", "_"))
        if plugin is None:
            why = f"; not loaded: {self.left_out}" if self.left_out else ""
            known = [p.name for p in self]
            raise AdapterError(one_of("adapter", name, known, do=f"'ace-patch list' shows them{why}"))
        plugin.check_usable()
        if plugin.upstream is None:
            raise AdapterError(f"plugin {name!r} ({plugin.distribution}) is an observer, not an adapter")
        return plugin

    def claiming(self, model: nn.Module) -> Plugin:
        """The one adapter that patches this model: by its class or a base of it, else by looking at the model."""
        cls = type(model)
        blind: list[str] = []
        """Adapters that failed when they were shown the model."""

        def recognised(plugin: Plugin) -> bool:
            try:
                return sees(plugin, model)
            except AdapterError as error:
                blind.append(str(error))
                return False

        found = [p for p in self.adapters if claims(p.patches, cls)] or [p for p in self.adapters if recognised(p)]
        if len(found) == 1:
            return found[0]
        if found:
            names = ", ".join(p.name for p in found)
            raise AdapterError(f"several adapters claim {class_path(cls)}: {names}; pass adapter='...'")
        known = [f"{p.name} ({', '.join(p.patches.models) or p.patches.title})" for p in self.adapters]
        broken = [*(f"{p.name}: {p.problem}" for p in self.plugins.values() if p.problem), *blind]
        raise AdapterError(
            f"no adapter claims a model of class {class_path(cls)}: "
            f"expected {'; '.join(known) or 'an adapter, none loaded'}"
            + (f" (not usable: {'; '.join(broken)})" if broken else "")
            + "; pass the model inside any wrapper, or adapter='...'"
        )

    def add(self, plugin: object, name: str, distribution: str = "(registered)", version: str = "") -> Plugin:
        """Register a plugin object directly, for tests and notebooks."""
        if name in self.plugins:
            raise AdapterError(f"a plugin named {name!r} is loaded already; choose another name")
        record = Plugin(name, type(plugin).__name__, distribution, version, manager=self.manager)
        self.plugins[name] = self._register(record, plugin)
        return self.plugins[name]

    def remove(self, name: str) -> None:
        """Take out a plugin that `add` put in."""
        self.plugins.pop(name, None)
        self._forget(name)

    def _load(self, entry_point: importlib.metadata.EntryPoint) -> None:
        dist = entry_point.dist
        declared = (dist.requires or []) if dist else []
        record = Plugin(
            name=entry_point.name,
            target=entry_point.value,
            distribution=dist.name if dist else "(unknown distribution)",
            version=dist.version if dist else "",
            requires=requirements(declared, _extras(entry_point.name)),
            manager=self.manager,
        )
        if self._taken(record) or self._unmet(record):
            return
        try:
            loaded = entry_point.load()
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a plugin that calls sys.exit ends itself, and nobody else
            self.plugins[record.name] = replace(record, problem=f"could not be imported: {one_line(error)}")
            return
        if not isinstance(loaded, Mapping):
            self.plugins[record.name] = self._register(record, loaded)
            return
        for name, plugin in loaded.items():  # one entry point may bring several, by name
            each = replace(record, name=str(name), requires=requirements(declared, _extras(str(name))))
            if not self._taken(each) and not self._unmet(each):
                self.plugins[each.name] = self._register(each, plugin)

    def _taken(self, record: Plugin) -> bool:
        taken = self.plugins.get(record.name)
        if taken is None:
            return False
        if (taken.target, taken.distribution) != (record.target, record.distribution):
            why = f"its name is taken by {taken.distribution} ({taken.target}); uninstall one of the two"
            self.shadowed.append(replace(record, problem=why))
        return True

    def _unmet(self, record: Plugin) -> bool:
        """Asked before the import: the plugin's own code may not even parse against these versions."""
        unmet = [r for r in record.requires if not r.met]
        if unmet:
            install = " ".join(repr(r.requirement) for r in unmet)
            problem = f"{'; '.join(map(str, unmet))}; pip install {install}"
            self.plugins[record.name] = replace(record, problem=problem)
        return bool(unmet)

    def _register(self, record: Plugin, plugin: object) -> Plugin:
        try:
            hooks, problem = self._hooks_of(plugin, record.name)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            hooks, problem = (), f"could not be registered: {one_line(error)}"
        if problem:
            self._forget(record.name)
            return replace(record, problem=problem)
        record = replace(record, hooks=hooks)
        if "ace_upstream" not in hooks:
            return record
        try:
            return replace(record, upstream=record.call("ace_upstream"))
        except AdapterError as error:
            self._forget(record.name)
            failed = error.__cause__  # without the name, which stands before every problem
            problem = f"ace_upstream failed: {one_line(failed)}" if failed else str(error).partition(": ")[2]
            return replace(record, problem=problem)

    def _hooks_of(self, plugin: object, name: str) -> tuple[tuple[str, ...], str]:
        """Register a plugin under this name. The hooks that it implements, and what is wrong with it."""
        if isinstance(plugin, type):
            return (), f"is the class {plugin.__name__}, expected a module or an object; name an instance of it"
        functions = [hook for hook in sorted(HOOKS) if callable(getattr(plugin, hook, None))]
        unmarked = [hook for hook in functions if not hasattr(getattr(plugin, hook), "ace_plugins_impl")]
        if unmarked:
            return (), f"{', '.join(unmarked)} not marked with @hookimpl; add the marker"
        marked = {each: self.manager.parse_hookimpl_opts(plugin, each) for each in dir(plugin)}
        self.manager.register(plugin, name=name)
        named = {opts["specname"] or each: opts for each, opts in marked.items() if opts}
        misspelt = sorted(hook for hook, opts in named.items() if hook not in HOOKS and not opts["optionalhook"])
        if misspelt:
            return (), "; ".join(map(_unknown, misspelt))
        if not named:
            found = f"module {plugin.__name__}" if isinstance(plugin, ModuleType) else type(plugin).__name__
            return (), f"{found} implements no hook, expected functions such as ace_upstream marked with @hookimpl"
        return tuple(sorted(named.keys() & HOOKS)), ""

    def _forget(self, name: str) -> None:
        if self.manager.has_plugin(name):
            self.manager.unregister(name=name)


def _unknown(hook: str) -> str:
    """Of a hook that there is not: misspelt, or of another version of the host."""
    bare = {name.removeprefix("ace_"): name for name in HOOKS}  # else the prefix makes any two names alike
    near = difflib.get_close_matches(hook.removeprefix("ace_"), bare, n=1)
    if near:
        return f"unknown hook {hook!r}: did you mean {bare[near[0]]!r}?"
    return (
        f"unknown hook {hook!r}: ace-plugins {__version__} has none of that name, expected {', '.join(sorted(HOOKS))}"
    )


def _extras(name: str) -> tuple[str, ...]:
    """Where a distribution says what it patches: for all of its adapters, or for the one of that name."""
    return UPSTREAM_EXTRA, f"{UPSTREAM_EXTRA}-{name.replace('_', '-')}"


def sees(plugin: Plugin, model: nn.Module) -> bool:
    """Whether an adapter recognises this model by looking at it."""
    look = plugin.patches.recognises
    try:
        return look is not None and bool(look(model))
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise AdapterError(f"adapter {plugin.name!r}: recognises failed: {one_line(error)}") from error


def chosen(names: Iterable[str]) -> tuple[set[str], str]:
    """Which of these names ``ACE_LOAD_PLUGINS`` lets in (unset all, empty none), and in words what it does not."""
    known = set(names)
    value = os.environ.get("ACE_LOAD_PLUGINS")
    if value is None:
        return known, ""
    wanted = {name.strip() for name in value.split(",") if name.strip()}
    told = [one_of("plugin in ACE_LOAD_PLUGINS", name, known) for name in sorted(wanted - known)]
    if known - wanted:
        told.append(f"{', '.join(sorted(known - wanted))} (ACE_LOAD_PLUGINS is {value!r})")
    return wanted & known, "; ".join(told)


@cache
def registry() -> Registry:
    """The plugins of this process, loaded on first use."""
    found = list(importlib.metadata.entry_points(group=GROUP))
    hosts = [ep for ep in found if ep.dist is not None and ep.dist.name == HOST]
    allowed, left_out = chosen(ep.name for ep in found if ep not in hosts)
    loaded = Registry(ep for ep in found if ep in hosts or ep.name in allowed)
    loaded.left_out = left_out
    return loaded


def tell(hook: str, **arguments: Any) -> None:
    """Call an observer hook of every plugin that has it, in pluggy's order: the last registered first, and ``tryfirst``
    and ``trylast`` hold. What one raises becomes a warning with its name: a logger that fails must not cost anyone a
    training run."""
    for impl in reversed(getattr(registry().manager.hook, hook).get_hookimpls()):
        try:
            impl.function(*(arguments[name] for name in impl.argnames))
        except Exception as error:
            told = f"observer {impl.plugin_name!r} failed in {hook}: {one_line(error)}; training goes on"
            warnings.warn(told, AceWarning, stacklevel=2)
