"""Taps resolved: which argument of which forward a branch reads."""

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
