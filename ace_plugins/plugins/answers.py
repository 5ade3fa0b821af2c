"""What each hook may answer. A wrong answer is told by plugin, hook, expected and found, before anyone uses it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..contract.sites import Site, Stem
from ..contract.upstreams import Example, Script, Shim, StandIn, Upstream
from ..errors import AdapterError


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
