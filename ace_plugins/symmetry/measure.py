"""Measurement of a model's equivariance error on a batch, with random group elements."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import AdapterError, ConfigError
from .actions import GroupAction
from .groups import Element
from .parts import rebuild


@dataclass(frozen=True)
class EquivarianceError:
    """The distance of rho_Y(g) f(x) from f(rho_X(g) x), averaged over random elements g.

    A row is a vector along an output's last dimension; in a 1-d output each entry is a row. Several outputs are treated
    as one: the mean is over the rows of all outputs, the norms are over all entries of all outputs.
    """

    absolute: float
    """Mean 2-norm of the rows of the difference."""
    relative: float
    """Norm of the whole difference divided by the norm of f(x); 0 if both are 0, infinite if only f(x) is 0."""
    samples: int
    """Number of random elements."""
    group: str
    """Name of the group."""

    def __float__(self) -> float:
        return self.absolute

    def to_dict(self) -> dict[str, float | int | str]:
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class Call:
    """The arguments of one forward pass."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


def as_call(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return (args, kwargs). A tuple holds positional arguments, a dict keyword arguments, other values one argument.

    For a forward pass that takes one dict or tuple, use ``Call(args=(batch,))``.
    """
    if isinstance(batch, Call):
        return tuple(batch.args), dict(batch.kwargs)
    if isinstance(batch, tuple):
        return tuple(batch), {}
    if isinstance(batch, dict):
        return (), dict(batch)
    return (batch,), {}


def forward_names(model: nn.Module) -> list[str]:
    """Return the names of the parameters of the forward pass in order; ``*rest`` and ``**more`` keep their stars."""
    stars: dict[Any, str] = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    while True:
        parameters = inspect.signature(model.forward).parameters.values()
        names = [stars.get(p.kind, "") + p.name for p in parameters]
        # DataParallel, DDP, torch.compile and averaged models pass all their arguments to the model that they wrap.
        inner = getattr(model, "_orig_mod", getattr(model, "module", getattr(model, "model", None)))
        if not isinstance(inner, nn.Module) or not names or not names[0].startswith("*"):
            return names
        model = inner


def measure(
    model: nn.Module, action: GroupAction, batch: Any, *, samples: int = 5, seed: int = 0, scale: float = 1.0
) -> EquivarianceError:
    """Measure the equivariance error of a model in eval mode on a batch (see `as_call`), with ``samples`` elements.

    ``seed`` determines the elements and the random numbers of every forward pass. ``scale`` is the standard deviation
    of the translations, in the units of the positions. Gradients are enabled even if the caller disabled them, because
    many models differentiate an energy in their forward pass. The batch, the parameters' ``.grad``, the training flags
    and torch's global random streams do not change.
    """
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
    elements = (action.group.sample(generator, scale=scale) for _ in range(samples))
    absolute, relative = [], []
    # Tensors made in inference mode cannot be differentiated, so leave this mode.
    with torch.inference_mode(False), preserve_state(model):
        output = evaluate(model, args, kwargs, seed)
        # Applying the identity raises an error if the types of the outputs do not fit.
        compared = action.tensors_to_compare(action.act_on_outputs(action.group.identity(), output))
        norm = math.hypot(*(float(as_double(y).norm()) for y in compared.values()))
        for pair in compare_orders(model, action, (args, kwargs), output, elements, seed):
            rows, difference = _distance(*pair)
            absolute.append(rows)
            relative.append(difference / norm if norm else (math.inf if difference else 0.0))
    return EquivarianceError(sum(absolute) / samples, sum(relative) / samples, samples, action.group.name)


def compare_orders(
    model: nn.Module, action: GroupAction, call: tuple[Any, Any], output: Any, elements: Iterable[Element], seed: int
) -> Iterator[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """Yield the tensors of rho_Y(g) f(x) and f(rho_X(g) x) for each element g; ``output`` is f(x)."""
    names = forward_names(model)
    for element in elements:
        transformed = evaluate(model, *action.act_on_inputs(element, names, *call), seed)
        yield action.tensors_to_compare(action.act_on_outputs(element, output)), action.tensors_to_compare(transformed)


def _distance(expected: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> tuple[float, float]:
    """Return the mean norm of the rows of the difference, and the norm of the whole difference."""
    rows = []
    shapes = [{name: list(y.shape) for name, y in outputs.items()} for outputs in (expected, found)]
    if shapes[0] != shapes[1]:
        raise AdapterError(f"the shapes of the outputs depend on the group element: {shapes[0]} became {shapes[1]}")
    for name, y in expected.items():
        difference = as_double(y) - as_double(found[name])
        rows.append((difference.flatten(0, -2) if y.ndim > 1 else difference.reshape(-1, 1)).norm(dim=-1))
    if not sum(r.numel() for r in rows):
        raise AdapterError(f"the output has no values to compare, found {shapes[0] or 'no tensor with an action'}")
    every = torch.cat(rows)
    return float(every.mean()), float(every.norm())


def measure_distance(one: Mapping[str, Tensor], two: Mapping[str, Tensor]) -> float:
    """Return the norm of the difference between two outputs, with all their tensors taken as one vector."""
    return math.hypot(*(float((as_double(y) - as_double(two[name])).norm()) for name, y in one.items()))


def as_double(x: Tensor) -> Tensor:
    """Return a copy of a tensor on the CPU in double precision."""
    return x.cpu().to(torch.complex128 if x.is_complex() else torch.float64)


def evaluate(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], seed: int) -> Any:
    """Return the detached output of a forward pass on clones of its arguments, with gradients enabled.

    The random numbers follow from ``seed``, and the global random streams are restored.
    """
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()  # type: ignore[no-untyped-call]
    with torch.random.fork_rng(devices=devices), torch.enable_grad():
        # torch.manual_seed would also seed devices that fork_rng does not restore.
        torch.default_generator.manual_seed(seed)
        for device in devices:
            torch.cuda.default_generators[device].manual_seed(seed)
        # Clone the output: some models return a buffer that their next forward pass overwrites.
        return map_tensors(model(*clone(args), **clone(dict(kwargs))), lambda tensor: tensor.detach().clone())


def clone(value: Any) -> Any:
    """Return a copy with detached clones of all tensors, which keep their requires_grad flag."""
    return map_tensors(value, lambda tensor: tensor.detach().clone().requires_grad_(tensor.requires_grad))


def map_tensors(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Return a copy of a nested value with ``function`` applied to each tensor in it."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, (tuple, list)):
        return rebuild(value, [map_tensors(item, function) for item in value])
    if hasattr(value, "clone") and not isinstance(value, dict):
        if hasattr(value, "apply"):  # a PyG graph: its clone() does not detach
            return copy.copy(value).apply(lambda part: map_tensors(part, function))
        with torch.no_grad():
            return value.clone()
    copied = copy.copy(value)  # keeps the class of the dict
    parts = copied if isinstance(value, dict) else getattr(copied, "__dict__", {})
    for name, part in parts.items():
        if isinstance(value, dict) or isinstance(part, (Tensor, dict, tuple, list)):
            parts[name] = map_tensors(part, function)
    return copied


@contextmanager
def preserve_state(model: nn.Module) -> Iterator[None]:
    """Switch to eval mode and remove ``.grad``, which a forward pass may set; restore both after the block."""
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
        for module, training in flags:  # model.train() would also change layers frozen in eval mode
            module.training = training


class Averaged(nn.Module):
    """A module that averages a model's outputs over random frames, with one forward pass per frame."""

    def __init__(self, model: nn.Module, action: GroupAction, samples: int, seed: int) -> None:
        super().__init__()
        self.model, self.action, self.samples, self.seed = model, action, samples, seed

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        names = forward_names(self.model)
        generator = torch.Generator().manual_seed(self.seed)
        outputs = []
        for _ in range(self.samples):
            element = self.action.group.sample(generator, scale=0.0)
            turned = self.action.act_on_inputs(element, names, args, kwargs)
            outputs.append(self.action.act_on_outputs(element.inverse(), self.model(*turned[0], **turned[1])))
        return self.action.mean(outputs)
