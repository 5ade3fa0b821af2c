"""Access to parts of structured values by name: tuple items, dict keys, attributes of graphs and other objects."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from ..errors import AdapterError, one_of

if TYPE_CHECKING:
    from torch import Tensor


def positional_names(names: Sequence[str]) -> list[str]:
    """Return the names of parameters that can be passed by position: those before ``*rest`` or a bare ``*``."""
    return list(takewhile(lambda name: not name.startswith("*"), names))


def get_argument(name: str, names: Sequence[str], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return an argument of a call by its parameter's name, or None if the call does not pass it."""
    by_position = dict(zip(positional_names(names), args, strict=False))
    return {**by_position, **kwargs}.get(name)


def get_part(value: Any, step: str, where: str) -> Any:
    """Return the part of a value that ``step`` (an index, key or attribute) names; ``where`` names it in errors."""
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
    # A PyG graph returns None for missing x, pos and so on, so look at its keys instead of using hasattr.
    if step not in keys() if callable(keys) else not hasattr(value, step):
        return _MISSING
    return value[step] if isinstance(value, Mapping) else getattr(value, step)


def parse_path(path: str) -> tuple[str, bool]:
    """Return a path without its trailing question mark, and whether the part is required (no question mark)."""
    return path.removesuffix("?"), not path.endswith("?")


def has_part(value: Any, steps: Sequence[str]) -> bool:
    """Return whether the part that is reached by these steps, one after the other, exists and is not None."""
    for step in steps:
        value = None if value is None else _part(value, step)
        if value is None or value is _MISSING:
            return False
    return True


def replace_part(value: Any, step: str, new: Any, where: str) -> Any:
    """Return a shallow copy of a container with one part replaced."""
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
        raise AdapterError(f"{where}: cannot set it on a copy of {type(value).__name__}: {error}") from error
    return changed


def iterate_tensors(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the dotted path and the tensor, for every tensor in a nested value."""
    parts: Mapping[Any, Any] = {}
    if hasattr(value, "is_floating_point"):
        yield path, value
    elif isinstance(value, (tuple, list)):
        parts = dict(enumerate(value))
    elif callable(getattr(value, "keys", None)):
        parts = {key: value[key] for key in value.keys()}  # noqa: SIM118 (iterating over a PyG graph gives pairs)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = vars(value)
    for name, part in parts.items():
        yield from iterate_tensors(part, f"{path}.{name}" if path else str(name))
