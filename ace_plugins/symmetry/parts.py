"""Access by name to arguments and outputs of modules, and to their parts: tuple items, dict keys, attributes."""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from itertools import takewhile
from typing import Any

from torch import Tensor, nn

from ..contract.sites import Site, Tap
from ..errors import AdapterError, one_of

_MISSING = object()


def positional_names(names: Sequence[str]) -> list[str]:
    """Return the names of parameters that can be passed by position: those before ``*rest`` or a bare ``*``."""
    return list(takewhile(lambda name: not name.startswith("*"), names))


def bind_arguments(names: Sequence[str], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by the names of their parameters."""
    return {**dict(zip(positional_names(names), args, strict=False)), **kwargs}


def find_part(value: Any, step: str, missing: Any = None) -> Any:
    """Return the part of a value that ``step`` (an index, key or attribute) names, or ``missing`` if there is none."""
    if isinstance(value, (tuple, list)) and step.isdecimal() and int(step) < len(value):
        return value[int(step)]
    if isinstance(value, Mapping):
        return value.get(step, missing)
    keys = getattr(value, "keys", None)
    # A PyG graph returns None for missing x, pos and so on, so look at its keys instead of using hasattr.
    return getattr(value, step) if (step in keys() if callable(keys) else hasattr(value, step)) else missing


def find_at(value: Any, path: str) -> Any:
    """Return the part of a value at a dotted path; None if there is none."""
    return reduce(find_part, path.split("."), value)


def get_part(value: Any, step: str, where: str) -> Any:
    """Return the item, key or attribute ``step`` of a value. If missing, raise an AdapterError about ``where``."""
    found = find_part(value, step, _MISSING)
    if found is _MISSING:
        known = value.keys() if callable(getattr(value, "keys", None)) else getattr(value, "__dict__", ())
        raise AdapterError(f"{where}: " + one_of(f"part of {type(value).__name__}", step, map(str, known)))
    return found


def replace_part(value: Any, step: str, new: Any, where: str) -> Any:
    """Return a shallow copy of a container with one part replaced."""
    try:
        if isinstance(value, (tuple, list)) and step.isdecimal():
            return rebuild(value, [new if i == int(step) else item for i, item in enumerate(value)])
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
        raise AdapterError(f"{where}: a copy of {type(value).__name__} cannot be changed: {error}") from error
    return changed


def rebuild(value: Any, items: list[Any]) -> Any:
    """Return a tuple, named tuple or list of the same type with other items."""
    return value._make(items) if hasattr(value, "_make") else type(value)(items)


def iterate_tensors(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the dotted path and the tensor, for every tensor in a nested value."""
    parts: Mapping[Any, Any] = {}
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, (tuple, list)):
        parts = dict(enumerate(value))
    elif callable(getattr(value, "keys", None)):
        parts = {key: value[key] for key in value.keys()}  # noqa: SIM118 (iterating over a PyG graph gives pairs)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = vars(value)
    for name, part in parts.items():
        yield from iterate_tensors(part, f"{path}.{name}" if path else str(name))


@dataclasses.dataclass(frozen=True)
class Argument:
    """An argument of a submodule's forward method. If ``attributes`` are given, they lead from its value to a part."""

    index: int
    name: str
    attributes: tuple[str, ...] = ()
    default: Any = dataclasses.field(default=inspect.Parameter.empty, compare=False)
    module: str = ""  # dotted path of the submodule; "" is the model itself

    def pick(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        value = args[self.index] if 0 <= self.index < len(args) else kwargs.get(self.name, self.default)
        if value is inspect.Parameter.empty:
            raise AdapterError(
                f"argument {self.name!r} was not given to the forward pass of {self.module or 'the model'}"
            )
        for attribute in self.attributes:
            value = get_part(value, attribute, f"argument {self.name!r}")
        return value


def find_argument(tap: Tap, path: str, model: nn.Module, where: str) -> Argument:
    """Return the argument that a tap names, of the submodule at ``path``. Raises an AdapterError if there is none."""
    parameters = inspect.signature(model.get_submodule(path).forward).parameters
    names, kinds = list(parameters), {parameter.kind for parameter in parameters.values()}
    rest: list[str] = []
    if isinstance(tap.argument, int):
        index, name = tap.argument, names[tap.argument] if tap.argument < len(names) else ""
        known = bool(name) or inspect.Parameter.VAR_POSITIONAL in kinds
    else:
        name, *rest = tap.argument.split(".")
        index = names.index(name) if name in names else -1
        known = name in names or inspect.Parameter.VAR_KEYWORD in kinds
    if not known:
        found = tap.argument if isinstance(tap.argument, int) else name
        raise AdapterError(f"{where} reads argument {found!r} of a forward pass with arguments ({', '.join(names)})")
    default = parameters[name].default if name in parameters else inspect.Parameter.empty
    return Argument(index, name, tuple(rest), default, path)


def select_output(output: Any, site: Site) -> Any:
    """Return the tensor, within the module's output, to which the site adds its branch."""
    selected = output if site.output is None else get_part(output, str(site.output), f"output of {site.module}")
    if isinstance(selected, Tensor):
        return selected
    parts = dict(enumerate(selected)) if isinstance(selected, (tuple, list)) else selected
    keys = list(parts) if isinstance(parts, dict) else []
    hint = f"set output= to one of {', '.join(map(repr, keys))}" if keys else "correct output="
    what = f"{site.module} returns" if site.output is None else f"output {site.output!r} of {site.module} is"
    raise AdapterError(f"site {site.name!r}: {what} a {type(selected).__name__}, expected a tensor; {hint}")
