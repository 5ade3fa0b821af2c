"""Finding, checking and loading plugins, each on its own: a broken one is reported and the rest work."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pluggy
from packaging.requirements import InvalidRequirement, Requirement

from ..contract import hookspecs
from ..contract.data import Example, Upstream, class_path
from ..errors import AceError, AdapterError, one_of

GROUP = "ace_plugins"
UPSTREAM_EXTRA = "upstream"
HOOKS = frozenset(name for name in vars(hookspecs) if name.startswith("ace_"))


@dataclass(frozen=True)
class Requires:
    """A distribution a plugin needs, in which versions, and what is installed."""

    requirement: str
    found: str | None
    upstream: bool = False

    @property
    def met(self) -> bool:
        wanted = Requirement(self.requirement)
        return self.found is not None and wanted.specifier.contains(self.found, prereleases=True)

    def __str__(self) -> str:
        return f"requires {self.requirement}, found {self.found or 'none installed'}"


@dataclass(frozen=True)
class Plugin:
    """One entry point of the group ``ace_plugins``: where it comes from and how it fared."""

    name: str
    target: str
    distribution: str
    version: str
    requires: tuple[Requires, ...] = ()
    problem: str | None = None
    """Why it cannot be used, in one line; None if it can."""
    upstream: Upstream | None = None
    """What it patches; None for an observer."""
    hooks: tuple[str, ...] = ()
    manager: pluggy.PluginManager | None = field(default=None, repr=False, compare=False)

    @property
    def missing_upstream(self) -> bool:
        """Not usable only because what it patches is not installed: nothing to be loud about."""
        unmet = [r for r in self.requires if not r.met]
        return bool(unmet) and all(r.upstream and r.found is None for r in unmet)

    def check_usable(self) -> None:
        if self.problem is not None:
            raise AdapterError(f"adapter {self.name!r} ({self.distribution} {self.version}): {self.problem}")

    def has(self, hook: str) -> bool:
        return hook in self.hooks

    @property
    def presets(self) -> dict[str, dict[str, Any]]:
        """The adapter's named settings."""
        named = self.call("ace_preset") if self.has("ace_preset") else None
        try:
            return {name: dict(settings) for name, settings in (named or {}).items()}
        except (AttributeError, TypeError, ValueError):
            raise AdapterError(
                f"adapter {self.name!r}: ace_preset returned {named!r}, expected names and settings, as "
                "{'paper': {'dual_lr': 0.1}}"
            ) from None

    def example(self, seed: int) -> Example:
        """The adapter's own small model and batch."""
        made = self.call("ace_example", seed=seed)
        if not isinstance(made, Example) or not isinstance(made.args, tuple):
            found = (
                "Example with args of " + type(made.args).__name__ if isinstance(made, Example) else type(made).__name__
            )
            raise AdapterError(
                f"adapter {self.name!r}: ace_example returned {found}, expected Example(model, args as a tuple, kwargs)"
            )
        return made

    def call(self, hook: str, **arguments: Any) -> Any:
        """This plugin's own answer to a hook, without asking the others."""
        self.check_usable()
        if not self.has(hook) or self.manager is None:
            raise AdapterError(
                f"adapter {self.name!r} ({self.distribution} {self.version}) does not implement {hook}; "
                f"it implements {', '.join(self.hooks) or 'no hook'}"
            )
        me = self.manager.get_plugin(self.name)
        others = [plugin for plugin in self.manager.get_plugins() if plugin is not me]
        try:
            answers = self.manager.subset_hook_caller(hook, remove_plugins=others)(**arguments)
        except AceError:
            raise
        except Exception as error:
            raise AdapterError(
                f"adapter {self.name!r} ({self.distribution} {self.version}): {hook} failed: {one_line(error)}"
            ) from error
        return answers[0] if answers else None


class Registry:
    """Every plugin that was found, and the pluggy manager that holds those that loaded."""

    def __init__(self, entry_points: Iterable[importlib.metadata.EntryPoint]) -> None:
        self.manager = pluggy.PluginManager("ace_plugins")
        self.manager.add_hookspecs(hookspecs)
        self.plugins: dict[str, Plugin] = {}
        self.shadowed: list[Plugin] = []
        """Entry points whose name an earlier one had taken."""
        self.left_out = ""
        """What ACE_LOAD_PLUGINS keeps out or names in vain, in words."""
        for entry_point in sorted(entry_points, key=lambda ep: (ep.name, ep.value)):
            self._load(entry_point)

    def __iter__(self) -> Any:
        return iter([*self.plugins.values(), *self.shadowed])

    @property
    def adapters(self) -> list[Plugin]:
        """The usable adapters."""
        return [p for p in self.plugins.values() if p.upstream is not None and p.problem is None]

    @property
    def with_checkouts(self) -> list[Plugin]:
        """Those whose upstream people clone."""
        return [p for p in self.adapters if p.upstream is not None and p.upstream.checkout is not None]

    def adapter(self, name: str) -> Plugin:
        """The adapter of that name, or an error that says what there is or why it cannot be used."""
        plugin = self.plugins.get(name) or self.plugins.get(name.replace("-", "_"))
        if plugin is None:
            names = [p.name for p in self.plugins.values()]
            why = f"; not loaded: {self.left_out}" if self.left_out else ""
            raise AdapterError(one_of("adapter", name, names, do=f"'ace-patch list' shows them{why}"))
        plugin.check_usable()
        if plugin.upstream is None:
            raise AdapterError(f"plugin {name!r} ({plugin.distribution}) is an observer, not an adapter")
        return plugin

    def claiming(self, cls: type) -> Plugin:
        """The one adapter that patches this model class or one of its bases."""
        claims = [p for p in self.adapters if p.upstream and p.upstream.claims(cls)]
        if len(claims) == 1:
            return claims[0]
        if claims:
            names = ", ".join(p.name for p in claims)
            raise AdapterError(f"several adapters claim {class_path(cls)}: {names}; pass adapter='...'")
        known = [f"{p.name} ({', '.join(p.upstream.models)})" for p in self.adapters if p.upstream]
        broken = [f"{p.name}: {p.problem}" for p in self.plugins.values() if p.problem]
        raise AdapterError(
            f"no adapter claims a model of class {class_path(cls)}: "
            f"expected {'; '.join(known) or 'an adapter, none loaded'}"
            + (f" (not usable: {'; '.join(broken)})" if broken else "")
            + "; pass the model inside any wrapper, or adapter='...'"
        )

    def add(self, plugin: object, name: str, distribution: str = "(registered)", version: str = "") -> Plugin:
        """Register a plugin object directly: for tests, notebooks and the host's own observers."""
        record = Plugin(name, f"{type(plugin).__name__}", distribution, version, manager=self.manager)
        if name in self.plugins:
            raise AdapterError(f"a plugin named {name!r} is loaded already; choose another name")
        record = self._register(record, plugin)
        self.plugins[name] = record
        return record

    def remove(self, name: str) -> None:
        """Take out a plugin that `add` put in."""
        self.plugins.pop(name, None)
        self._forget(name)

    def _load(self, entry_point: importlib.metadata.EntryPoint) -> None:
        dist = entry_point.dist
        record = Plugin(
            name=entry_point.name,
            target=entry_point.value,
            distribution=dist.name if dist else "(unknown distribution)",
            version=dist.version if dist else "",
            requires=_requirements(dist.requires or []) if dist else (),
            manager=self.manager,
        )
        taken = self.plugins.get(record.name)
        if taken is not None:
            if (taken.target, taken.distribution) != (record.target, record.distribution):
                why = f"its name is taken by {taken.distribution} ({taken.target}); uninstall one of the two"
                self.shadowed.append(_with(record, problem=why))
            return
        unmet = [r for r in record.requires if not r.met]
        if unmet:
            # Before the import: the plugin's own code may not even parse against these versions.
            install = " ".join(repr(r.requirement) for r in unmet)
            record = _with(record, problem=f"{'; '.join(map(str, unmet))}; pip install {install}")
        else:
            try:
                plugin = entry_point.load()
            except (Exception, SystemExit) as error:
                record = _with(record, problem=f"could not be imported: {one_line(error)}")
            else:
                record = self._register(record, plugin)
        self.plugins[record.name] = record

    def _register(self, record: Plugin, plugin: object) -> Plugin:
        unmarked = [
            name
            for name in sorted(HOOKS)
            if callable(getattr(plugin, name, None)) and not hasattr(getattr(plugin, name), "ace_plugins_impl")
        ]
        if unmarked:
            return _with(record, problem=f"{', '.join(unmarked)} not marked with @hookimpl; add the marker")
        try:
            self.manager.register(plugin, name=record.name)
        except Exception as error:
            self._forget(record.name)
            return _with(record, problem=f"could not be registered: {one_line(error)}")
        callers = self.manager.get_hookcallers(plugin) or []
        misspelt = [
            caller.name
            for caller in callers
            if not caller.has_spec()
            and any(impl.plugin is plugin and not impl.optionalhook for impl in caller.get_hookimpls())
        ]
        hooks = tuple(sorted(caller.name for caller in callers if caller.has_spec()))
        if misspelt:
            self._forget(record.name)
            return _with(record, problem="; ".join(one_of("hook", name, HOOKS) for name in sorted(misspelt)))
        record = _with(record, hooks=hooks)
        if "ace_upstream" not in hooks:
            return record
        try:
            upstream = record.call("ace_upstream")
            if not isinstance(upstream, Upstream):
                raise TypeError(f"ace_upstream returned {type(upstream).__name__}, expected Upstream")
        except Exception as error:
            self._forget(record.name)
            cause = error.__cause__ or error
            return _with(record, problem=f"ace_upstream failed: {one_line(cause)}")
        return _with(record, upstream=upstream)

    def _forget(self, name: str) -> None:
        if self.manager.has_plugin(name):
            self.manager.unregister(name=name)


def _with(record: Plugin, **changes: Any) -> Plugin:
    import dataclasses

    return dataclasses.replace(record, **changes)


def one_line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or "no message"
    return f"{type(error).__name__}: {text}"


def _requirements(declared: Sequence[str]) -> tuple[Requires, ...]:
    """What a distribution needs at run time, and under its extra ``upstream`` what it patches."""
    found: list[Requires] = []
    for text in declared:
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            continue
        plain = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        upstream = not plain and requirement.marker.evaluate({"extra": UPSTREAM_EXTRA})  # type: ignore[union-attr]
        if plain or upstream:
            # From the lowest up, as people write it.
            wanted = requirement.name + ",".join(sorted(map(str, requirement.specifier), reverse=True))
            found.append(Requires(wanted, _installed(requirement.name), upstream))
    return tuple(found)


def _installed(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def chosen(names: Iterable[str]) -> tuple[set[str], str]:
    """Which of these entry point names ``ACE_LOAD_PLUGINS`` lets in (unset all, empty none), and what it does not."""
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
    allowed, left_out = chosen(ep.name for ep in found)
    loaded = Registry(ep for ep in found if ep.name in allowed)
    loaded.left_out = left_out
    return loaded
