"""Where a model's symmetry breaks: how every submodule's output changes when the model's inputs are turned.

How a group acts on hidden features is mostly unknown. Two things can be said all the same. Features that turn in an
orthonormal basis (scalars, vectors, e3nn's irreps, images) are turned by one orthogonal matrix for all rows, whichever
it is, and that is so exactly if the products of rows with each other, their Gram matrix, stay what they are. And when
all positions are shifted, such features stay, or are shifted by one vector for all rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from .actions import Action, GroupAction
from .groups import Element, Euclidean, Rigid
from .measure import as_call, as_double, evaluate, forward_names, untouched
from .parts import tensors_in

ROWS = 256
"""Rows of a tensor that are looked at: their products with each other are kept."""
SHIFTS = 2
"""Random translations that are tried, each by itself."""
GROWTH = 100.0
"""Rounding grows from layer to layer, but not so many times in one of them."""
ROUNDING = 1e-14
"""What an error is taken for that is smaller."""
NOISE = 1e-15
"""Rounding, as a share of what goes into a layer, where the floor is that of float64."""


class Known(Protocol):
    """A tensor that goes into or comes out of a submodule, and how the group acts on it."""

    @property
    def action(self) -> Action:
        """How it turns."""

    def pick(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> Any:
        """The tensor; None if this call has none."""


@dataclass(frozen=True)
class Features:
    """What is known of one submodule's features: of those it reads, and of those it gives."""

    reads: tuple[Known, ...] = ()
    gives: tuple[Known, ...] = ()


@dataclass(frozen=True)
class Layer:
    """One call of a submodule, under all elements that were tried.

    ``before`` and ``after`` are the largest relative errors of what goes in and what comes out; None where nothing
    could be compared. ``behaviour`` says what the output does: "invariant", "turns" (as one orthogonal matrix does, or
    as the site's action says), "shifts" (all rows by one vector), "changes" (none of these) or "unknown".
    """

    name: str
    """The submodule's dotted path, with ``#2`` for its second call in a forward; "" is the model itself."""
    kind: str
    behaviour: str
    before: float | None
    after: float | None
    known: bool
    """Judged by actions that are known, and not by the Gram matrix alone."""
    begins: bool
    """The error begins here: it is far above that of what goes in, and in none of the submodules inside."""


@dataclass
class _Visit:
    """One call of a submodule in one forward."""

    module: str
    kind: str
    parent: int | None
    inputs: list[Tensor]
    outputs: list[Tensor] = field(default_factory=list)
    reads: list[Tensor | None] = field(default_factory=list)
    gives: list[Tensor | None] = field(default_factory=list)


class _Watch:
    """Notes what goes into and comes out of every submodule in one forward."""

    def __init__(self, features: Mapping[str, Features]) -> None:
        self.features = features
        self.visits: list[_Visit] = []
        self.open: list[int] = []

    def enter(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        # Noted now: a module may write into what it is given.
        visit = _Visit(name, type(module).__name__, self.open[-1] if self.open else None, _rows((args, kwargs)))
        visit.reads = _picked(self.features.get(name, Features()).reads, args, kwargs, None)
        self.open.append(len(self.visits))
        self.visits.append(visit)

    def leave(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> None:
        visit = self.visits[self.open.pop()]
        visit.outputs = _rows(output)
        visit.gives = _picked(self.features.get(name, Features()).gives, args, kwargs, output)


def _picked(
    known: Sequence[Known], args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any
) -> list[Tensor | None]:
    found = [each.pick(args, kwargs, output) for each in known]
    return [None if tensor is None else tensor.detach().clone() for tensor in found]


def _rows(value: Any) -> list[Tensor]:
    """The floating point tensors in it, each as a copy [rows, features] in float64 with ``ROWS`` rows at most."""
    found = []
    for _, tensor in tensors_in(value):
        if tensor.numel() and (tensor.is_floating_point() or tensor.is_complex()):
            x = tensor.detach()
            x = torch.view_as_real(x) if x.is_complex() else x
            x = x.reshape(len(x) if x.dim() else 1, -1)
            if len(x) > ROWS:
                x = x[torch.linspace(0, len(x) - 1, ROWS, device=x.device).long()]
            found.append(as_double(x).clone())
    return found


@contextmanager
def _watched(model: nn.Module, watch: _Watch, skip: Sequence[str]) -> Iterator[None]:
    def enter(name: str) -> Any:
        return lambda module, args, kwargs: watch.enter(name, module, args, kwargs)

    def leave(name: str) -> Any:
        return lambda module, args, kwargs, output: watch.leave(name, args, kwargs, output)

    handles = []
    for name, module in model.named_modules():
        # What TorchScript runs inside is nobody's layer.
        if isinstance(module, torch.jit.ScriptModule) or any(f"{name}.".startswith(f"{s}.") for s in skip):
            continue
        handles.append(module.register_forward_pre_hook(enter(name), with_kwargs=True))
        handles.append(module.register_forward_hook(leave(name), with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@dataclass
class _Judged:
    before: float | None = 0.0
    after: float | None = 0.0
    behaviour: str = "invariant"

    def add(self, before: float | None, after: float | None, behaviour: str) -> None:
        self.before = None if before is None or self.before is None else max(self.before, before)
        self.after = None if after is None or self.after is None else max(self.after, after)
        order = ("invariant", "shifts", "turns", "changes", "unknown")
        self.behaviour = max(self.behaviour, behaviour, key=order.index)


def by_layer(
    model: nn.Module,
    action: GroupAction,
    batch: Any,
    *,
    samples: int,
    seed: int,
    floor: float,
    features: Mapping[str, Features] | None = None,
    skip: Sequence[str] = (),
) -> list[Layer]:
    """Every call of a submodule in one forward, in the order in which they begin.

    ``floor`` is the relative error that rounding may come to. Submodules whose path begins with one of ``skip`` are
    passed over. Rotations and translations are tried apart from each other: a shift of all rows would hide a constant
    that is added to vectors.
    """
    args, kwargs = as_call(batch)
    names = forward_names(model)
    known = {"": Features(), **(features or {})}
    with torch.inference_mode(False), untouched(model):
        evaluate(model, args, kwargs, seed)  # whoever hangs hooks on a first forward has done so now
        first = _forward(model, args, kwargs, seed, known, skip)
        judged = [_Judged() for _ in first]
        for element, shift in _elements(action, samples, seed):
            turned = action.act_on_inputs(element, names, args, kwargs)
            second = _forward(model, *turned, seed, known, skip)
            if [visit.module for visit in first] != [visit.module for visit in second]:
                second = [None] * len(first)  # another way through the model
            for each, one, two in zip(judged, first, second, strict=True):
                each.add(*_compared(one, two, element, shift, floor, known))
    return _layers(first, judged, floor, known)


def _forward(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    seed: int,
    features: Mapping[str, Features],
    skip: Sequence[str],
) -> list[Any]:
    watch = _Watch(features)
    with _watched(model, watch, skip):
        evaluate(model, args, kwargs, seed)
    return watch.visits


def _elements(action: GroupAction, samples: int, seed: int) -> Iterator[tuple[Element, bool]]:
    """Random elements without translation, then translations alone."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(samples):
        yield action.group.sample(generator, scale=0.0), False
    if isinstance(action.group, Euclidean) and action.group.translations:
        for _ in range(SHIFTS):
            drawn = action.group.sample(generator, scale=1.0)
            yield Rigid(torch.eye(drawn.dimension, dtype=torch.float64), drawn.translation), True


def _compared(
    one: _Visit, two: _Visit | None, element: Element, shift: bool, floor: float, features: Mapping[str, Features]
) -> tuple[float | None, float | None, str]:
    if two is None:
        return None, None, "unknown"
    known = features.get(one.module, Features())
    # What cancels out leaves rounding, of which a relative error would say nothing.
    noise = NOISE if floor < 1e-6 else 1e-6
    least = noise / floor * max((float(x.norm()) for x in (*one.inputs, *one.outputs)), default=0.0)
    before, _ = _worst(one.inputs, two.inputs, shift, floor, least)
    after, behaviour = _worst(one.outputs, two.outputs, shift, floor, least)
    read = _as_said(known.reads, one.reads, two.reads, element, least)
    given = _as_said(known.gives, one.gives, two.gives, element, least)
    if given > floor:
        behaviour = "changes"
    return _larger(before, read), _larger(after, given), behaviour


def _larger(found: float | None, said: float) -> float | None:
    return None if found is None else max(found, said)


def _as_said(
    known: Sequence[Known], one: Sequence[Tensor | None], two: Sequence[Tensor | None], element: Element, least: float
) -> float:
    """The relative error by actions that are known."""
    errors = [0.0]
    for each, x, y in zip(known, one, two, strict=True):
        if x is None or y is None:
            continue
        expected = as_double(each.action(element, x))
        errors.append(_ratio(expected - as_double(y), expected, least) if x.shape == y.shape else math.inf)
    return max(errors)


def _worst(
    one: Sequence[Tensor], two: Sequence[Tensor], shift: bool, floor: float, least: float
) -> tuple[float | None, str]:
    if [x.shape for x in one] != [x.shape for x in two]:
        return None, "unknown"
    judged = _Judged()
    for x, y in zip(one, two, strict=True):
        judged.add(0.0, *_change(x, y, shift, floor, least))
    return judged.after, judged.behaviour


def _change(x: Tensor, y: Tensor, shift: bool, floor: float, least: float) -> tuple[float | None, str]:
    """How far y [rows, features] is from x moved as a whole: relative error, and what it does. x counts as no smaller
    than ``least``."""
    if not (x.isfinite().all() and y.isfinite().all()):
        return None, "unknown"
    step = y - x
    same = _ratio(step, x, least)
    if same <= floor:
        return same, "invariant"
    if shift:
        moved = _ratio(step - step.mean(0), x, least)
    else:
        gram = x @ x.T
        moved = _ratio(y @ y.T - gram, gram, least**2)
    if moved <= floor:
        return moved, "shifts" if shift else "turns"
    return min(same, moved), "changes"


def _ratio(difference: Tensor, to: Tensor, least: float) -> float:
    size, norm = float(difference.norm()), max(float(to.norm()), least)
    return size / norm if norm else (math.inf if size else 0.0)


def _layers(
    visits: Sequence[_Visit], judged: Sequence[_Judged], floor: float, features: Mapping[str, Features]
) -> list[Layer]:
    begins = []
    for each in judged:
        known = each.before is not None and each.after is not None
        begins.append(known and each.after > max(floor, GROWTH * max(each.before, ROUNDING)))  # type: ignore[type-var,operator]
    inside = set()
    for number, visit in enumerate(visits):
        if begins[number]:
            above = visit.parent
            while above is not None:
                inside.add(above)
                above = visits[above].parent
    calls: dict[str, int] = {}
    layers = []
    for number, (visit, each) in enumerate(zip(visits, judged, strict=True)):
        calls[visit.module] = count = calls.get(visit.module, 0) + 1
        layers.append(
            Layer(
                name=visit.module if count == 1 else f"{visit.module}#{count}",
                kind=visit.kind,
                behaviour=each.behaviour,
                before=each.before,
                after=each.after,
                known=bool(features.get(visit.module, Features()).gives),
                begins=begins[number] and number not in inside,
            )
        )
    return layers
