"""Arguments of forwards: which one a branch reads, and which of them say that nothing is trained."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..contract.sites import Tap
from ..errors import AdapterError
from ..symmetry.parts import part_of


@dataclass(frozen=True)
class Argument:
    """A tap resolved against the forward it listens to: position, name and attributes to walk."""

    index: int
    name: str
    attributes: tuple[str, ...] = ()

    def pick(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        value = args[self.index] if 0 <= self.index < len(args) else kwargs[self.name]
        for attribute in self.attributes:
            value = part_of(value, attribute, f"argument {self.name!r}")
        return value


@dataclass(frozen=True)
class Condition:
    """An argument of a forward that has a certain value, because the call says so or by default."""

    argument: Argument
    default: Any
    value: Any

    def holds(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        given = self.argument.index < len(args) or self.argument.name in kwargs
        return bool((self.argument.pick(args, kwargs) if given else self.default) == self.value)


def conditions(wanted: Mapping[str, Any], module: nn.Module) -> tuple[Condition, ...]:
    """What these values of arguments mean for the module's forward; nothing if it does not have all of them."""
    parameters = inspect.signature(module.forward).parameters
    if not wanted.keys() <= parameters.keys():
        return ()
    places = {name: Argument(index, name) for index, name in enumerate(parameters)}
    return tuple(Condition(places[name], parameters[name].default, value) for name, value in wanted.items())


def resolve(tap: Tap, module: nn.Module, where: str) -> Argument:
    """The argument a tap means, checked against the signature of the module's forward."""
    parameters = inspect.signature(module.forward).parameters
    names = list(parameters)
    first, *attributes = [tap.argument] if isinstance(tap.argument, int) else tap.argument.split(".")
    kinds = {parameter.kind for parameter in parameters.values()}
    if isinstance(first, int):
        if first < len(names):
            return Argument(first, names[first])
        if inspect.Parameter.VAR_POSITIONAL in kinds:
            return Argument(first, "")
    elif first in names:
        return Argument(names.index(first), first, tuple(map(str, attributes)))
    elif inspect.Parameter.VAR_KEYWORD in kinds:
        return Argument(-1, first, tuple(map(str, attributes)))
    raise AdapterError(f"{where} reads argument {first!r} of a forward that takes ({', '.join(names)})")
