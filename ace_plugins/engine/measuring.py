"""A model with and without its branches, and how far either is from equivariant."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import nn

from ..errors import AttachError, ConfigError
from ..plugins.plugin import Plugin
from ..plugins.registry import registry
from ..symmetry.measuring import EquivarianceError, measure
from .copies import unwatched
from .frames import Averaged
from .state import NAME, Ace, find, unwrapped


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
