"""One plugin: its origin, its requirements and problems, and calls of its hooks with checks of their results."""

from __future__ import annotations

import importlib.metadata
import inspect
import reprlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from packaging.requirements import Requirement

from ..contract.hookspecs import LazyHook
from ..contract.sites import Site, Stem
from ..contract.upstreams import AnyShim, Example, Script, Shim, StandIn, Upstream
from ..errors import AceError, AdapterError, ConfigError
from ..settings.config import LOGGERS
from ..settings.sources import Resolved, resolve

if TYPE_CHECKING:
    from torch import nn

    from ..symmetry.actions import GroupAction


class AnswerError(AdapterError):
    """A hook returned a result that the contract does not allow."""


def _instance(module: str, name: str) -> Callable[[Any], bool]:
    """Return a function that tests if a value is an instance of a class, without importing the class's module."""
    return lambda value: module in sys.modules and isinstance(value, getattr(sys.modules[module], name))


def _list_of(*kinds: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, Sequence) and all(isinstance(each, kinds) for each in value)


def _by_name(test: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, Mapping) and all(isinstance(key, str) and test(value[key]) for key in value)


_is_command = _instance("click", "Command")
_is_action = _instance("ace_plugins.symmetry.actions", "GroupAction")
# Mapping from each adapter hook to a description of the expected result and a function that tests a result.
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
OPTIONAL = ("ace_branch", "ace_script", "ace_group_action")  # hooks that may return None


@dataclass(frozen=True)
class Requires:
    """A Python package that a plugin needs, and the version that is installed."""

    requirement: str  # name and version range, for example "torch>=2.5"
    found: str | None  # installed version; None if the distribution is not installed
    upstream: bool = False  # True if this distribution is the upstream that the plugin patches

    @property
    def met(self) -> bool:
        return self.found is not None and Requirement(self.requirement).specifier.contains(self.found, True)

    def __str__(self) -> str:
        return f"requires {self.requirement}, found {self.found or 'none installed'}"


@dataclass(frozen=True)
class Plugin:
    """One plugin of the entry point group ``ace_plugins``."""

    name: str
    target: str  # the entry point's value, for example "ace_segnn.plugin"
    distribution: str
    version: str
    requires: tuple[Requires, ...] = ()
    problem: str | None = None  # reason why the plugin cannot be used, in one line; None if it can be used
    upstream: Upstream | None = None  # None for an observer, a plugin that only receives events, like a logger
    # Mapping from the names of hooks to the plugin's functions or `LazyHook` objects.
    implementations: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def hooks(self) -> tuple[str, ...]:
        return tuple(sorted(self.implementations))

    @property
    def missing_upstream(self) -> bool:
        """True if the plugin cannot be used only because its upstream is not installed. This is not an error."""
        unmet = [r for r in self.requires if not r.met]
        return bool(unmet) and all(r.upstream and r.found is None for r in unmet)

    def __str__(self) -> str:
        return f"adapter {self.name!r} ({self.distribution} {self.version})"

    def has(self, hook: str) -> bool:
        return hook in self.implementations

    @property
    def patches(self) -> Upstream:
        """The upstream of this plugin, which must be an adapter."""
        assert self.upstream is not None
        return self.upstream

    @property
    def presets(self) -> dict[str, dict[str, Any]]:
        """Mapping from the names of the adapter's presets to their settings, which are not validated yet."""
        found = self.call("ace_preset") if self.has("ace_preset") else {}
        return {name: dict(settings) for name, settings in found.items()}

    @property
    def shims(self) -> list[AnyShim]:
        return list(self.call("ace_shims")) if self.has("ace_shims") else []

    def resolve(self, **sources: Any) -> Resolved:
        """Combine the adapter's presets with other settings, and check the result. See `settings.sources.resolve`."""
        found = resolve(self.presets, adapter=self.name, **sources)
        log, device = found.config.log, found.config.device
        # A spec without an origin is only a folder of that name: wandb makes a folder "wandb" beside the script.
        if log in LOGGERS and getattr(find_spec(log), "origin", None) is None:
            text = f"log {log!r}: not installed; in a clone of ace-plugins, run pip install '.[{log}]'"
            raise ConfigError(problems=[("log", text)])
        if device != "auto" and device not in {shim.device for shim in self.shims if isinstance(shim, Shim)}:
            text = f"device {device!r}: adapter {self.name!r} cannot choose it; use the options of your script instead"
            raise ConfigError(problems=[("device", text)])
        return found

    def example(self, seed: int, model: Any = None) -> Example:
        """Return the adapter's small model with a batch, or the given model with a batch for it."""
        made: Example = self.call("ace_example", seed=seed, model=model)
        if model is not None and made.model is not model:
            raise AdapterError(f"adapter {self.name!r} cannot make a batch for your model; use audit(model, batch)")
        return made

    def action(self, model: nn.Module) -> GroupAction:
        """Return the group's action on this model; raise an AdapterError if it is unknown."""
        found: GroupAction | None = self.call("ace_group_action", model=model)
        if found is None:
            expected = f"{type(model).__name__}, expected {EXPECTED['ace_group_action'][0]}"
            raise AdapterError(f"adapter {self.name!r}: ace_group_action returned None for {expected}")
        return found

    def call(self, hook: str, **arguments: Any) -> Any:
        """Call this plugin's implementation of a hook and check the result; raise an AdapterError if either fails."""
        if not self.has(hook):
            raise AdapterError(f"{self} does not implement {hook}; it implements {', '.join(self.hooks) or 'no hook'}")
        try:
            result = self.implementations[hook]
            result = result.load() if isinstance(result, LazyHook) else result
            if inspect.isroutine(result):  # a LazyHook may name the result itself instead of a function
                accepted = inspect.signature(result).parameters
                result = result(**{name: value for name, value in arguments.items() if name in accepted})
        except AceError:
            raise
        except (Exception, SystemExit) as error:  # a plugin that calls sys.exit must not end the process
            raise AdapterError(f"{self}: {hook} failed: {one_line(error)}") from error
        if not (result is None and hook in OPTIONAL) and not EXPECTED[hook][1](result):
            found = " ".join(f"{type(result).__name__} {reprlib.repr(result)}".split())
            place = f" for {arguments['site'].name!r}" if "site" in arguments else ""
            raise AnswerError(f"adapter {self.name!r}: {hook} returned {found}{place}, expected {EXPECTED[hook][0]}")
        return result


def one_line(error: BaseException) -> str:
    """Return the type and message of an error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split()) or 'no message'}"


def requirements(declared: Sequence[str]) -> tuple[Requires, ...]:
    """Return the requirements of an adapter. Those of its extra ``upstream`` are requirements on the upstream."""
    found: list[Requires] = []
    for each in map(Requirement, declared):
        plain = each.marker is None or each.marker.evaluate({"extra": ""})
        if plain or (each.marker is not None and each.marker.evaluate({"extra": "upstream"})):
            # The lower bound comes first, as people write it: "torch>=2.5,<3".
            wanted = each.name + ",".join(sorted(map(str, each.specifier), reverse=True))
            installed = next(iter(importlib.metadata.distributions(name=each.name)), None)
            found.append(Requires(wanted, installed.version if installed else None, upstream=not plain))
    return tuple(found)
