"""Finds where symmetry breaks: compares every submodule's output before and after the model's inputs are transformed.

The action of the group on hidden features is usually unknown, but two tests do not need it. First, for features in an
orthonormal basis (scalars, vectors, e3nn's irreps, images), a rotation multiplies all rows by one orthogonal matrix.
This is the case if and only if the Gram matrix of the rows does not change. Second, under a translation of all
positions, such features stay unchanged, or all rows shift by one vector.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..contract.sites import Site, Tap
from .actions import Action, GroupAction
from .groups import Element, Euclidean, Rigid
from .measure import as_call, as_double, evaluate, forward_names, preserve_state
from .parts import find_argument, iterate_tensors, select_output

ROWS = 256  # largest number of rows of a tensor that are compared, to limit the size of the Gram matrix
SHIFTS = 2  # number of random translations that are tried, for groups with translations
GROWTH = 100.0  # largest ratio of the error of a layer's output to that of its input that counts as rounding
ROUNDING = 1e-14  # smaller errors of a layer's input are replaced by this value
NOISE = 1e-15  # rounding error in float64, relative to the norm of a layer's inputs and outputs
BEHAVIOURS = ("invariant", "shifts", "turns", "changes", "unknown")
# Copies of tensors, each with its action; tensors with an unknown action are matrices [rows, features] in float64.
Tensors = list[tuple[Tensor, Action | None]]
Change = tuple[float | None, str]  # relative error of tensors, None if they could not be compared, and their behaviour


@dataclass(frozen=True)
class LayerSymmetry:
    """Result for one call of a submodule, over all group elements that were tried."""

    name: str  # dotted path of the submodule, with ``#2`` for its second call in a forward pass; "" is the model itself
    kind: str  # class of the submodule
    # Change of the output: "invariant" (not at all), "turns" (all rows by one orthogonal matrix, or by the site's
    # known action), "shifts" (all rows by one vector), "changes" (in another way) or "unknown".
    behaviour: str
    before: float | None  # largest relative error of the inputs; None if they could not be compared
    after: float | None  # largest relative error of the outputs; None if they could not be compared
    known: bool  # True if the action on the output is known, False if only the Gram matrix was compared
    begins: bool  # True if an error starts here, and in no submodule inside: it is far larger in the outputs


@dataclass
class _Visit:
    """One call of a submodule in one forward pass, and how its tensors change under each group element."""

    module: str
    kind: str
    parent: int | None
    inputs: Tensors
    outputs: Tensors = field(default_factory=list)
    before: list[Change] = field(default_factory=list)
    after: list[Change] = field(default_factory=list)


def _record(model: nn.Module, sites: Sequence[Site], skip: Sequence[str], *call: Any) -> list[_Visit]:
    """Evaluate a model and return the calls of its submodules, without those below one of the paths in ``skip``."""
    visits: list[_Visit] = []
    running: list[int] = []
    known = [(site, *site.acts) for site in sites if site.acts is not None]

    def enter(name: str, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        # Copy the inputs now: a module may write to them.
        inputs = _rows((args, kwargs))
        for site, action, _ in known:
            tap = site.reads if site.module == name and site.through is None else None
            if isinstance(tap, Tap) and tap.module in (None, name):
                read = find_argument(tap, name, model, f"site {site.name!r}").pick(args, kwargs)
                inputs += [] if read is None else [(read.detach().clone(), action)]
        visits.append(_Visit(name, type(module).__name__, running[-1] if running else None, inputs))
        running.append(len(visits) - 1)

    def leave(name: str, module: nn.Module, args: Any, output: Any) -> None:
        own = [(select_output(output, site), action) for site, _, action in known if site.module == name]
        visits[running.pop()].outputs = _rows(output) + [(tensor.detach().clone(), action) for tensor, action in own]

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            # TorchScript modules run their submodules without calling hooks.
            if not isinstance(module, torch.jit.ScriptModule) and not any(f"{name}.".startswith(f"{s}.") for s in skip):
                hooks.enter_context(module.register_forward_pre_hook(partial(enter, name), with_kwargs=True))
                hooks.enter_context(module.register_forward_hook(partial(leave, name)))
        evaluate(model, *call)
    return visits


def _rows(value: Any) -> Tensors:
    """Return copies of a value's floating point tensors, with at most ``ROWS`` rows each."""
    found: Tensors = []
    for _, tensor in iterate_tensors(value):
        if tensor.numel() and (tensor.is_floating_point() or tensor.is_complex()):
            x = tensor.detach()
            x = torch.view_as_real(x) if x.is_complex() else x
            x = x.reshape(len(x) if x.dim() else 1, -1)
            if len(x) > ROWS:
                x = x[torch.linspace(0, len(x) - 1, ROWS, device=x.device).long()]
            found.append((as_double(x).clone(), None))
    return found


def _worst(changes: Iterable[Change]) -> Change:
    """Return the largest error and the least symmetric behaviour; None as the error if one of the errors is None."""
    errors, behaviours = zip((0.0, "invariant"), *changes, strict=True)
    return None if None in errors else max(errors), max(behaviours, key=BEHAVIOURS.index)


def measure_layers(
    model: nn.Module,
    action: GroupAction,
    batch: Any,
    *,
    samples: int,
    seed: int,
    floor: float,
    sites: Sequence[Site] = (),
    skip: Sequence[str] = (),
) -> list[LayerSymmetry]:
    """Return the symmetry of every submodule call in one forward pass, in the order of the calls.

    Relative errors up to ``floor`` count as rounding. ``sites`` give the known actions on inputs and outputs of
    submodules. ``skip`` names submodules to leave out, with everything below them.
    """
    args, kwargs = as_call(batch)
    names, group, generator = forward_names(model), action.group, torch.Generator().manual_seed(seed)
    elements: list[tuple[Element, bool]] = [(group.sample(generator, scale=0.0), False) for _ in range(samples)]
    # Translations are tried separately: otherwise a layer that adds a constant could seem to translate with its input.
    if isinstance(group, Euclidean) and group.translations:
        shifts = [group.sample(generator).translation for _ in range(SHIFTS)]
        elements += [(Rigid(group.identity().matrix, shift), True) for shift in shifts]
    with torch.inference_mode(False), preserve_state(model):
        evaluate(model, args, kwargs, seed)  # some models register hooks in their first forward pass
        visits = _record(model, sites, skip, args, kwargs, seed)
        for element, shift in elements:
            turned = action.act_on_inputs(element, names, args, kwargs)
            again = _record(model, sites, skip, *turned, seed)
            same_calls = [visit.module for visit in visits] == [visit.module for visit in again]
            for number, one in enumerate(visits):
                two = again[number] if same_calls else _Visit(one.module, one.kind, None, [])
                # Features that cancel to zero consist of rounding errors only: their relative error has no meaning.
                noise = NOISE if floor < 1e-6 else 1e-6
                norms = (float(x.norm()) for x, known in (*one.inputs, *one.outputs) if known is None)
                limits = floor, noise / floor * max(norms, default=0.0)
                one.before.append(_compare(one.inputs, two.inputs, element, shift, *limits))
                one.after.append(_compare(one.outputs, two.outputs, element, shift, *limits))
    return _summarise(visits, floor)


def _compare(one: Tensors, two: Tensors, element: Element, shift: bool, floor: float, least: float) -> Change:
    """Compare the tensors of two calls. Errors are relative to the norm of the first, or to ``least`` if larger."""
    if [x.shape for x, _ in one] != [y.shape for y, _ in two]:
        return None, "unknown"
    changes: list[Change] = []
    for (x, action), (y, _) in zip(one, two, strict=True):
        if action is None:
            changes.append(_change(x, y, shift, floor, least))
        else:
            expected = as_double(action(element, x))
            error = _ratio(expected - as_double(y), expected, least)
            changes.append((error, "changes" if error > floor else "invariant"))
    return _worst(changes)


def _change(x: Tensor, y: Tensor, shift: bool, floor: float, least: float) -> Change:
    """Return the relative distance of y [rows, features] from x, up to one shift or rotation of all rows."""
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


def _summarise(visits: Sequence[_Visit], floor: float) -> list[LayerSymmetry]:
    """Return the result of each call, and find the innermost calls in which an error begins."""
    calls: Counter[str] = Counter()
    layers: list[LayerSymmetry] = []
    outer: set[int] = set()
    for visit in visits:
        (before, _), (after, behaviour) = _worst(visit.before), _worst(visit.after)
        begins = before is not None and after is not None and after > max(floor, GROWTH * max(before, ROUNDING))
        parent = visit.parent if begins else None
        while parent is not None:
            outer.add(parent)
            parent = visits[parent].parent
        calls[visit.module] += 1
        name = visit.module if calls[visit.module] == 1 else f"{visit.module}#{calls[visit.module]}"
        known = any(action is not None for _, action in visit.outputs)
        layers.append(LayerSymmetry(name, visit.kind, behaviour, before, after, known, begins))
    return [replace(layer, begins=layer.begins and number not in outer) for number, layer in enumerate(layers)]
