"""The paper's loop: the gradient of the constraints is added to gamma's, and the script's optimizer moves gamma."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .loop import Guard, Loop, is_finite


@dataclass
class PaperLoop(Loop):
    """A loop in which the script's optimizer moves gamma."""

    pulled: Tensor | None = None
    """gamma's gradient during the step: the script's gradient plus that of the constraints."""
    version: int = 0
    """PyTorch's version counter of ``pulled`` at the beginning of the step, to detect writes to this tensor."""
    params: list[Any] | None = None
    """The original parameter list of gamma's group, kept while gamma is in a separate group; otherwise None."""
    separate: dict[str, Any] | None = None
    """The parameter group that contains only gamma, during the step; otherwise None."""

    def prepare(self, optimizer: Optimizer) -> None:
        assert self.before is not None
        assert self.gradient is not None
        pull = self.ace.duals.pull(self.before)
        if optimizer.param_groups[self.group].get("maximize"):
            pull = -pull  # the optimizer negates every gradient, but the constraints are minimised
        scale = getattr(optimizer, "grad_scale", None)
        if scale is not None:
            pull = pull * scale  # a fused optimizer divides gradients by the scale inside its kernel
        # The optimizer's running averages would never recover from a gradient that is not finite.
        self.ace.gamma.grad = self.pulled = torch.where(is_finite(self.gradient), self.gradient + pull, 0.0)
        self.version = self.pulled._version
        self._separate(optimizer)

    def _separate(self, optimizer: Optimizer) -> None:
        """Move gamma into a separate group for this step, if its learning rate or weight decay differs.

        Schedulers, saved optimizer states and the script never see that group. This is exact for every optimizer,
        unlike a correction of gamma after the step.
        """
        config, group = self.ace.config, optimizer.param_groups[self.group]
        decays = bool(group.get("weight_decay", 0)) and not config.gamma_weight_decay
        if not decays and config.gamma_lr == 1:
            return
        if any(isinstance(value, Optimizer) for value in vars(optimizer).values()):
            return  # this optimizer wraps another one, which moves gamma
        self.separate = {**group, "params": [self.ace.gamma], "lr": group["lr"] * config.gamma_lr}
        if decays:
            self.separate["weight_decay"] = 0.0
        self.params = group["params"]
        group["params"] = [p for p in self.params if p is not self.ace.gamma]
        optimizer.param_groups.append(self.separate)

    def undo(self, optimizer: Optimizer, *, stepped: bool) -> None:
        gamma = self.ace.gamma
        # If the step raised an error, the script may since have zeroed or recomputed the gradient, which is then kept.
        # In a successful step only the optimizer can have written to it (fused optimizers unscale in place).
        if gamma.grad is self.pulled and (stepped or self.pulled is None or self.pulled._version == self.version):
            gamma.grad = self.gradient
        if self.params is not None:
            optimizer.param_groups[:] = [group for group in optimizer.param_groups if group is not self.separate]
            optimizer.param_groups[self.group]["params"] = self.params
        self.pulled = self.params = self.separate = None

    def advance(self, optimizer: Optimizer, before: Tensor, gradient: Tensor) -> None:
        guard = Guard(self.ace.duals, self.ace.gamma, before, gradient)
        self.ace.duals.ascend(before, optimizer.param_groups[self.group]["lr"])
        guard.put_back()
        if self.ace.landed:
            self.ace.sync()
