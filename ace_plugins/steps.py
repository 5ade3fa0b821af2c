"""Where the dual loop meets the script's optimizer: PyTorch's global step hooks.

Before a step of the optimizer that owns gamma, the constraints' pull is added to gamma's gradient; after it
lambda and u move. The script's gradients, parameter groups and schedulers are as it left them when the step
is over. An optimizer that owns no attached model costs one dictionary look-up.
"""

from __future__ import annotations

import atexit
import gc
import warnings
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from .errors import AceWarning, StepError
from .relaxation import NAME, Ace
from .trace import observers

_live: weakref.WeakSet[Ace] = weakref.WeakSet()
_changes = 0
"""Counts changes of what is live, so that every optimizer looks again at what it owns."""


@dataclass
class Owned:
    """gamma of one model in one optimizer: where it stands, and what a step under way has put aside."""

    ace: Ace
    group: int
    before: Tensor | None = None
    grad: Tensor | None = None
    params: list[Any] | None = None
    """The group's own list of parameters while gamma steps in a group of its own."""

    def begin(self, optimizer: Optimizer) -> None:
        gamma = self.ace.gamma
        if gamma.grad is None or not gamma.requires_grad:
            return  # the model took no part in this step, or its gamma is frozen
        self.before = gamma.detach().clone()
        self.grad = gamma.grad
        pull = self.ace.duals.pull(self.before)
        scale = getattr(optimizer, "grad_scale", None)
        if scale is not None:
            pull = pull * scale  # a fused optimizer divides by it inside its kernel
        gamma.grad = self.grad + pull
        self._separate(optimizer)

    def _separate(self, optimizer: Optimizer) -> None:
        """Let gamma step as a group of its own, where its rate or weight decay differ from its group's.

        Only for the length of the step: schedulers, saved optimizer states and the script never see it. It is
        exact for every optimizer, which correcting gamma afterwards is not.
        """
        config = self.ace.config
        group = optimizer.param_groups[self.group]
        decays = bool(group.get("weight_decay", 0)) and not config.gamma_weight_decay
        if not decays and config.gamma_lr == 1:
            return
        own = {**group, "params": [self.ace.gamma], "lr": group["lr"] * config.gamma_lr}
        if decays:
            own["weight_decay"] = 0.0
        self.params = group["params"]
        group["params"] = [p for p in self.params if p is not self.ace.gamma]
        optimizer.param_groups.append(own)

    def restore(self, optimizer: Optimizer) -> None:
        """Gradient and groups as the script had them."""
        if self.before is not None:
            self.ace.gamma.grad = self.grad
        if self.params is not None:
            optimizer.param_groups.pop()
            optimizer.param_groups[self.group]["params"] = self.params
        self.before = self.grad = self.params = None

    def finish(self, optimizer: Optimizer) -> None:
        before = self.before
        self.restore(optimizer)
        if before is None:
            return
        found_inf = getattr(optimizer, "found_inf", None)
        if found_inf is not None and bool(found_inf):
            return  # the fused kernel skipped the step, so the duals do too
        self.ace.duals.ascend(before, optimizer.param_groups[self.group]["lr"])
        if self.ace.landed:
            with torch.no_grad():
                self.ace.gamma.zero_()
        _tell(self.ace)


@dataclass
class Ownership:
    """What an optimizer owns, valid as long as ``seen`` describes it."""

    seen: tuple[int, ...]
    owned: list[Owned] = field(default_factory=list)


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
        for owned in reversed(known.owned):
            if owned.before is not None:
                owned.restore(optimizer)  # the step before raised in the middle
        if known.seen == _seen(optimizer):
            return known.owned
    known = Ownership(_seen(optimizer), _look(optimizer))
    _ownership[optimizer] = known
    return known.owned


def _look(optimizer: Optimizer) -> list[Owned]:
    places = {id(parameter): g for g, group in enumerate(optimizer.param_groups) for parameter in group["params"]}
    owned = []
    for ace in list(_live):
        if id(ace.gamma) in places:
            owned.append(Owned(ace, places[id(ace.gamma)]))
            _check_branches(ace, places)
        else:
            _check_not_missed(ace, optimizer, places)
    return owned


def _check_not_missed(ace: Ace, optimizer: Optimizer, places: dict[int, int]) -> None:
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


def _check_branches(ace: Ace, places: dict[int, int]) -> None:
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


def _before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if not _live:
        return
    owned = _owned(optimizer)
    if not owned:
        return
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is not None:
        raise StepError(
            f"{type(optimizer).__name__}.step(closure) computes its gradients inside the step, where the dual loop "
            "cannot add lambda; expected loss.backward() and then optimizer.step(), as SGD and Adam allow"
        )
    for each in owned:
        each.begin(optimizer)


def _after_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    known = _ownership.get(optimizer)
    if known is not None:
        # In reverse, so that groups appended last are taken out first.
        for owned in reversed(known.owned):
            owned.finish(optimizer)


def _tell(ace: Ace) -> None:
    model = ace.root
    if model is not None:
        observers().ace_stepped(model=model, step=ace.duals.count)


def _finish_all() -> None:
    """At exit: tell the observers that the runs are over."""
    for ace in list(_live):
        model = ace.root
        if model is not None and ace.duals.count:
            observers().ace_finished(model=model)


_installed = False


def _install() -> None:
    """The global hooks, with the first attached model: a process without one pays nothing."""
    global _installed
    if not _installed:
        _installed = True
        register_optimizer_step_pre_hook(_before_step)
        register_optimizer_step_post_hook(_after_step)
        atexit.register(_finish_all)
