"""One plugin: its origin, its requirements and problems, and calls of its hooks, whose results are checked."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import inspect
import reprlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from packaging.requirements import Requirement
from pluggy import HookImpl

from ..contract.hookspecs import LazyHook
from ..contract.sites import Site, Stem
from ..contract.upstreams import AnyShim, Example, Script, Shim, StandIn, Upstream
from ..errors import AceError, AdapterError, ConfigError
from ..settings.config import LOGGERS, Config
from ..settings.sources import Resolved, resolve

if TYPE_CHECKING:
    from torch import nn

    from ..symmetry.actions import GroupAction

UPSTREAM_EXTRA = "upstream"
"""Name of the extra in an adapter's metadata that requires the upstream, with the versions the adapter supports."""


class AnswerError(AdapterError):
    """A hook returned a result that the contract does not allow."""


def _instance(module: str, name: str) -> Callable[[Any], bool]:
    """Return a test for instances of a class. The class's module is not imported: without it, none exist."""
    return lambda value: module in sys.modules and isinstance(value, getattr(sys.modules[module], name))


def _list_of(*kinds: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, Sequence) and all(isinstance(each, kinds) for each in value)


def _by_name(test: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, Mapping) and all(isinstance(key, str) and test(value[key]) for key in value)


_is_command = _instance("click", "Command")
_is_action = _instance("ace_plugins.symmetry.actions", "GroupAction")
EXPECTED: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "ace_upstream": ("Upstream(title, models)", lambda value: isinstance(value, Upstream)),
    "ace_layers": ("a list of Site and Stem", _list_of(Site, Stem)),
    "ace_branch": ("a torch.nn.Module or None", _instance("torch.nn", "Module")),
    "ace_group_action": ("GroupAction(group, inputs, outputs)", _is_action),
    "ace_preset": ("names and settings, as {'paper': {'dual_lr': 0.1}}", _by_name(_by_name(lambda _: True))),
    "ace_shims": ("a list of Shim and StandIn", _list_of(Shim, StandIn)),
    "ace_script": ("a Script or None", lambda value: isinstance(value, Script)),
    "ace_example": ("Example(model, args as a tuple, kwargs)", lambda value: isinstance(value, Example)),
    "ace_demo": ("a click.Command", _is_command),
    "ace_datasets": ("click commands by name, as {'nbody': command}", _by_name(_is_command)),
}
"""Mapping from each adapter hook to a description of the expected result and a function that tests a result."""
OPTIONAL = frozenset({"ace_branch", "ace_script", "ace_group_action"})
"""Hooks that may return None."""


@dataclass(frozen=True)
class Requires:
    """A distribution that a plugin needs, and the version that is installed."""

    requirement: str
    """Name and version range, for example "torch>=2.5"."""
    found: str | None
    """Installed version; None if the distribution is not installed."""
    upstream: bool = False
    """True if this distribution is the upstream that the plugin patches."""

    @property
    def met(self) -> bool:
        wanted = Requirement(self.requirement)
        return self.found is not None and wanted.specifier.contains(self.found, prereleases=True)

    def __str__(self) -> str:
        return f"requires {self.requirement}, found {self.found or 'none installed'}"


@dataclass(frozen=True)
class Plugin:
    """One plugin of the entry point group ``ace_plugins``."""

    name: str
    target: str
    """The entry point's value, for example "ace_segnn.plugin"."""
    distribution: str
    version: str
    requires: tuple[Requires, ...] = ()
    problem: str | None = None
    """Reason why the plugin cannot be used, in one line; None if it can be used."""
    upstream: Upstream | None = None
    """Upstream that the adapter patches; None for an observer."""
    implementations: Mapping[str, HookImpl | LazyHook] = field(default_factory=dict, repr=False, compare=False)

    @property
    def hooks(self) -> tuple[str, ...]:
        """Names of the hooks that the plugin implements, sorted."""
        return tuple(sorted(self.implementations))

    @property
    def missing_upstream(self) -> bool:
        """True if the plugin cannot be used only because its upstream is not installed. This is not an error."""
        unmet = [r for r in self.requires if not r.met]
        return bool(unmet) and all(r.upstream and r.found is None for r in unmet)

    def __str__(self) -> str:
        return f"adapter {self.name!r} ({self.distribution} {self.version})"

    def check_usable(self) -> None:
        """Raise an AdapterError if the plugin has a problem."""
        if self.problem is not None:
            raise AdapterError(f"{self}: {self.problem}")

    def has(self, hook: str) -> bool:
        return hook in self.implementations

    @property
    def patches(self) -> Upstream:
        """The upstream that the adapter patches. Fails for an observer, which has none."""
        assert self.upstream is not None
        return self.upstream

    @property
    def presets(self) -> dict[str, dict[str, Any]]:
        """The adapter's presets: a mapping from names to settings. `resolve` validates the preset that is used."""
        named = self.call("ace_preset") if self.has("ace_preset") else {}
        return {name: dict(settings) for name, settings in named.items()}

    @property
    def shims(self) -> list[AnyShim]:
        """The adapter's compatibility shims."""
        return list(self.call("ace_shims")) if self.has("ace_shims") else []

    def configure(self, settings: Mapping[str, Any]) -> Config:
        """Return a `Config`: the adapter's preset, overridden by these settings."""
        return self.resolve(arguments=settings).config

    def resolve(self, presets: Mapping[str, Mapping[str, Any]] | None = None, **sources: Any) -> Resolved:
        """Combine the adapter's preset with other sources, and check settings that depend on the adapter or a package.

        ``sources`` are the ``file``, ``environment``, ``options`` and ``arguments`` of `settings.sources.resolve`.
        """
        found = resolve(self.presets if presets is None else presets, adapter=self.name, **sources)
        log, device = found.config.log, found.config.device
        # A spec without an origin is only a folder of that name: wandb makes a folder "wandb" beside the script.
        if log in LOGGERS and getattr(find_spec(log), "origin", None) is None:
            text = f"log {log!r}: {log} is not installed; pip install 'ace-plugins[{log}]'"
            raise ConfigError(problems=[("log", text)])
        if device != "auto" and device not in {shim.device for shim in self.shims if isinstance(shim, Shim)}:
            text = (
                f"device {device!r}: adapter {self.name!r} has no such choice; use the options of your script instead"
            )
            raise ConfigError(problems=[("device", text)])
        return found

    def example(self, seed: int, model: Any = None) -> Example:
        """Return the adapter's small model with a batch, or the given model with a batch for it."""
        made: Example = self.call("ace_example", seed=seed, model=model)
        if model is not None and made.model is not model:
            raise AdapterError(
                f"adapter {self.name!r} cannot make a batch for your model ({type(model).__name__}): its "
                "ace_example does not take a model; pass your own batch: audit(model, batch)"
            )
        return made

    def action(self, model: nn.Module) -> GroupAction:
        """Return the group's action on this model; raise an AdapterError if it is unknown."""
        found: GroupAction | None = self.call("ace_group_action", model=model)
        if found is None:
            raise AdapterError(
                f"adapter {self.name!r}: ace_group_action returned None for {type(model).__name__}, "
                f"expected {EXPECTED['ace_group_action'][0]}"
            )
        return found

    def call(self, hook: str, **arguments: Any) -> Any:
        """Call this plugin's implementation of a hook and check the result. Raises an AdapterError if either fails."""
        self.check_usable()
        if not self.has(hook):
            found = ", ".join(self.hooks) or "no hook"
            raise AdapterError(f"{self} does not implement {hook}; it implements {found}")
        try:
            result = invoke(self.implementations[hook], arguments)
        except (AceError, KeyboardInterrupt):
            raise
        except BaseException as error:  # a plugin that calls sys.exit must not end the process
            raise AdapterError(f"{self}: {hook} failed: {one_line(error)}") from error
        valid = result is None and hook in OPTIONAL
        with contextlib.suppress(Exception):  # a plugin's own mapping or sequence may raise anything
            valid = valid or EXPECTED[hook][1](result)
        if not valid:
            found = " ".join(f"{type(result).__name__} {reprlib.repr(result)}".split())
            place = f" for {arguments['site'].name!r}" if "site" in arguments else ""
            raise AnswerError(f"adapter {self.name!r}: {hook} returned {found}{place}, expected {EXPECTED[hook][0]}")
        return result


def invoke(implementation: HookImpl | LazyHook, arguments: Mapping[str, Any]) -> Any:
    """Call an implementation of a hook with the arguments that it accepts."""
    if isinstance(implementation, HookImpl):
        return implementation.function(*(arguments[name] for name in implementation.argnames))
    found = implementation.load()
    if not inspect.isroutine(found):
        return found  # a LazyHook may name the result itself
    accepted = inspect.signature(found).parameters
    return found(**{name: value for name, value in arguments.items() if name in accepted})


def one_line(error: BaseException) -> str:
    """Return the type and message of an error in one line."""
    text = " ".join(str(error).split()) or "no message"
    return f"{type(error).__name__}: {text}"


def requirements(declared: Sequence[str]) -> tuple[Requires, ...]:
    """Return the requirements of a distribution. Those of the extra ``upstream`` are marked as its upstream."""
    found: list[Requires] = []
    for requirement in map(Requirement, declared):
        marker = requirement.marker
        plain = marker is None or marker.evaluate({"extra": ""})
        if plain or (marker is not None and marker.evaluate({"extra": UPSTREAM_EXTRA})):
            # The lower bound comes first, as people write it: "torch>=2.5,<3".
            wanted = requirement.name + ",".join(sorted(map(str, requirement.specifier), reverse=True))
            found.append(Requires(wanted, find_version(requirement.name), upstream=not plain))
    return tuple(found)


@functools.cache
def find_version(distribution: str) -> str | None:
    """Return the installed version of a distribution; None if it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
