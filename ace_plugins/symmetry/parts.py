"""Parts of structured values by name: items of tuples, keys of dicts, attributes of graphs and other objects."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from ..errors import AdapterError, one_of

if TYPE_CHECKING:
    from torch import Tensor


def positional(names: Sequence[str]) -> list[str]:
    """The parameters of a forward that can be given by position: those before ``*rest`` or a lone star."""
    return list(takewhile(lambda name: not name.startswith("*"), names))


def argument(name: str, names: Sequence[str], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """An argument of a call by its parameter's name; None if the call leaves it out."""
    if name in kwargs:
        return kwargs[name]
    place = positional(names).index(name) if name in positional(names) else len(args)
    return args[place] if place < len(args) else None


def part_of(value: Any, step: str, where: str) -> Any:
    """One part; ``where`` says in errors what was being read."""
    found = _part(value, step)
    if found is _MISSING:
        known = value.keys() if callable(getattr(value, "keys", None)) else getattr(value, "__dict__", ())
        raise AdapterError(f"{where}: " + one_of(f"part of {type(value).__name__}", step, map(str, known)))
    return found


_MISSING = object()


def _part(value: Any, step: str) -> Any:
    if isinstance(value, (tuple, list)) and step.isdecimal() and int(step) < len(value):
        return value[int(step)]
    keys = getattr(value, "keys", None)
    # a PyG graph answers None for x, pos and others it does not hold, so its keys are asked, not hasattr
    if step not in keys() if callable(keys) else not hasattr(value, step):
        return _MISSING
    return value[step] if isinstance(value, Mapping) else getattr(value, step)


def required(path: str) -> tuple[str, bool]:
    """A path without the question mark that ends it where its part may be missing, and whether it must be there."""
    return path.removesuffix("?"), not path.endswith("?")


def has_part(value: Any, steps: Sequence[str]) -> bool:
    """Whether `part_of` finds something, step by step."""
    for step in steps:
        value = None if value is None else _part(value, step)
        if value is None or value is _MISSING:
            return False
    return True


def with_part(value: Any, step: str, new: Any, where: str) -> Any:
    """A shallow copy of the container, one part replaced."""
    try:
        if isinstance(value, (tuple, list)) and step.isdecimal():
            items = [new if i == int(step) else item for i, item in enumerate(value)]
            return value._make(items) if hasattr(value, "_make") else type(value)(items)
        if hasattr(value, "_replace"):
            return value._replace(**{step: new})
        if dataclasses.is_dataclass(value) and not isinstance(value, (type, Mapping)):
            return dataclasses.replace(value, **{step: new})
        changed = copy.copy(value)
        if isinstance(value, Mapping):
            changed[step] = new
        else:
            setattr(changed, step, new)
    except (AttributeError, TypeError, ValueError) as error:
        raise AdapterError(f"{where}: a copy of {type(value).__name__} cannot take it: {error}") from error
    return changed


def tensors_in(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a structure with its dotted path, which `part_of` walks."""
    parts: Mapping[Any, Any] = {}
    if hasattr(value, "is_floating_point"):
        yield path, value
    elif isinstance(value, (tuple, list)):
        parts = dict(enumerate(value))
    elif callable(getattr(value, "keys", None)):
        keys = value.keys()  # asked for: iterating over a PyG graph gives pairs
        parts = {key: value[key] for key in keys}
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = vars(value)
    for name, part in parts.items():
        yield from tensors_in(part, f"{path}.{name}" if path else str(name))
