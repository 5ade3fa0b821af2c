"""Audits: measure how equivariant a model is, and find the layers in which the symmetry breaks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..contract.sites import Site
from ..contract.upstreams import class_path
from ..engine.checkpoint import read_checkpoint
from ..engine.measure import adapter_of, averaged, hide_from_budget, one_thread, symmetry_left, use_branches
from ..engine.state import Ace, find, unwrap
from ..errors import AdapterError, CheckpointError, ConfigError
from ..patch.shims import REPAIRS
from ..plugins.registry import registry
from ..report.trace import to_json
from ..symmetry.actions import GroupAction
from ..symmetry.layers import LayerSymmetry, measure_layers
from ..symmetry.left import SymmetryLeft
from ..symmetry.measure import Call, EquivarianceError, as_call, evaluate, forward_names, measure, preserve_state
from ..symmetry.parts import iterate_tensors, positional_names
from .kit import Kit, convert_to_double, hide_warnings

FLOOR = {torch.float64: 1e-9, torch.float32: 1e-4}  # largest relative error due to rounding; 0.1 for other types
EXAMPLES = 6  # number of batches on which `audit_example` looks for subgroups
SINGLE = 1e-4  # largest relative error that float32 constants or casts inside a float64 model can cause


@dataclass(frozen=True)
class Audit:
    """Equivariance of a model on one batch: of the whole model and of each layer."""

    error: EquivarianceError
    precision: str
    """Precision of the computation: "float64", or the type of the outputs if the model cannot compute in float64."""
    as_given: str
    """Why the model and the batch were not converted to float64; "" if they were."""
    uncovered: tuple[str, ...]
    """Floating point inputs without an action. They stay unchanged, which is correct only for invariants."""
    layers: tuple[LayerSymmetry, ...]
    """Every call of a submodule, in the order in which the calls start; empty if a function was audited."""
    floor: float
    """Relative errors up to this value are due to rounding."""

    @property
    def relative(self) -> float:
        """Relative error of the whole model."""
        return self.error.relative

    @property
    def verdict(self) -> str:
        """Return "symmetric", "symmetric to single precision" (an error within float32 rounding) or "broken"."""
        if self.relative <= self.floor:
            return "symmetric"
        return "symmetric to single precision" if self.relative <= SINGLE else "broken"

    @property
    def culprits(self) -> tuple[LayerSymmetry, ...]:
        """Layers in which the error starts, in the order of the forward pass; empty for a symmetric model."""
        return tuple(layer for layer in self.layers if layer.begins)

    def to_dict(self) -> dict[str, Any]:
        """Return the audit as a dict for JSON; errors that are not finite become None."""
        culprits = [layer.name for layer in self.culprits]
        return {**to_json(dataclasses.asdict(self)), "verdict": self.verdict, "culprits": culprits}


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
    """Measure how far a model or function is from equivariant, and find the layers in which the error starts.

        found = audit(model, (z, pos))
        print(found.verdict, [layer.name for layer in found.culprits])

    A copy of the model is audited, in float64 and eval mode where possible; the model itself stays unchanged.

    The error of the whole model is exact for this batch. A layer is tested with the action in ``Site.acts`` where the
    adapter gives it. Otherwise the test is that all rows of the layer's output are transformed by one orthogonal
    matrix, or shifted by one vector. This test can blame a layer wrongly if its features have a basis that is not
    orthonormal, so layers are blamed only if the whole model is broken. It misses a layer that swaps x and y; then a
    later layer or the model (name "") is blamed. Fix the first culprit, then audit again.

    Args:
        fn_or_model: A model, attached or not, or a function, for example preprocessing and model together.
        batch: A tuple of positional arguments, a dict of keyword arguments, a `Call`, or a single argument.
        action: Action of the group on arguments and outputs. Optional for models that an adapter supports.
        samples: Number of random group elements.
        seed: Seed of the group elements and of every forward pass.
        branches_on: For an attached model, audit f_eq + gamma f_neq (True) or f_eq alone (False). Default: the one
            that ``model.eval()`` computes in the model's mode.
        layers: Whether to audit the layers too.

    Returns:
        The errors of the model and of its layers, with a verdict.

    Raises:
        ConfigError: An argument has the wrong type.
        AttachError: ``branches_on`` is set for a model without ACE.
        AdapterError: No adapter supports the model and ``action`` is missing.
    """
    is_model = isinstance(fn_or_model, nn.Module)
    if not is_model and not (callable(fn_or_model) and action is not None):
        found = type(fn_or_model).__name__
        raise ConfigError(f"audit: expected a model, or a function and action=GroupAction(...), found {found}")
    model = unwrap(fn_or_model) if isinstance(fn_or_model, nn.Module) else nn.Module()
    if not is_model:
        model.forward = fn_or_model
    sites: Sequence[Site] = ()
    if action is None:
        plugin = adapter_of(model)
        action = plugin.action(model)
        sites = [node for node in plugin.call("ace_layers", model=model) if isinstance(node, Site)]
    if not isinstance(action, GroupAction):
        raise ConfigError(f"action: expected a GroupAction, found {type(action).__name__}")
    with nullcontext() if branches_on is None else use_branches(model, branches_on):
        judged, batch, as_given = convert_to_double(model, batch, copied=is_model)
        with hide_from_budget(judged):
            error = measure(judged, action, batch, samples=samples, seed=seed)
            dtype = torch.float64 if not as_given else _output_dtype(judged, action, batch, seed)
            floor = FLOOR.get(dtype, 0.1)
            blamed: tuple[LayerSymmetry, ...] = ()
            if layers and is_model:
                # Branches are not meant to be equivariant; the modules that they add to are tested instead.
                skip = [name for name, module in judged.named_modules() if isinstance(module, Ace)]
                options: dict[str, Any] = {"samples": samples, "seed": seed, "floor": floor, "skip": skip}
                measured = measure_layers(judged, action, batch, sites=sites, **options)
                blamed = _blame(measured, error.relative, floor)
    uncovered = tuple(_find_uncovered(judged, action, batch))
    return Audit(error, str(dtype).removeprefix("torch."), as_given, uncovered, blamed, floor)


def _output_dtype(model: nn.Module, action: GroupAction, batch: Any, seed: int) -> torch.dtype:
    """Return the dtype with the fewest bytes among the compared outputs."""
    with torch.inference_mode(False), preserve_state(model):
        output = evaluate(model, *as_call(batch), seed)
    dtypes = (tensor.dtype for tensor in action.tensors_to_compare(output).values())
    return min((dtype.to_real() if dtype.is_complex else dtype for dtype in dtypes), key=lambda dtype: dtype.itemsize)


def _blame(layers: list[LayerSymmetry], relative: float, floor: float) -> tuple[LayerSymmetry, ...]:
    """Find the layers that cause the model's error: their ``begins`` stays True, that of all others becomes False.

    The first of ``layers`` is the model itself. It has the error ``relative``, and is the cause if there is no other.
    """
    least = max(SINGLE, floor) if relative > SINGLE else floor
    broken = not relative <= floor  # also true for nan
    found = [replace(each, begins=broken and each.begins and (each.after or 0.0) > least) for each in layers]
    if found and not found[0].name:
        whole = found[0]
        begins = broken and not any(layer.begins for layer in found[1:])
        behaviour = whole.behaviour if broken or whole.behaviour == "invariant" else "turns"
        found[0] = replace(whole, behaviour=behaviour, before=0.0, after=relative, known=True, begins=begins)
    return tuple(found)


def _find_uncovered(model: nn.Module, action: GroupAction, batch: Any) -> Iterator[str]:
    args, kwargs = as_call(batch)
    names = positional_names(forward_names(model))
    names += [f"argument {number}" for number in range(len(names), len(args))]
    covered = tuple(f"{path.removesuffix('?')}." for path in action.inputs)
    for name, value in [*zip(names, args, strict=False), *kwargs.items()]:
        for path, tensor in iterate_tensors(value, name):
            if (tensor.is_floating_point() or tensor.is_complex()) and not f"{path}.".startswith(covered):
                yield path


@dataclass(frozen=True)
class ExampleAudit:
    """Audit of an adapter's example or of a saved model."""

    adapter: str
    upstream: str
    model: str
    checkpoint: str  # file of the weights; "" for the example's initial weights
    branches: bool  # True if the branches were on
    sites: dict[str, str]  # mapping from each site's name to the submodule that its branch adds to
    found: Audit
    averaged: tuple[int, EquivarianceError] | None  # number of random frames, and the error of the mean over them
    left: SymmetryLeft | None = None  # the subgroups that the model keeps

    def to_dict(self) -> dict[str, Any]:
        """Return the audit as a dict for JSON."""
        mean = self.averaged and {"samples": self.averaged[0], "error": self.averaged[1].to_dict()}
        about = {name: value for name, value in vars(self).items() if name != "found"}
        left = self.left and to_json(self.left.to_dict())
        return {**about, **self.found.to_dict(), "averaged": mean, "left": left}


def audit_example(
    name: str,
    *,
    checkout: Path | None = None,
    checkpoint: Path | None = None,
    trust: bool = False,
    branches_on: bool | None = None,
    average: int | None = None,
    left: bool = False,
) -> ExampleAudit:
    """Audit an adapter's example, with the weights of a checkpoint if one is given.

    A checkpoint can hold a whole pickled model, which is loaded only with ``trust``; that model is audited on a batch
    that the adapter makes for it. ``average=n`` also measures the error of the output averaged over n random frames.
    """
    if trust:
        REPAIRS.make_importable()
    content = checkpoint and read_checkpoint(checkpoint, trust=trust)
    kit = Kit(name, checkout=checkout)
    if isinstance(content, nn.Module):
        model = content
        if registry().find_adapter(model) is not kit.plugin:
            raise AdapterError(f"adapter {name!r} does not support {class_path(type(model))}: choose another adapter")
        example = kit.plugin.example(kit.seed, model)
        batch = Call(example.args, example.kwargs)
    else:
        model, batch = kit.attached(), kit.batch
        if checkpoint is not None:
            _load_weights(model, checkpoint, content)
    model.eval()
    ace, mean, sites = find(model), None, kit.plugin.call("ace_layers", model=model)
    with one_thread(), nullcontext() if branches_on is None else use_branches(model, branches_on):
        found = audit(model, batch)
        if average is not None:
            smooth = averaged(model, average)
            mean = average, audit(smooth, batch, smooth.action, layers=False).error
        own = isinstance(content, nn.Module)
        examples = [kit.plugin.example(kit.seed + n, model if own else None) for n in range(EXAMPLES if left else 0)]
        return ExampleAudit(
            adapter=kit.plugin.name,
            upstream=kit.upstream,
            model=type(model).__name__,
            checkpoint=str(checkpoint or ""),
            branches=ace is not None and ace.active(),
            sites={site.name: site.module for site in sites if isinstance(site, Site)},
            found=found,
            averaged=mean,
            left=symmetry_left(model, [Call(each.args, each.kwargs) for each in examples]) if left else None,
        )


def _load_weights(model: nn.Module, path: Path, content: Any) -> None:
    """Load the state_dict in a checkpoint that matches the model best."""
    own = model.state_dict()
    best = max(_state_dicts(content), key=lambda state: len(state.keys() & own.keys()), default={})
    try:
        with hide_warnings():  # checkpoints of plain upstream are audited too
            model.load_state_dict(best)
    except RuntimeError as error:
        raise CheckpointError(
            f"{path} does not fit {type(model).__name__}, the adapter's example: {' '.join(str(error).split())}; "
            "to audit your own model call audit(model, batch)"
        ) from error


def _state_dicts(content: Any) -> Iterator[dict[str, Tensor]]:
    """Yield every dict of tensors in nested dicts and lists, with and without the prefix ``module.`` of a wrapper."""
    if isinstance(content, Mapping):
        found = {str(name): value for name, value in content.items() if isinstance(value, Tensor)}
        yield from (found, {name.removeprefix("module."): value for name, value in found.items()})
        content = list(content.values())
    for part in content if isinstance(content, (list, tuple)) else ():
        yield from _state_dicts(part)
