"""Where the dual loop meets the script's optimizer: PyTorch's global step hooks.

Before a step of the optimizer that owns gamma, the constraints' pull is added to gamma's gradient; after it
lambda and u move. The script's gradients, parameter groups and schedulers are as it left them when the step
is over. An optimizer that owns no attached model costs one dictionary look-up.
"""

from __future__ import annotations

import atexit
import gc
import inspect
import os
import sys
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from .bounded import follow, maps
from ..errors import AceWarning, StepError
from ..plugins.observers import tell
from .state import NAME, Ace

_live: weakref.WeakSet[Ace] = weakref.WeakSet()
_changes = 0
"""Counts changes of what is live, so that every optimizer looks again at what it owns."""


@dataclass
class Owned:
    """gamma of one model in one optimizer: where it stands, and what a step under way has put aside."""

    ace: Ace
    group: int
    index: int
    before: Tensor | None = None
    """gamma as it was when the step began; None when no step is under way."""
    grad: Tensor | None = None
    """The script's own gradient, ..."""
    pulled: Tensor | None = None
    """... the one put in its place, ..."""
    version: int = 0
    """... and how often that had been written to by then."""
    params: list[Any] | None = None
    """The group's own list of parameters, while gamma steps ..."""
    own: dict[str, Any] | None = None
    """... in a group of its own."""

    def holds(self, optimizer: Optimizer) -> bool:
        """gamma is still where it was found."""
        params = optimizer.param_groups[self.group]["params"]
        return self.index < len(params) and params[self.index] is self.ace.gamma

    def begin(self, optimizer: Optimizer) -> None:
        gamma = self.ace.gamma
        if gamma.grad is None or not gamma.requires_grad:
            return  # the model took no part in this step, or its gamma is frozen
        outer = _under_way.get(self.ace)
        if outer is not None:
            # This optimizer is driven by another one's step (ZeroRedundancyOptimizer, Lookahead): it moves gamma.
            outer[0].restore(outer[1])
        self.before = gamma.detach().clone()
        self.grad = gamma.grad
        pull = self.ace.duals.pull(self.before)
        if optimizer.param_groups[self.group].get("maximize"):
            pull = -pull  # the optimizer turns every gradient round, and this one is of a minimisation
        scale = getattr(optimizer, "grad_scale", None)
        if scale is not None:
            pull = pull * scale  # a fused optimizer divides by it inside its kernel
        gamma.grad = self.pulled = self.grad + pull
        self.version = self.pulled._version
        self._separate(optimizer)
        _under_way[self.ace] = (self, optimizer)

    def _separate(self, optimizer: Optimizer) -> None:
        """Let gamma step as a group of its own, where its rate or weight decay differ from its group's.

        Only for the length of the step: schedulers, saved optimizer states and the script never see it. It is
        exact for every optimizer, which correcting gamma afterwards is not.
        """
        if any(isinstance(value, Optimizer) for value in vars(optimizer).values()):
            return  # a wrapper: the optimizer inside is the one that moves gamma, in groups of its own
        config = self.ace.config
        group = optimizer.param_groups[self.group]
        decays = bool(group.get("weight_decay", 0)) and not config.gamma_weight_decay
        if not decays and config.gamma_lr == 1:
            return
        self.own = {**group, "params": [self.ace.gamma], "lr": group["lr"] * config.gamma_lr}
        if decays:
            self.own["weight_decay"] = 0.0
        self.params = group["params"]
        group["params"] = [p for p in self.params if p is not self.ace.gamma]
        optimizer.param_groups.append(self.own)

    def restore(self, optimizer: Optimizer, *, stepped: bool = False) -> None:
        """Gradient and groups as the script had them."""
        if self.before is None or self.pulled is None:
            return
        gamma = self.ace.gamma
        # After a step that raised, the script may have zeroed or computed a gradient since: then it is its own.
        # In a step that went well only the optimizer can have written to it (fused ones unscale in place).
        if gamma.grad is self.pulled and (stepped or self.pulled._version == self.version):
            gamma.grad = self.grad
        if self.params is not None:
            optimizer.param_groups[:] = [group for group in optimizer.param_groups if group is not self.own]
            optimizer.param_groups[self.group]["params"] = self.params
        self.before = self.grad = self.pulled = self.params = self.own = None
        _under_way.pop(self.ace, None)

    def finish(self, optimizer: Optimizer) -> bool:
        """After the script's step: move the duals. Says whether they moved."""
        before = self.before
        self.restore(optimizer, stepped=True)
        if before is None:
            return False
        found_inf = getattr(optimizer, "found_inf", None)
        if found_inf is not None and bool(found_inf):
            return False  # the fused kernel skipped the step, so the duals do too
        moves = not self.ace.landed
        if moves:
            self.ace.duals.ascend(before, optimizer.param_groups[self.group]["lr"])
        if self.ace.landed:
            with torch.no_grad():
                self.ace.gamma.zero_()
        return moves


@dataclass
class Ownership:
    """What an optimizer owns, valid as long as ``seen`` describes it."""

    seen: tuple[int, ...]
    owned: list[Owned] = field(default_factory=list)
    moved: list[Ace] = field(default_factory=list)
    """Models whose bounded branches it moves, with gamma or without."""


_under_way: weakref.WeakKeyDictionary[Ace, tuple[Owned, Optimizer]] = weakref.WeakKeyDictionary()
"""The steps between their two hooks."""
_ownership: weakref.WeakKeyDictionary[Optimizer, Ownership] = weakref.WeakKeyDictionary()


def watch(ace: Ace) -> None:
    """From now on an optimizer that owns this gamma moves its duals."""
    global _changes
    _live.add(ace)
    _changes += 1
    _install()


def unwatch(ace: Ace) -> None:
    global _changes
    _live.discard(ace)
    _changes += 1


def _seen(optimizer: Optimizer) -> tuple[int, ...]:
    return (_changes, *[len(group["params"]) for group in optimizer.param_groups])


def _owned(optimizer: Optimizer) -> list[Owned]:
    known = _ownership.get(optimizer)
    if known is not None:
        _recover(optimizer)
        if known.seen == _seen(optimizer) and all(owned.holds(optimizer) for owned in known.owned):
            return known.owned
    found, moved = _look(optimizer)
    if found and known is None:
        # Between a step that raised and the next one, a saved state must not show what was put aside.
        optimizer.register_state_dict_pre_hook(_recover)
        optimizer.register_load_state_dict_pre_hook(_recover_before_load)
    _ownership[optimizer] = Ownership(_seen(optimizer), found, moved)
    return found


def _recover(optimizer: Optimizer) -> None:
    """Undo what a step that raised in the middle left behind."""
    known = _ownership.get(optimizer)
    for owned in reversed(known.owned if known else ()):
        owned.restore(optimizer)


def _recover_before_load(optimizer: Optimizer, state: Any) -> None:
    _recover(optimizer)


def _nested(optimizer: Optimizer) -> bool:
    """Whether a step of this very optimizer is under way around this one: a subclass calling ``super().step()``.

    Asked only when something is put aside, to tell that from a step before that raised.
    """
    steps = 0
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        steps += frame.f_code.co_name == "wrapper" and frame.f_locals.get("self") is optimizer
        frame = frame.f_back
    return steps > 1


def _look(optimizer: Optimizer) -> tuple[list[Owned], list[Ace]]:
    places = {
        id(parameter): (g, i)
        for g, group in enumerate(optimizer.param_groups)
        for i, parameter in enumerate(group["params"])
    }
    live = list(_live)
    owned = [Owned(ace, *places[id(ace.gamma)]) for ace in live if id(ace.gamma) in places]
    for each in owned:
        _check_branches(each.ace, places)
    # Weights that a model shares with one whose gamma is here are here for that one.
    shared = {id(p) for each in owned if each.ace.root is not None for p in each.ace.root.parameters()}
    for ace in live:
        if id(ace.gamma) not in places:
            _check_not_missed(ace, optimizer, places.keys() - shared)
    return owned, [ace for ace in live if any(id(m.weight) in places for m in maps(ace.branches))]


def _check_not_missed(ace: Ace, optimizer: Optimizer, places: set[int]) -> None:
    """An optimizer with the model's weights but without its gamma: fine only if another has gamma."""
    model = ace.root
    if model is None or not ace.gamma.requires_grad:
        return
    added = {id(p) for p in ace.parameters()}
    weights = [p for p in model.parameters() if id(p) not in added and id(p) in places]
    if not weights or any(_owns(other, ace.gamma) for other in _optimizers()):
        return
    raise StepError(
        f"{type(optimizer).__name__} steps {len(weights)} weights of {type(model).__name__} but no optimizer owns its "
        f"gamma (model.{NAME}.gamma): it was built before attach or from a part of the parameters; build it from "
        f"model.parameters() after attach, or optimizer.add_param_group({{'params': model.{NAME}.parameters()}}), "
        f"or freeze gamma with model.{NAME}.gamma.requires_grad_(False)"
    )


def _check_branches(ace: Ace, places: dict[int, tuple[int, int]]) -> None:
    missed = [p for p in ace.branches.parameters() if p.requires_grad and id(p) not in places]
    if missed and not any(_owns(other, missed[0]) for other in _optimizers()):
        warnings.warn(
            f"no optimizer owns {len(missed)} branch parameters of adapter {ace.adapter!r} (model.{NAME}.branches): "
            "they keep their initial values; build the optimizer from model.parameters()",
            AceWarning,
            stacklevel=2,
        )


def _optimizers() -> list[Optimizer]:
    """Every optimizer alive. A walk over all objects, so only when something looks wrong."""
    return [thing for thing in gc.get_objects() if issubclass(type(thing), Optimizer)]


def _owns(optimizer: Optimizer, parameter: Tensor) -> bool:
    groups = getattr(optimizer, "param_groups", ())
    return any(p is parameter for group in groups for p in group["params"])


def _before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not _live:
        return None
    known = _ownership.get(optimizer)
    if known is not None and any(o.before is not None for o in known.owned) and _nested(optimizer):
        return None  # the pull is in already
    owned = _owned(optimizer)
    if not owned:
        return None
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is None:
        for each in owned:
            each.begin(optimizer)
        return None
    parameter = inspect.signature(type(optimizer).step).parameters.get("closure")
    if parameter is not None and parameter.default is inspect.Parameter.empty:
        raise StepError(
            f"{type(optimizer).__name__} computes gradients again and again inside its step, where the dual loop has "
            "no single gamma to go by; expected an optimizer that takes one gradient a step, such as SGD or Adam"
        )
    after = AfterClosure(closure, optimizer, owned)
    return ((args[0], after, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": after})


@dataclass
class AfterClosure:
    """A closure after which the step's gradients are there: that is where the pull is added."""

    closure: Callable[[], Any]
    optimizer: Optimizer
    owned: list[Owned]
    called: bool = False

    def __call__(self) -> Any:
        if self.called:
            raise StepError(
                f"{type(self.optimizer).__name__} called its closure twice in one step, and the dual loop can follow "
                "only one gradient a step; use an optimizer that calls it once, such as SGD or Adam"
            )
        self.called = True
        result = self.closure()
        for each in self.owned:
            each.begin(self.optimizer)
        return result


def _after_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    known = _ownership.get(optimizer)
    if known is None:
        return
    # All of them before anyone is told, in reverse, so that groups appended last are taken out first.
    moved = [owned.ace for owned in reversed(known.owned) if owned.finish(optimizer)]
    for ace in known.moved:
        if not ace.landed:
            follow(maps(ace.branches))
    for ace in reversed(moved):
        model = ace.root
        if model is not None:
            tell("ace_stepped", model=model, step=ace.duals.count)


def _finish_all() -> None:
    """At exit: tell the observers that the runs are over. A forked child's exit is not the end of its parent's."""
    if os.getpid() != _installed:
        return
    for ace in list(_live):
        model = ace.root
        if model is not None and ace.duals.count:
            tell("ace_finished", model=model)


_installed = 0
"""The process that has the global hooks."""


def _install() -> None:
    """The global hooks, with the first attached model: a process without one pays nothing."""
    global _installed
    if not _installed:
        _installed = os.getpid()
        register_optimizer_step_pre_hook(_before_step)
        register_optimizer_step_post_hook(_after_step)
        atexit.register(_finish_all)
