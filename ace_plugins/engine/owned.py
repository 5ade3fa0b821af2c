"""gamma of one model in one optimizer: what a step puts aside, and what it moves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .pace import advance, land
from .state import Ace


@dataclass
class Owned:
    """Where gamma stands in an optimizer, and what a step under way has put aside."""

    ace: Ace
    group: int
    index: int
    before: Tensor | None = None
    """gamma as it was when the step began; None when no step is under way."""
    grad: Tensor | None = None
    """The gradient that the script computed."""
    pulled: Tensor | None = None
    """That gradient with the constraints' pull added. It is gamma's gradient during the step."""
    version: int = 0
    """The version counter of ``pulled`` when the step began. It tells whether somebody has written to it since."""
    params: list[Any] | None = None
    """The group's list of parameters, while gamma is in a group of its own."""
    own: dict[str, Any] | None = None
    """gamma's own group, while the step lasts."""

    def holds(self, optimizer: Optimizer) -> bool:
        """gamma is still where it was found."""
        params = optimizer.param_groups[self.group]["params"]
        return self.index < len(params) and params[self.index] is self.ace.gamma

    def begin(self, optimizer: Optimizer) -> None:
        gamma = self.ace.gamma
        rested = bool(self.ace.forwards) and not self.ace.took_part
        if not gamma.requires_grad or (gamma.grad is None and not rested):
            return  # the model took no part in this step, or its gamma is frozen
        if self.ace.under_way is not None:
            # This optimizer is driven by another one's step (ZeroRedundancyOptimizer, Lookahead): it moves gamma.
            outer, its_optimizer = self.ace.under_way
            outer.restore(its_optimizer)
        self.before = gamma.detach().clone()
        self.grad = None if rested else gamma.grad
        self.ace.under_way = (self, optimizer)
        if self.ace.config.loop == "fitted":
            gamma.grad = None  # the optimizer passes over it: gamma moves at its own pace
            return
        pull = self.ace.duals.pull(self.before)
        if optimizer.param_groups[self.group].get("maximize"):
            pull = -pull  # the optimizer turns every gradient round, and this one is of a minimisation
        scale = getattr(optimizer, "grad_scale", None)
        if scale is not None:
            pull = pull * scale  # a fused optimizer divides by it inside its kernel
        assert self.grad is not None  # branches rest in the other loop only
        gamma.grad = self.pulled = self.grad + pull
        self.version = self.pulled._version
        self._separate(optimizer)

    def _separate(self, optimizer: Optimizer) -> None:
        """Let gamma step in a group of its own, where its rate or weight decay differ from its group's.

        Only for the length of the step: schedulers, saved optimizer states and the script never see it. It is exact
        for every optimizer, which correcting gamma afterwards is not.
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
        if self.before is None:
            return
        gamma = self.ace.gamma
        # After a step that raised, the script may have zeroed or computed a gradient since: then it is its own.
        # In a step that went well only the optimizer can have written to it (fused ones unscale in place).
        if gamma.grad is self.pulled and (stepped or self.pulled is None or self.pulled._version == self.version):
            gamma.grad = self.grad
        if self.params is not None:
            optimizer.param_groups[:] = [group for group in optimizer.param_groups if group is not self.own]
            optimizer.param_groups[self.group]["params"] = self.params
        self.before = self.grad = self.pulled = self.params = self.own = None
        self.ace.under_way = None

    def finish(self, optimizer: Optimizer) -> bool:
        """After the script's step: move the duals. Says whether they moved."""
        before, gradient = self.before, self.grad
        self.restore(optimizer, stepped=True)
        if before is None:
            return False
        self.ace.forwards, self.ace.took_part = 0, False
        found_inf = getattr(optimizer, "found_inf", None)
        if found_inf is not None and bool(found_inf):
            return False  # the fused kernel skipped the step, so the duals do too
        moves = not self.ace.landed
        with torch.no_grad():
            if moves and self.ace.config.loop == "fitted":
                self._advance(optimizer, before, gradient)
            elif moves:
                self.ace.duals.ascend(before, optimizer.param_groups[self.group]["lr"])
            if self.ace.landed:
                self.ace.gamma.zero_()
        return moves

    def _advance(self, optimizer: Optimizer, before: Tensor, gradient: Tensor | None) -> None:
        """gamma's own step, in the loop that fits the run; without a gradient where the branches have rested."""
        ace = self.ace
        scale = getattr(optimizer, "grad_scale", None)
        if scale is not None and gradient is not None:
            gradient = gradient / scale  # a fused optimizer divides by it inside its kernel
        if optimizer.param_groups[self.group].get("maximize") and gradient is not None:
            gradient = -gradient
        ace.budget.look_at(optimizer, ace.duals.count + 1)
        horizon = ace.budget.horizon(ace.duals.count)
        ace.gamma.copy_(advance(ace.duals, before, gradient, horizon))
        if horizon is not None and land(ace.duals, horizon):
            ace.sync()
