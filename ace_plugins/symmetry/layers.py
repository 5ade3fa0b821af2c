"""Finds where symmetry breaks: compares every submodule's output before and after the model's inputs are transformed.

The action of the group on hidden features is usually unknown, but two tests do not need it. First, for features in an
orthonormal basis (scalars, vectors, e3nn's irreps, images), a rotation multiplies all rows by one orthogonal matrix.
This is the case if and only if the Gram matrix of the rows does not change. Second, under a translation of all
positions, such features stay unchanged, or all rows shift by one vector.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from .actions import Action, GroupAction
from .groups import Element, Euclidean, Rigid
from .measure import as_call, as_double, evaluate, forward_names, preserve_state
from .parts import iterate_tensors

ROWS = 256
"""Largest number of rows of a tensor that are compared. It limits the size of the Gram matrix, rows x rows."""
SHIFTS = 2
"""Number of random translations that are tried, for groups with translations."""
GROWTH = 100.0
"""Factor between the errors of a layer's output and input, up to which the growth counts as rounding."""
ROUNDING = 1e-14
"""Smallest error of a layer's input that is assumed; smaller errors are replaced by this value."""
NOISE = 1e-15
"""Rounding error in float64, relative to the norm of a layer's inputs and outputs."""
BEHAVIOURS = ("invariant", "shifts", "turns", "changes", "unknown")


class KnownTensor(Protocol):
    """An input or output of a submodule with a known action."""

    @property
    def action(self) -> Action:
        """The action of the group on the tensor."""

    def pick(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> Any:
        """Return the tensor, or None if this call has none."""


@dataclass(frozen=True)
class Features:
    """The known tensors that a submodule reads and returns."""

    reads: tuple[KnownTensor, ...] = ()
    gives: tuple[KnownTensor, ...] = ()


@dataclass(frozen=True)
class LayerSymmetry:
    """Result for one call of a submodule, over all group elements that were tried."""

    name: str
    """Dotted path of the submodule, with ``#2`` for its second call in a forward pass; "" is the model itself."""
    kind: str
    """Class of the submodule."""
    behaviour: str
    """How the output changes: "invariant" (not at all), "turns" (all rows by one orthogonal matrix, or by the site's
    known action), "shifts" (all rows by one vector), "changes" (in another way) or "unknown"."""
    before: float | None
    """Largest relative error of the inputs; None if they could not be compared."""
    after: float | None
    """Largest relative error of the outputs; None if they could not be compared."""
    known: bool
    """True if the action on the output is known, so that the result does not depend on the Gram matrix only."""
    begins: bool
    """True if the error is far larger than the error of the inputs, and this is so in no inner submodule."""


@dataclass
class _Visit:
    """One call of a submodule in one forward pass."""

    module: str
    kind: str
    parent: int | None
    inputs: list[Tensor]
    outputs: list[Tensor] = field(default_factory=list)
    reads: list[Tensor | None] = field(default_factory=list)
    gives: list[Tensor | None] = field(default_factory=list)


class _Recorder:
    """Records the inputs and outputs of every submodule in one forward pass."""

    def __init__(self, features: Mapping[str, Features]) -> None:
        self.features = features
        self.visits: list[_Visit] = []
        self.open: list[int] = []

    def enter(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        # Copy the inputs now: a module may write to them.
        visit = _Visit(name, type(module).__name__, self.open[-1] if self.open else None, _rows((args, kwargs)))
        visit.reads = _pick(self.features.get(name, Features()).reads, args, kwargs, None)
        self.open.append(len(self.visits))
        self.visits.append(visit)

    def leave(
        self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any
    ) -> None:
        visit = self.visits[self.open.pop()]
        visit.outputs = _rows(output)
        visit.gives = _pick(self.features.get(name, Features()).gives, args, kwargs, output)

    @contextmanager
    def watch(self, model: nn.Module, skip: Sequence[str]) -> Iterator[None]:
        """Record the submodules of a model, except those below one of the paths in ``skip``."""
        handles = []
        for name, module in model.named_modules():
            # TorchScript modules run their submodules without calling hooks.
            if isinstance(module, torch.jit.ScriptModule) or any(f"{name}.".startswith(f"{s}.") for s in skip):
                continue
            handles.append(module.register_forward_pre_hook(partial(self.enter, name), with_kwargs=True))
            handles.append(module.register_forward_hook(partial(self.leave, name), with_kwargs=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _pick(
    known: Sequence[KnownTensor], args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any
) -> list[Tensor | None]:
    found = [each.pick(args, kwargs, output) for each in known]
    return [None if tensor is None else tensor.detach().clone() for tensor in found]


def _rows(value: Any) -> list[Tensor]:
    """Return copies of a value's floating point tensors, as [rows, features] in float64 with at most ``ROWS`` rows."""
    found = []
    for _, tensor in iterate_tensors(value):
        if tensor.numel() and (tensor.is_floating_point() or tensor.is_complex()):
            x = tensor.detach()
            x = torch.view_as_real(x) if x.is_complex() else x
            x = x.reshape(len(x) if x.dim() else 1, -1)
            if len(x) > ROWS:
                x = x[torch.linspace(0, len(x) - 1, ROWS, device=x.device).long()]
            found.append(as_double(x).clone())
    return found


@dataclass
class _Worst:
    """The largest errors of a layer so far. None means that some comparison was impossible."""

    before: float | None = 0.0
    after: float | None = 0.0
    behaviour: str = "invariant"

    def add(self, before: float | None, after: float | None, behaviour: str) -> None:
        self.before, self.after = _largest(self.before, before), _largest(self.after, after)
        self.behaviour = max(self.behaviour, behaviour, key=BEHAVIOURS.index)


def _largest(*errors: float | None) -> float | None:
    known = [error for error in errors if error is not None]
    return max(known) if len(known) == len(errors) else None


def measure_layers(
    model: nn.Module,
    action: GroupAction,
    batch: Any,
    *,
    samples: int,
    seed: int,
    floor: float,
    features: Mapping[str, Features] | None = None,
    skip: Sequence[str] = (),
) -> list[LayerSymmetry]:
    """Return the symmetry of every submodule call in one forward pass, in the order of the calls.

    Rotations and translations are tried separately. Otherwise a layer that adds a constant to its vectors could be
    mistaken for one that translates with its input.
    Relative errors up to ``floor`` count as rounding. ``features`` maps the name of a submodule to its tensors with a
    known action. ``skip`` names submodules to leave out, with everything below them.
    """
    args, kwargs = as_call(batch)
    names = forward_names(model)
    known = {"": Features(), **(features or {})}

    def run(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[_Visit]:
        recorder = _Recorder(known)
        with recorder.watch(model, skip):
            evaluate(model, args, kwargs, seed)
        return recorder.visits

    with torch.inference_mode(False), preserve_state(model):
        evaluate(model, args, kwargs, seed)  # some models register hooks in their first forward pass
        first = run(args, kwargs)
        worst = [_Worst() for _ in first]
        for element, shift in _sample_elements(action, samples, seed):
            second: Sequence[_Visit | None] = run(*action.act_on_inputs(element, names, args, kwargs))
            if [visit.module for visit in first] != [visit.module for visit in second if visit is not None]:
                second = [None] * len(first)  # the model called different submodules this time
            for each, one, two in zip(worst, first, second, strict=True):
                each.add(*_compare(one, two, element, shift, floor, known.get(one.module, Features())))
    return _summarise(first, worst, floor, known)


def _sample_elements(action: GroupAction, samples: int, seed: int) -> Iterator[tuple[Element, bool]]:
    """Yield random elements without translation, then pure translations; the flag is True for the translations."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(samples):
        yield action.group.sample(generator, scale=0.0), False
    if isinstance(action.group, Euclidean) and action.group.translations:
        for _ in range(SHIFTS):
            drawn = action.group.sample(generator, scale=1.0)
            yield Rigid(torch.eye(drawn.dimension, dtype=torch.float64), drawn.translation), True


def _compare(
    one: _Visit, two: _Visit | None, element: Element, shift: bool, floor: float, known: Features
) -> tuple[float | None, float | None, str]:
    """Return the relative errors of inputs and outputs, and the behaviour of the outputs."""
    if two is None:
        return None, None, "unknown"
    # Features that cancel to zero consist of rounding errors only, so their relative error has no meaning.
    noise = NOISE if floor < 1e-6 else 1e-6
    least = noise / floor * max((float(x.norm()) for x in (*one.inputs, *one.outputs)), default=0.0)
    before, _ = _compare_rows(one.inputs, two.inputs, shift, floor, least)
    after, behaviour = _compare_rows(one.outputs, two.outputs, shift, floor, least)
    read = _known_error(known.reads, one.reads, two.reads, element, least)
    given = _known_error(known.gives, one.gives, two.gives, element, least)
    return _largest(before, read), _largest(after, given), "changes" if given > floor else behaviour


def _known_error(
    known: Sequence[KnownTensor],
    one: Sequence[Tensor | None],
    two: Sequence[Tensor | None],
    element: Element,
    least: float,
) -> float:
    """Return the largest relative error of tensors with a known action."""
    errors = [0.0]
    for each, x, y in zip(known, one, two, strict=True):
        if x is None or y is None:
            continue
        expected = as_double(each.action(element, x))
        errors.append(_ratio(expected - as_double(y), expected, least) if x.shape == y.shape else math.inf)
    return max(errors)


def _compare_rows(
    one: Sequence[Tensor], two: Sequence[Tensor], shift: bool, floor: float, least: float
) -> tuple[float | None, str]:
    """Return the largest error over pairs of tensors, and the least symmetric behaviour."""
    if [x.shape for x in one] != [x.shape for x in two]:
        return None, "unknown"
    found = [(0.0, "invariant"), *(_change(x, y, shift, floor, least) for x, y in zip(one, two, strict=True))]
    return _largest(*(error for error, _ in found)), max((each for _, each in found), key=BEHAVIOURS.index)


def _change(x: Tensor, y: Tensor, shift: bool, floor: float, least: float) -> tuple[float | None, str]:
    """Return the relative distance of y [rows, features] from x, up to a shift or rotation of all rows, and its kind.

    The distance is relative to the norm of x, or to ``least`` if that is larger.
    """
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


def _summarise(
    visits: Sequence[_Visit], worst: Sequence[_Worst], floor: float, features: Mapping[str, Features]
) -> list[LayerSymmetry]:
    """Combine the calls with their errors, and find the calls in which an error begins."""
    begins = [
        each.before is not None
        and each.after is not None
        and each.after > max(floor, GROWTH * max(each.before, ROUNDING))
        for each in worst
    ]
    outer = set()
    for number, visit in enumerate(visits):
        parent = visit.parent if begins[number] else None
        while parent is not None:
            outer.add(parent)
            parent = visits[parent].parent
    calls: dict[str, int] = {}
    layers = []
    for number, (visit, each) in enumerate(zip(visits, worst, strict=True)):
        calls[visit.module] = count = calls.get(visit.module, 0) + 1
        name = visit.module if count == 1 else f"{visit.module}#{count}"
        known = bool(features.get(visit.module, Features()).gives)
        begin = begins[number] and number not in outer
        layers.append(LayerSymmetry(name, visit.kind, each.behaviour, each.before, each.after, known, begin))
    return layers
