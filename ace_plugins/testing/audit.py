"""audit: how equivariant a model is, attached or not, trained or not, and in which layer the symmetry ends.

audit of an adapter's own example, as it is built or with the weights of a checkpoint; or of a model saved whole.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..contract.sites import Site, Tap
from ..engine.checkpoint import read_checkpoint
from ..engine.forward import chosen_output
from ..engine.measure import adapter_of, averaged, in_double, unwatched, use_branches
from ..engine.state import Ace, Argument, find, resolve, unwrapped
from ..errors import AceError, AceWarning, AdapterError, CheckpointError, ConfigError
from ..patch.shims import REPAIRS
from ..plugins.plugin import one_line
from ..symmetry.actions import Action, GroupAction
from ..symmetry.layers import Features, Layer, by_layer
from ..symmetry.measure import EquivarianceError, as_call, evaluate, forward_names, measure, untouched
from ..symmetry.parts import positional, required, tensors_in
from .examples import attached_example, given_example

FLOOR = {torch.float64: 1e-9, torch.float32: 1e-4}
"""The relative error that rounding may come to; 0.1 in shorter types."""
SINGLE = 1e-4
"""What constants or casts in float32 come to in a model that computes in float64."""


@dataclass(frozen=True)
class Audit:
    """How equivariant a model is on one batch, as a whole and by layer."""

    error: EquivarianceError
    precision: str
    """What was computed in: "float64", or the model's own type where it cannot be converted."""
    as_given: str
    """Why the model and the batch were not converted to float64; "" where they were."""
    uncovered: tuple[str, ...]
    """Inputs with floating point numbers that the action does not mention: they stay as they are under every element,
    which is right only for what is invariant."""
    layers: tuple[Layer, ...]
    """Every call of a submodule, in the order in which they begin; none for a function."""
    floor: float
    """The relative error that rounding may come to in this precision."""

    @property
    def absolute(self) -> float:
        return self.error.absolute

    @property
    def relative(self) -> float:
        return self.error.relative

    @property
    def verdict(self) -> str:
        """How it is called: "symmetric", "symmetric to single precision" (computed in float64) or "broken"."""
        if self.relative <= self.floor:
            return "symmetric"
        return "symmetric to single precision" if self.relative <= SINGLE else "broken"

    @property
    def culprits(self) -> tuple[Layer, ...]:
        """The layers in which the error of the whole begins, the first one first. None where the whole is symmetric."""
        if self.verdict == "symmetric":
            return ()
        least = self.floor if self.verdict != "broken" else max(SINGLE, self.floor)
        return tuple(layer for layer in self.layers if layer.begins and layer.after is not None and layer.after > least)

    def to_dict(self) -> dict[str, Any]:
        """For JSON, which has no number that is not finite: such an error is None."""
        told = dataclasses.asdict(self)
        for errors in (told["error"], *told["layers"]):
            errors.update({k: None for k, v in errors.items() if isinstance(v, float) and not math.isfinite(v)})
        return {**told, "verdict": self.verdict, "culprits": [layer.name for layer in self.culprits]}


def audit(
    fn_or_model: nn.Module | Callable[..., Any],
    batch: Any,
    action: GroupAction | None = None,
    *,
    samples: int = 8,
    seed: int = 0,
    branches_on: bool | None = None,
    layers: bool = True,
) -> Audit:
    """How far a model, or any function, is from equivariant under random group elements, and where that begins.

    ``fn_or_model`` is a model, or a function such as preprocessing and model together. ``action`` says how the group
    acts on its arguments and its output. For a model that an adapter claims it may be left out. ``batch`` is a tuple of
    positional arguments, a dict of keyword arguments or a single argument. ``branches_on`` audits f_eq + gamma f_neq
    (True) or f_eq (False) of an attached model; by default what its mode deploys. ``layers=False`` leaves out the
    layers. The model is not changed: a copy is audited, in float64 and in eval mode, where it can be copied and
    converted. A function is run as it is; only its batch is converted, where it takes that.

    What is concluded, and what is not:

    - The error of the whole is exact: the action is known. It says nothing of other batches.
    - A site's features are judged by ``Site.acts`` where the adapter tells them.
    - Other features are judged without knowing how the group acts on them: rows must all be turned by one orthogonal
      matrix, or shifted by one vector. A layer that fails this breaks the symmetry, or has features in a basis that is
      not orthonormal; so layers are blamed (`Audit.culprits`) only where the whole is broken.
    - A layer that passes may still give another representation than it should, such as x, y and z in another order.
      Then a later layer is blamed, or the model itself, whose name is "".
    - Where an error begins, nothing much is known of the layers after it: repair it and look again. A layer behind
      it is blamed too if its error is a hundred times larger.
    """
    is_model = isinstance(fn_or_model, nn.Module)
    if not is_model and not callable(fn_or_model):
        raise ConfigError(f"audit: expected a model or a function, found {type(fn_or_model).__name__}")
    if action is None and not is_model:
        raise ConfigError("audit: expected action=GroupAction(...) for a function; only models are known to adapters")
    model = unwrapped(fn_or_model) if isinstance(fn_or_model, nn.Module) else _Function(fn_or_model)
    sites: Iterable[Any] = ()
    if action is None:
        ace, plugin = find(model), adapter_of(model)
        action = plugin.action(model)
        sites = ace.sites if ace is not None else plugin.call("ace_layers", model=model)
    if not isinstance(action, GroupAction):
        raise ConfigError(f"action: expected a GroupAction, found {type(action).__name__}")
    if branches_on is not None and find(model) is None:
        raise ConfigError(f"branches_on: {type(model).__name__} has no ACE attached; leave it out")
    with nullcontext() if branches_on is None else use_branches(model, branches_on):
        judged, batch, as_given = in_double(model, batch, copied=is_model)
        with unwatched(judged):
            error = measure(judged, action, batch, samples=samples, seed=seed)
            kind = torch.float64 if not as_given else _kind(judged, action, batch, seed)
            floor = FLOOR.get(kind, 0.1)
            found: list[Layer] = []
            if layers and is_model:
                options: dict[str, Any] = {"samples": samples, "seed": seed, "floor": floor}
                # A branch is not equivariant, and is not meant to be: its site is what is judged.
                branches = [name for name, module in judged.named_modules() if isinstance(module, Ace)]
                found = by_layer(judged, action, batch, features=_features(judged, sites), skip=branches, **options)
                found = _with_the_whole(found, error, floor)
    uncovered = tuple(_uncovered(judged, action, batch))
    return Audit(error, str(kind).removeprefix("torch."), as_given, uncovered, tuple(found), floor)


class _Function(nn.Module):
    """A function where a model is expected."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.forward = function  # so its signature is the function's


def _kind(model: nn.Module, action: GroupAction, batch: Any, seed: int) -> torch.dtype:
    """The shortest type among the outputs that are compared."""
    with torch.inference_mode(False), untouched(model):
        output = evaluate(model, *as_call(batch), seed)
    kinds = [tensor.dtype for tensor in action.compared(output).values()]
    real = [kind.to_real() if kind.is_complex else kind for kind in kinds]
    return min(real, key=lambda kind: kind.itemsize)


@dataclass(frozen=True)
class _Reads:
    argument: Argument
    action: Action

    def pick(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> Any:
        return self.argument.pick(args, kwargs)


@dataclass(frozen=True)
class _Gives:
    site: Site
    action: Action

    def pick(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> Any:
        return chosen_output(output, self.site)


def _features(model: nn.Module, sites: Iterable[Any]) -> dict[str, Features]:
    """What the adapter's sites tell of their modules' inputs and outputs."""
    found: dict[str, Features] = {}
    for site in sites:
        if not isinstance(site, Site) or site.acts is None:
            continue
        known = found.get(site.module, Features())
        reads, gives = known.reads, (*known.gives, _Gives(site, site.acts[1]))
        own = isinstance(site.reads, Tap) and site.reads.module in (None, site.module) and site.through is None
        if own and isinstance(site.reads, Tap):
            argument = resolve(site.reads, model.get_submodule(site.module), f"site {site.name!r}")
            reads = (*reads, _Reads(argument, site.acts[0]))
        found[site.module] = Features(reads, gives)
    return found


def _with_the_whole(layers: list[Layer], error: EquivarianceError, floor: float) -> list[Layer]:
    """The model itself is judged by its action, and blamed where none of its layers is."""
    level = SINGLE if error.relative > SINGLE else floor
    inside = any(layer.begins and layer.name and (layer.after or 0.0) > level for layer in layers)
    return [
        layer
        if layer.name
        else dataclasses.replace(
            layer,
            before=0.0,
            after=error.relative,
            known=True,
            begins=not inside and not error.relative <= floor,
            behaviour="turns" if error.relative <= floor and layer.behaviour != "invariant" else layer.behaviour,
        )
        for layer in layers
    ]


def _uncovered(model: nn.Module, action: GroupAction, batch: Any) -> Iterator[str]:
    args, kwargs = as_call(batch)
    names = positional(forward_names(model))
    rest = [f"argument {number}" for number in range(len(names), len(args))]
    for name, value in [*zip([*names, *rest], args, strict=False), *kwargs.items()]:
        for path, tensor in tensors_in(value, name):
            covered = any(f"{path}.".startswith(f"{required(said)[0]}.") for said in action.inputs)
            if not covered and (tensor.is_floating_point() or tensor.is_complex()):
                yield path


@dataclass(frozen=True)
class ExampleAudit:
    """An audit, and what it is of."""

    adapter: str
    upstream: str
    model: str
    checkpoint: str
    """Where the weights come from; "" for those the example begins with."""
    branches: bool
    """Whether the branches took part."""
    sites: dict[str, str]
    """Site -> the submodule it adds to."""
    found: Audit
    averaged: tuple[int, EquivarianceError] | None
    """Random frames that the mean was taken over, and the error of that."""

    def to_dict(self) -> dict[str, Any]:
        mean = self.averaged and {"samples": self.averaged[0], "error": self.averaged[1].to_dict()}
        about = {name: getattr(self, name) for name in ("adapter", "upstream", "model", "checkpoint", "branches")}
        return {**about, "sites": self.sites, **self.found.to_dict(), "averaged": mean}


def audit_example(
    name: str,
    *,
    checkout: Path | None = None,
    checkpoint: Path | None = None,
    trust: bool = False,
    branches_on: bool | None = None,
    samples: int = 8,
    average: int | None = None,
    seed: int = 0,
) -> ExampleAudit:
    """Build the adapter's example, load the checkpoint if one is given, and audit it.

    Without ``branches_on`` it is audited as its mode deploys it: strict mode without branches. ``average`` also
    measures the mean over so many random frames. A checkpoint that is a model saved whole is read if it is trusted,
    and audited on a batch that the adapter makes for it.
    """
    if average is not None and average < 1:
        raise ConfigError(f"averaged {average}: expected at least 1 random frame")
    if trust:
        REPAIRS.make_importable()
    content = None if checkpoint is None else read_checkpoint(checkpoint, trust=trust)
    if isinstance(content, nn.Module):
        built = given_example(name, content, seed, checkout=checkout)
        model = built.model.eval()
    else:
        built = attached_example(name, seed, checkout=checkout)
        model = built.model.eval()
        if checkpoint is not None:
            load(model, checkpoint, content)
    ace = find(model)
    if ace is None and branches_on:
        raise ConfigError(f"branches on: the model in {checkpoint} has no ACE attached; leave that out")
    with nullcontext() if branches_on is None or ace is None else use_branches(model, branches_on):
        on = ace is not None and ace.active()
        try:
            found = audit(model, built.batch, samples=samples, seed=seed)
            mean = None
            if average is not None:
                smooth = averaged(model, average)
                whole = audit(smooth, built.batch, smooth.action, samples=samples, seed=seed, layers=False)
                mean = average, whole.error
        except AceError:
            raise
        except Exception as error:
            raise AdapterError(f"adapter {built.plugin.name!r}: its example does not run: {one_line(error)}") from error
    return ExampleAudit(
        adapter=built.plugin.name,
        upstream=built.upstream,
        model=type(model).__name__,
        checkpoint="" if checkpoint is None else str(checkpoint),
        branches=on,
        sites={site.name: site.module for site in built.sites},
        found=found,
        averaged=mean,
    )


def load(model: nn.Module, path: Path, content: Any) -> None:
    """The model's weights from a checkpoint: a state_dict, or dicts and lists with one somewhere inside."""
    own = model.state_dict()
    kinds = [state for state in _states(content) if set(state) & set(own)]
    if not kinds:
        raise CheckpointError(
            f"{path} holds no weights of {type(model).__name__}, the adapter's example: expected names such as "
            f"{', '.join(list(own)[:3])}"
        )
    best = max(kinds, key=lambda state: len(set(state) & set(own)))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", AceWarning)  # a checkpoint of plain upstream is one to audit, too
            model.load_state_dict(best)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
    except RuntimeError as error:
        raise CheckpointError(
            f"{path} does not fit {type(model).__name__}, the adapter's example: {one_line(error)}; "
            "for a model of your own call audit(model, batch)"
        ) from error


def _states(content: Any) -> Iterator[dict[str, Tensor]]:
    """The state_dicts in there, without the prefix of a wrapper."""
    if isinstance(content, Mapping):
        found = {str(name): value for name, value in content.items() if isinstance(value, Tensor)}
        yield found
        yield {name.removeprefix("module."): value for name, value in found.items()}
    parts = content.values() if isinstance(content, Mapping) else content if isinstance(content, (list, tuple)) else ()
    for part in parts:
        if isinstance(part, (Mapping, list, tuple)):
            yield from _states(part)
