"""A step of the loops in which gamma moves by itself: at the run's pace, or by a schedule."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.optim import Optimizer

from .owned import Owned
from .pace import advance, land
from .skipping import Guard


@dataclass
class Fitted(Owned):
    """gamma at a pace that follows from the run's budget: the optimizer passes over it."""

    def take(self, optimizer: Optimizer) -> None:
        self.ace.gamma.grad = None

    def give_back(self, optimizer: Optimizer, *, stepped: bool) -> None:
        if self.ace.gamma.grad is None:  # otherwise the script has computed another since
            self.ace.gamma.grad = self.grad

    def move(self, optimizer: Optimizer, before: Tensor, gradient: Tensor) -> None:
        ace = self.ace
        scale = getattr(optimizer, "grad_scale", None)
        if scale is not None:
            gradient = gradient / scale  # a fused optimizer divides by it inside its kernel
        if optimizer.param_groups[self.group].get("maximize"):
            gradient = -gradient
        ace.budget.look_at(optimizer, ace.duals.count + 1)
        horizon = ace.budget.horizon(ace.duals.count)
        guard = Guard(ace.duals, ace.gamma, before, gradient)
        ace.gamma.copy_(advance(ace.duals, before, gradient, horizon))
        guard.put_back()
        if horizon is not None and land(ace.duals, horizon):
            ace.sync()
