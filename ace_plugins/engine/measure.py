"""Evaluates a model with or without its branches, and measures its distance from equivariance."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ..errors import AttachError, ConfigError
from ..plugins.plugin import Plugin
from ..plugins.registry import registry
from ..symmetry import measure as measuring
from ..symmetry.actions import GroupAction
from ..symmetry.groups import Group
from ..symmetry.left import SymmetryLeft, find_left
from ..symmetry.measure import Averaged, EquivarianceError
from .state import NAME, Ace, find, unwrap


def find_aces(model: nn.Module) -> list[Ace]:
    """Return the `Ace` of every attached model among the submodules."""
    return [module for module in model.modules() if isinstance(module, Ace)]


@contextmanager
def hide_from_budget(model: nn.Module) -> Iterator[None]:
    """Hide evaluations inside a ``with`` block from the budget, which would count them as ends of epochs."""
    aces = find_aces(model)
    before = [(ace.budget.watching, ace.passes.evaluates) for ace in aces]
    for ace in aces:
        ace.budget.watching = False
    try:
        yield
    finally:
        for ace, (watching, evaluates) in zip(aces, before, strict=True):
            ace.budget.watching, ace.passes.evaluates = watching, evaluates


def get_ace(model: nn.Module) -> Ace:
    """Return the model's `Ace`, or raise an AttachError if it has none."""
    ace = find(model)
    if ace is None:
        hint = "call attach(model) first" if unwrap(model) is model else "pass the model inside the wrapper"
        raise AttachError(f"{type(model).__name__} has no ACE attached: expected model.{NAME}; {hint}")
    return ace


@contextmanager
def use_branches(model: nn.Module, on: bool) -> Iterator[None]:
    """Switch the branches on or off inside a ``with`` block, regardless of the mode and of ``model.training``.

    Args:
        model: The attached model. It may be wrapped in DataParallel, DDP, AveragedModel or ``torch.compile``.
        on: True evaluates f_eq + gamma f_neq, False evaluates f_eq.

    Raises:
        AttachError: If the model has no ACE attached.
    """
    model = unwrap(model)
    ace = get_ace(model)
    ace.belong_to(model)  # a copy has no reference to its model before the first forward pass
    before, ace.passes.forced = ace.passes.forced, on
    ace.sync()
    try:
        yield
    finally:
        ace.passes.forced = before
        ace.sync()


def adapter_of(model: nn.Module) -> Plugin:
    """Return the adapter with which this model was attached, or else the adapter that supports it."""
    ace = find(model)
    return registry().adapter(ace.adapter) if ace is not None else registry().find_adapter(model)


def averaged(model: nn.Module, samples: int = 8, *, group: Group | None = None, seed: int = 0) -> Averaged:
    """Return a module that averages the model's outputs over random frames.

    Use it for inference with branches: averaging leaves f_eq unchanged and brings f_eq + gamma f_neq closer to
    equivariance.

    Args:
        model: A model that is attached or that an adapter supports. It is shared, not copied.
        samples: Number of random group elements, which is also the number of forward passes per call.
        group: Group to draw them from, for data with the symmetry of a subgroup only: ``SO2About((0, 0, 1))`` for
            rotations about z. Default: the group of the adapter's action.
        seed: Seed of the group elements, the same in every call.

    Returns:
        A module that takes the model's arguments and returns the model's outputs, in the caller's frame.

    Raises:
        ConfigError: If ``samples`` is below 1.
        AdapterError: If no adapter supports the model, or the adapter does not define the group action.
    """
    if samples < 1:
        raise ConfigError(f"samples: expected at least 1, found {samples}")
    inner = unwrap(model)
    action = adapter_of(inner).action(inner)
    return Averaged(model, action if group is None else replace(action, group=group), samples, seed)


def equivariance_error(
    model: nn.Module, batch: Any, samples: int = 5, *, branches_on: bool | None = None, seed: int = 0
) -> EquivarianceError:
    """Measure the mean of ||rho_Y(g) f(x) - f(rho_X(g) x)|| over random group elements g, in eval mode.

    rho_X and rho_Y are the actions of the group on the inputs x and on the outputs of the model f.

    Args:
        model: A model that is attached or that an adapter supports.
        batch: A tuple of positional arguments, a dict of keyword arguments, or a single argument of the forward pass.
        samples: Number of group elements.
        branches_on: True measures f_eq + gamma f_neq, False measures f_eq, None what ``model.eval()`` computes.
        seed: Seed of the group elements.

    Returns:
        The absolute and the relative error.

    Raises:
        AdapterError: If no adapter supports the model, or the adapter does not define the group action.
    """
    model = unwrap(model)
    action = adapter_of(model).action(model)
    forced = branches_on is not None and find(model) is not None
    with use_branches(model, bool(branches_on)) if forced else nullcontext(), hide_from_budget(model):
        return measuring.measure(model, action, batch, samples=samples, seed=seed)


def symmetry_left(
    model: nn.Module,
    batches: Sequence[Any],
    action: GroupAction | None = None,
    *,
    branches_on: bool | None = None,
    seed: int = 0,
) -> SymmetryLeft:
    """Find the subgroup of its symmetry group that a trained model keeps, such as the rotations about one axis.

        left = symmetry_left(model, [(z, pos, batch) for z, pos, batch in loader])
        print(left.sentence)    # The model keeps rotations about the z-axis; it breaks the rest of E(3).

    A model keeps a subgroup if it is equivariant under it. A model that was trained with branches has learned from its
    data what breaks the symmetry, so the result describes the data too. Use batches of the test set.

    Args:
        model: A trained model that is attached or that an adapter supports. It is evaluated in eval mode.
        batches: At least four batches, each a tuple of positional arguments, a dict of keyword arguments, or a single
            argument. The first one is used to search for axes, the others to measure. More batches give narrower
            intervals.
        action: Action of the group on arguments and outputs. Default: that of the adapter.
        branches_on: For an attached model, use f_eq + gamma f_neq (True) or f_eq alone (False). Default: the one that
            ``model.eval()`` computes in the model's mode.
        seed: Seed of the group elements and of every forward pass.

    Returns:
        The errors under the subgroups that were tried, with a verdict for each, and the answer as a sentence.

    Raises:
        ConfigError: There are fewer than four batches, or the group has other elements than rotations, reflections and
            translations.
        AttachError: ``branches_on`` is set for a model without ACE.
        AdapterError: No adapter supports the model and ``action`` is missing.
    """
    model = unwrap(model)
    action, ace = action or adapter_of(model).action(model), find(model)
    with nullcontext() if branches_on is None else use_branches(model, branches_on), hide_from_budget(model):
        found = find_left(model, action, batches, seed=seed)
    if ace is None or (ace.in_eval and not ace.landed if branches_on is None else branches_on):
        return found
    why = "it has no branches in eval mode, so the result is not about the data (use mode auto or resilient)"
    return replace(found, note=why)


@contextmanager
def one_thread() -> Iterator[None]:
    """Limit torch to one CPU thread inside the block: small models are not faster with more, and sums keep their order.

    Yields:
        None.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
