"""What each hook may answer. A wrong answer is told by plugin, hook, expected and found, before anyone uses it.

One plugin: where it comes from, what it needs, how it fared, and its answers to hooks.
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import pluggy
from packaging.requirements import InvalidRequirement, Requirement

from ..contract.sites import Site, Stem
from ..contract.upstreams import AnyShim, Example, Script, Shim, StandIn, Upstream
from ..errors import AceError, AdapterError, ConfigError, one_of
from ..settings.config import LOGGERS, SETTINGS, Config, build

if TYPE_CHECKING:
    from torch import nn

    from ..symmetry.actions import GroupAction


class AnswerError(AdapterError):
    """A hook answered something else than the contract says."""


def _an(module: str, name: str) -> Callable[[Any], bool]:
    """Whether something is of a class that is not to be imported here: where its module is not, there is none of it."""

    def fits(value: Any) -> bool:
        found: Any = sys.modules.get(module)
        return found is not None and isinstance(value, getattr(found, name))

    return fits


_is_command = _an("click", "Command")


def _are(kinds: tuple[type, ...]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, Sequence) and all(isinstance(each, kinds) for each in value)


def _by_name(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, Mapping) and all(isinstance(key, str) and fits(value[key]) for key in value)


EXPECTED: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "ace_upstream": ("Upstream(title, models)", lambda value: isinstance(value, Upstream)),
    "ace_layers": ("a list of Site and Stem", _are((Site, Stem))),
    "ace_branch": ("a torch.nn.Module or None", _an("torch.nn", "Module")),
    "ace_group_action": ("GroupAction(group, inputs, outputs)", _an("ace_plugins.symmetry.actions", "GroupAction")),
    "ace_preset": (
        "names and settings, as {'paper': {'dual_lr': 0.1}}",
        _by_name(_by_name(lambda _: True)),
    ),
    "ace_shims": ("a list of Shim and StandIn", _are((Shim, StandIn))),
    "ace_script": ("a Script or None", lambda value: isinstance(value, Script)),
    "ace_example": ("Example(model, args as a tuple, kwargs)", lambda value: isinstance(value, Example)),
    "ace_demo": ("a click.Command", _is_command),
    "ace_datasets": ("click commands by name, as {'nbody': command}", _by_name(_is_command)),
}
"""Per hook that is answered: what is expected, in words, and whether an answer is that."""
OPTIONAL = frozenset({"ace_branch", "ace_script", "ace_group_action"})
"""Hooks that may answer None: the adapter has nothing to say of this site, this command line or this model."""


def misfit(hook: str, answer: Any, about: str = "") -> str:
    """What is wrong with an answer, in words; empty if nothing is. ``about`` says what was asked about."""
    if hook not in EXPECTED or (answer is None and hook in OPTIONAL):
        return ""
    expected, fits = EXPECTED[hook]
    try:
        if fits(answer):
            return ""
    except Exception:  # a mapping or sequence with methods of its own
        pass
    return f"{hook} returned {_shown(answer)}{about}, expected {expected}"


def _shown(answer: Any) -> str:
    """The kind of thing that was found, and of the things in it where the container is right."""
    kind = type(answer).__name__
    try:
        if isinstance(answer, type):
            return f"the class {answer.__name__}"
        if isinstance(answer, Mapping):
            parts = [answer, *(value for value in answer.values() if isinstance(value, Mapping))]
            found = [f"{key!r}: {type(value).__name__}" for part in parts for key, value in part.items()]
        elif isinstance(answer, Sequence) and not isinstance(answer, str):
            found = [type(each).__name__ for each in answer]
        else:
            return kind
    except Exception:
        return kind
    return f"{kind} with {', '.join(dict.fromkeys(found[:4]))}" if found else f"an empty {kind}"


UPSTREAM_EXTRA = "upstream"


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
    """One plugin of the entry point group ``ace_plugins``."""

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
    def patches(self) -> Upstream:
        """What this adapter patches. Observers have been sorted out before."""
        assert self.upstream is not None
        return self.upstream

    @property
    def presets(self) -> dict[str, dict[str, Any]]:
        """The adapter's named settings."""
        named = self.call("ace_preset") if self.has("ace_preset") else {}
        for name, settings in named.items():
            unknown = [one_of("setting", key, SETTINGS) for key in settings if key not in SETTINGS]
            try:
                if not unknown:
                    build({"preset": name}, named)
            except ConfigError as error:
                unknown = [str(error)]
            if unknown:
                raise AdapterError(f"adapter {self.name!r}: ace_preset returned {name!r} with {'; '.join(unknown)}")
        return {name: dict(settings) for name, settings in named.items()}

    @property
    def shims(self) -> list[AnyShim]:
        """The repairs it brings."""
        return list(self.call("ace_shims")) if self.has("ace_shims") else []

    def configured(self, settings: Mapping[str, Any]) -> Config:
        """The settings over the adapter's preset, checked."""
        return self.checked(build(settings, self.presets))

    def checked(self, config: Config) -> Config:
        """The same config, after a check of what depends on the adapter, or on what is installed."""
        if config.log in LOGGERS and not _importable(config.log):
            text = (
                f"log {config.log!r} needs {config.log}, found none installed; pip install 'ace-plugins[{config.log}]'"
            )
            raise ConfigError(problems=[("log", text)])
        if config.device not in {"auto", *(shim.device for shim in self.shims if isinstance(shim, Shim))}:
            text = (
                f"device {config.device!r}: adapter {self.name!r} redirects no CUDA calls, as {self.patches.title} "
                "lets its user choose; expected auto, and the script's own option"
            )
            raise ConfigError(problems=[("device", text)])
        return config

    def example(self, seed: int, model: Any = None) -> Example:
        """The adapter's own small model and batch, or a batch for a model that is given."""
        made: Example = self.call("ace_example", seed=seed, model=model)
        if model is not None and made.model is not model:
            raise AdapterError(
                f"adapter {self.name!r} makes no batch for a model that is given ({type(model).__name__}): expected "
                "ace_example(seed, model) to do so; call audit(model, batch) with a batch of your own"
            )
        return made

    def action(self, model: nn.Module) -> GroupAction:
        """How the group acts on this model, for those who cannot do without."""
        found: GroupAction | None = self.call("ace_group_action", model=model)
        if found is None:
            raise AdapterError(
                f"adapter {self.name!r}: ace_group_action returned None for {type(model).__name__}, "
                f"expected {EXPECTED['ace_group_action'][0]}"
            )
        return found

    def call(self, hook: str, **arguments: Any) -> Any:
        """This plugin's own answer to a hook, without asking the others. It is what the contract says, or an error."""
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
        except (AceError, KeyboardInterrupt):
            raise
        except BaseException as error:  # a plugin that calls sys.exit ends itself, and nobody else
            raise AdapterError(
                f"adapter {self.name!r} ({self.distribution} {self.version}): {hook} failed: {one_line(error)}"
            ) from error
        answer = answers[0] if answers else None
        wrong = misfit(hook, answer, f" for {arguments['site'].name!r}" if "site" in arguments else "")
        if wrong:
            raise AnswerError(f"adapter {self.name!r}: {wrong}")
        return answer


def one_line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or "no message"
    return f"{type(error).__name__}: {text}"


def requirements(declared: Sequence[str], extras: Sequence[str] = (UPSTREAM_EXTRA,)) -> tuple[Requires, ...]:
    """What a distribution needs at run time, and under these extras what it patches."""
    found: list[Requires] = []
    for text in declared:
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            continue
        plain = _applies(requirement, "")
        upstream = not plain and any(_applies(requirement, extra) for extra in extras)
        if plain or upstream:
            # From the lowest up, as people write it.
            wanted = requirement.name + ",".join(sorted(map(str, requirement.specifier), reverse=True))
            found.append(Requires(wanted, _installed(requirement.name), upstream))
    return tuple(found)


def _applies(requirement: Requirement, extra: str) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


def _importable(package: str) -> bool:
    # Without an origin it is a mere folder of that name: wandb makes a folder "wandb" beside the script.
    spec = find_spec(package)
    return spec is not None and spec.origin is not None


def _installed(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
