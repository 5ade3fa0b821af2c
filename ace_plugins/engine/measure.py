"""A copy of a model and its batch in float64, for measurements that are to be above rounding.

A model with and without its branches, and how far either is from equivariant.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import AceError, AttachError, ConfigError
from ..plugins.plugin import Plugin
from ..plugins.registry import registry
from ..symmetry.measure import Call, EquivarianceError, as_call, evaluate, mapped, measure, untouched
from .forward import Averaged
from .state import NAME, Ace, find, unwrapped


def in_double(model: nn.Module, batch: Any, *, copied: bool) -> tuple[nn.Module, Any, str]:
    """A copy of the model and the batch in float64, or as they are and why."""
    try:
        judged = _copy(model).double() if copied else model
        args, kwargs = (mapped(part, _wide) for part in as_call(batch))
        with torch.inference_mode(False), unwatched(judged), untouched(judged):
            evaluate(judged, args, kwargs, 0)
        return judged, Call(args, kwargs), ""
    except AceError:
        raise
    except Exception as error:
        why = f"not converted to float64: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
    try:
        return (_copy(model) if copied else model), batch, why
    except Exception:
        return model, batch, why


def _wide(tensor: Tensor) -> Tensor:
    wide = torch.complex128 if tensor.is_complex() else torch.float64
    return tensor.to(wide) if tensor.is_floating_point() or tensor.is_complex() else tensor


def _copy(model: nn.Module) -> nn.Module:
    copied = copy.deepcopy(model)
    for mine, its in zip(model.modules(), copied.modules(), strict=True):
        if isinstance(mine, Ace) and isinstance(its, Ace):
            its.forced = mine.forced  # a copy has no override of its own
    return copied


@contextmanager
def unwatched(model: nn.Module) -> Iterator[None]:
    """Evaluations in here are not the script's, whose epochs are counted by them."""
    aces = [module for module in model.modules() if isinstance(module, Ace)]
    before = [(ace.budget.watching, ace.evaluates) for ace in aces]
    for ace in aces:
        ace.budget.watching = False
    try:
        yield
    finally:
        for ace, (watching, evaluates) in zip(aces, before, strict=True):
            ace.budget.watching, ace.evaluates = watching, evaluates


def attached(model: nn.Module) -> Ace:
    """The model's ACE, or an error that says how it gets one."""
    ace = find(model)
    if ace is None:
        inner = unwrapped(model) is not model
        hint = "pass the model inside the wrapper" if inner else "call attach(model) first"
        raise AttachError(f"{type(model).__name__} has no ACE attached: expected model.{NAME}; {hint}")
    return ace


@contextmanager
def use_branches(model: nn.Module, on: bool) -> Iterator[None]:
    """Evaluate f_eq (``on=False``) or f_eq + gamma f_neq (``on=True``), whatever the mode says."""
    model = unwrapped(model)
    ace = attached(model)
    before = ace.forced
    _force(ace, model, on)
    try:
        yield
    finally:
        if find(model) is ace:  # it may have been projected inside
            _force(ace, model, before)


def _force(ace: Ace, model: nn.Module, on: bool | None) -> None:
    ace.forced = on
    if ace.root is None:
        ace.belong_to(model)
    if ace.hooks is not None:
        ace.hooks.sync(ace)


def adapter_of(model: nn.Module) -> Plugin:
    """The adapter that has attached this model, or that claims it."""
    ace = find(model)
    return registry().adapter(ace.adapter) if ace is not None else registry().claiming(model)


def averaged(model: nn.Module, samples: int = 8, *, seed: int = 0) -> Averaged:
    """A module that gives the mean of the model's outputs over so many random frames, in the caller's frame.

    For inference with branches: f_eq does not change, and f_eq + gamma f_neq comes closer to equivariant.
    """
    if samples < 1:
        raise ConfigError(f"samples: expected at least 1, found {samples}")
    inner = unwrapped(model)
    return Averaged(model, adapter_of(inner).action(inner), samples, seed)


def equivariance_error(
    model: nn.Module, batch: Any, samples: int = 5, *, branches_on: bool | None = None, seed: int = 0
) -> EquivarianceError:
    """Mean over random group elements of ||rho_Y(g) f(x) - f(rho_X(g) x)||, in eval mode.

    ``batch`` is a tuple of positional arguments, a dict of keyword arguments or a single argument of the model's
    forward. ``branches_on`` measures f_eq + gamma f_neq (True) or f_eq (False); by default what the mode deploys. Works
    on plain upstream models too, as long as an adapter claims them.
    """
    model = unwrapped(model)
    action = adapter_of(model).action(model)
    forced = branches_on is not None and find(model) is not None
    with use_branches(model, bool(branches_on)) if forced else nullcontext(), unwatched(model):
        return measure(model, action, batch, samples=samples, seed=seed)
