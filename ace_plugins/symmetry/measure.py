"""How far a model is from equivariant, measured on a batch with random group elements."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import AdapterError, ConfigError
from .actions import GroupAction


@dataclass(frozen=True)
class EquivarianceError:
    """The distance of rho_Y(g) f(x) from f(rho_X(g) x), averaged over ``samples`` random elements g.

    Rows run along an output's last dimension; each entry of a 1-d output is a row. ``absolute`` is the mean
    of the 2-norms of the difference's rows, ``relative`` the norm of the whole difference over the norm of
    f(x) (0 when both vanish, infinite when only f(x) does). Several outputs count as one: the mean is over
    the rows of all of them, the norms over all their entries.
    """

    absolute: float
    relative: float
    samples: int
    group: str

    def __float__(self) -> float:
        return self.absolute

    def to_dict(self) -> dict[str, float | int | str]:
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class Call:
    """The arguments of one forward."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


def as_call(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """(args, kwargs) of a batch: a Call as it says, a tuple as positional arguments, a dict as keyword
    arguments, anything else as the only argument. For a forward that takes one dict or tuple, write
    ``Call(args=(batch,))``."""
    if isinstance(batch, Call):
        return tuple(batch.args), dict(batch.kwargs)
    if isinstance(batch, tuple):
        return tuple(batch), {}
    if isinstance(batch, dict):
        if odd := [key for key in batch if not isinstance(key, str)]:
            raise AdapterError(f"batch: expected names as keys, found {odd[0]!r}; use Call(args=(batch,))")
        return (), dict(batch)
    return (batch,), {}


def forward_names(model: nn.Module) -> list[str]:
    """The forward's parameters in order, ``*rest`` and ``**more`` with their stars."""
    stars: dict[Any, str] = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    while True:
        parameters = inspect.signature(model.forward).parameters.values()
        names = [stars.get(p.kind, "") + p.name for p in parameters]
        # DataParallel, DDP, torch.compile and averaged models take anything and hand it on to the model they wrap
        inner = getattr(model, "_orig_mod", getattr(model, "module", getattr(model, "model", None)))
        if not isinstance(inner, nn.Module) or not names or not names[0].startswith("*"):
            return names
        model = inner


def measure(
    model: nn.Module, action: GroupAction, batch: Any, *, samples: int = 5, seed: int = 0, scale: float = 1.0
) -> EquivarianceError:
    """The error of the model in eval mode. The same seed gives the same elements, and the same random numbers to every
    forward. ``scale`` is the standard deviation of the translations, in the units of the positions.

    Gradients are allowed in the forward even where the caller has switched them off, since many models differentiate
    an energy there. The batch, the parameters' ``.grad``, the training flags and torch's global random streams stay as
    they were."""
    if samples < 1:
        raise ConfigError(f"samples: expected at least 1, found {samples}")
    args, kwargs = as_call(batch)
    names = forward_names(model)
    try:
        inspect.signature(model.forward).bind(*args, **kwargs)
    except TypeError as error:
        raise ConfigError(
            f"batch does not fit {type(model).__name__}.forward({', '.join(names)}): {error}; pass a tuple of "
            "positional arguments, a dict of keyword arguments, or Call(args, kwargs)"
        ) from None
    generator = torch.Generator().manual_seed(seed)
    absolute, relative = [], []
    # What is made in inference mode can never be differentiated. Outside it gradients are on, so an input that
    # requires them still does so when it is turned.
    with torch.inference_mode(False), untouched(model):
        output = evaluate(model, args, kwargs, seed)
        compared = action.compared(action.act_on_outputs(action.group.identity(), output))  # checks the types too
        norm = math.hypot(*(float(as_double(y).norm()) for y in compared.values()))
        for _ in range(samples):
            element = action.group.sample(generator, scale=scale)
            expected = action.compared(action.act_on_outputs(element, output))
            turned = action.act_on_inputs(element, names, args, kwargs)
            found = action.compared(evaluate(model, *turned, seed))
            rows, difference = _distance(expected, found)
            absolute.append(rows)
            relative.append(difference / norm if norm else (math.inf if difference else 0.0))
    return EquivarianceError(sum(absolute) / samples, sum(relative) / samples, samples, action.group.name)


def _distance(expected: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> tuple[float, float]:
    """(mean row norm, norm of everything) of the difference."""
    rows = []
    shapes = [{name: list(y.shape) for name, y in outputs.items()} for outputs in (expected, found)]
    if shapes[0] != shapes[1]:
        raise AdapterError(f"outputs changed with the input's orientation: {shapes[0]} became {shapes[1]}")
    for name, y in expected.items():
        difference = as_double(y) - as_double(found[name])
        rows.append((difference.flatten(0, -2) if y.ndim > 1 else difference.reshape(-1, 1)).norm(dim=-1))
    if not sum(r.numel() for r in rows):
        raise AdapterError(f"output: nothing to compare, found {shapes[0] or 'no tensor with an action'}")
    every = torch.cat(rows)
    return float(every.mean()), float(every.norm())


def as_double(x: Tensor) -> Tensor:
    return x.cpu().to(torch.complex128 if x.is_complex() else torch.float64)


def evaluate(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], seed: int) -> Any:
    """The detached output of one forward on clones, with gradients allowed, and with random streams that start at
    ``seed`` and are put back afterwards."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()  # type: ignore[no-untyped-call]
    # Weights made in inference mode cannot be differentiated; a model that does not try to still runs.
    allowed = not any(parameter.is_inference() for parameter in model.parameters())
    with torch.random.fork_rng(devices=devices), torch.set_grad_enabled(allowed):
        # not torch.manual_seed, which also reaches devices that are not put back
        torch.default_generator.manual_seed(seed)
        for device in devices:
            torch.cuda.default_generators[device].manual_seed(seed)
        # the output is copied too: some models return a buffer that their next forward overwrites
        return mapped(model(*clone(args), **clone(dict(kwargs))), lambda tensor: tensor.detach().clone())


def clone(value: Any) -> Any:
    """A copy that shares no tensor with the original, so that a forward which writes into its inputs or asks for
    their gradients does not reach the caller's. Tensors are detached and keep their requires_grad flag, but for those
    in objects that only offer a ``clone()`` of their own."""
    return mapped(value, lambda tensor: tensor.detach().clone().requires_grad_(tensor.requires_grad))


def mapped(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """The same structure, with ``function`` of each tensor in it."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, (tuple, list)):
        items = [mapped(item, function) for item in value]
        return value._make(items) if hasattr(value, "_make") else type(value)(items)
    if hasattr(value, "clone") and not isinstance(value, dict):
        if hasattr(value, "apply"):  # a PyG graph, whose own clone() does not detach
            return copy.copy(value).apply(lambda part: mapped(part, function))
        with torch.no_grad():
            return value.clone()
    copied = copy.copy(value)  # keeps the kind of dict
    parts = copied if isinstance(value, dict) else getattr(copied, "__dict__", {})
    for name, part in parts.items():
        if isinstance(value, dict) or isinstance(part, (Tensor, dict, tuple, list)):
            parts[name] = mapped(part, function)
    return copied


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """In eval mode and without gradients, to which a forward that calls ``backward()`` adds; both are put back."""
    flags = [(module, module.training) for module in model.modules()]
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    try:
        model.eval()
        for parameter, _ in gradients:
            parameter.grad = None
        yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for module, training in flags:  # one by one: model.train() would also wake layers frozen in eval mode
            module.training = training
