"""A step of the paper's loop: the constraints' pull goes into gamma's gradient, and the script's optimizer moves it."""

from __future__ import annotations

import warnings
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..errors import AceWarning, StepError
from .loop import Guard, Owned, is_finite
from .state import NAME

PATIENCE = 20
"""Steps in a row without a move of gamma after which it is told: some optimizers leave out parameters at random, others
move nothing before they have seen ten gradients."""
SKIPPING: weakref.WeakSet[Optimizer] = weakref.WeakSet()
"""Optimizers that were seen to pass over gamma's own group."""


@dataclass
class PaperLoop(Owned):
    """gamma in the hands of the script's optimizer."""

    pulled: Tensor | None = None
    """The script's gradient with the constraints' pull added. It is gamma's gradient during the step."""
    version: int = 0
    """The version counter of ``pulled`` when the step began. It tells whether somebody has written to it since."""
    params: list[Any] | None = None
    """The group's list of parameters, while gamma is in a group of its own."""
    own: dict[str, Any] | None = None
    """gamma's own group, while the step lasts."""
    separates: bool = False
    """gamma has stepped in a group of its own."""
    told: bool = False
    """That the optimizer does not move gamma."""
    unmoved: Tensor | None = None
    """Steps in a row in which gamma was pulled and did not move, on its device."""

    def check(self, optimizer: Optimizer) -> None:
        if "lr" not in optimizer.param_groups[self.group]:
            raise StepError(
                f"{type(optimizer).__name__} has no learning rate ('lr') in its groups, and the paper's loop moves its "
                "duals by it; use preset 'fit', where they have a pace of their own, or another optimizer"
            )

    def take(self, optimizer: Optimizer) -> None:
        assert self.before is not None
        assert self.grad is not None
        pull = self.ace.duals.pull(self.before)
        if optimizer.param_groups[self.group].get("maximize"):
            pull = -pull  # the optimizer turns every gradient round, and this one is of a minimisation
        scale = getattr(optimizer, "grad_scale", None)
        if scale is not None:
            pull = pull * scale  # a fused optimizer divides by it inside its kernel
        # One gradient that is not finite would stay in the optimizer's averages for good.
        self.ace.gamma.grad = self.pulled = torch.where(is_finite(self.grad), self.grad + pull, 0.0)
        self.version = self.pulled._version
        self._separate(optimizer)

    def _separate(self, optimizer: Optimizer) -> None:
        """Let gamma step in a group of its own, where its rate or weight decay differ from its group's.

        Only for the length of the step: schedulers, saved optimizer states and the script never see it. It is exact
        for every optimizer, which correcting gamma afterwards is not.
        """
        if any(isinstance(value, Optimizer) for value in vars(optimizer).values()):
            return  # a wrapper: the optimizer inside is the one that moves gamma, in groups of its own
        if optimizer in SKIPPING:
            return
        config = self.ace.config
        group = optimizer.param_groups[self.group]
        decays = bool(group.get("weight_decay", 0)) and not config.gamma_weight_decay
        if not decays and config.gamma_lr == 1:
            return
        self.separates = True
        self.own = {**group, "params": [self.ace.gamma], "lr": group["lr"] * config.gamma_lr}
        if decays:
            self.own["weight_decay"] = 0.0
        self.params = group["params"]
        group["params"] = [p for p in self.params if p is not self.ace.gamma]
        optimizer.param_groups.append(self.own)

    def give_back(self, optimizer: Optimizer, *, stepped: bool) -> None:
        gamma = self.ace.gamma
        # After a step that raised, the script may have zeroed or computed a gradient since: then it is its own.
        # In a step that went well only the optimizer can have written to it (fused ones unscale in place).
        if gamma.grad is self.pulled and (stepped or self.pulled is None or self.pulled._version == self.version):
            gamma.grad = self.grad
        if self.params is not None:
            optimizer.param_groups[:] = [group for group in optimizer.param_groups if group is not self.own]
            optimizer.param_groups[self.group]["params"] = self.params
        self.pulled = self.params = self.own = None

    def move(self, optimizer: Optimizer, before: Tensor, gradient: Tensor) -> None:
        gamma, config = self.ace.gamma, self.ace.config
        guard = Guard(self.ace.duals, gamma, before, gradient)
        self._watch(optimizer, before, gradient, guard.finite)
        if optimizer in SKIPPING and config.gamma_lr != 1:
            gamma.copy_(torch.lerp(before, gamma, config.gamma_lr))
        self.ace.duals.ascend(before, optimizer.param_groups[self.group]["lr"])
        guard.put_back()
        if self.ace.landed:
            self.ace.sync()
        elif config.may_wait(self.ace.duals.count) and self.unmoved is not None and float(self.unmoved) >= PATIENCE:
            self._tell(optimizer)

    def _watch(self, optimizer: Optimizer, before: Tensor, gradient: Tensor, finite: Tensor) -> None:
        """Whether the optimizer has moved gamma, where it was to."""
        rate = optimizer.param_groups[self.group]["lr"] * self.ace.config.gamma_lr
        # Beyond rounding: a gamma that has come to rest, or a warm-up that begins at 0, is nothing to tell of.
        least = 4 * torch.finfo(before.dtype).eps * before.abs()
        pulled = (rate * (gradient + self.ace.duals.pull(before)).abs() > least).any() & finite
        stays = (pulled & (self.ace.gamma == before).all()).float()
        self.unmoved = stays if self.unmoved is None else (self.unmoved + 1) * stays

    def _tell(self, optimizer: Optimizer) -> None:
        name = type(optimizer).__name__
        self.unmoved = None
        if self.separates and optimizer not in SKIPPING:
            SKIPPING.add(optimizer)
            told = (
                f"{name} passes over the parameter group that gamma steps in, as optimizers do that keep a list beside "
                "their groups; from here on gamma steps in the script's group: gamma_lr multiplies its step, and the "
                "group's weight decay acts on it"
            )
        elif self.told:
            return
        else:
            self.told = True
            told = (
                f"{name} does not move gamma (model.{NAME}.gamma) although it is pulled, and lambda grows in vain; use "
                "an optimizer that moves every parameter with a gradient, or preset 'fit', where gamma moves by itself"
            )
        warnings.warn(told, AceWarning, stacklevel=2)
