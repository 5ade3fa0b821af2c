"""gamma of one model in one optimizer: what all loops have in common.

Steps with a gradient that is not finite move neither gamma nor the duals, as GradScaler does with weights. Which steps
these are is known on the device only, and nothing waits for it: `Guard` restores the values by arithmetic. The host
checks now and then, and warns once.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..errors import AceWarning
from .duals import Duals
from .session import LOSSES
from .state import Ace


def is_finite(gradient: Tensor) -> Tensor:
    """Return whether every entry, and its square, is finite: a scalar on the gradient's device."""
    return gradient.square().isfinite().all()


class Guard:
    """gamma and the duals before a step, which it restores if the step's gradient was not finite."""

    def __init__(self, duals: Duals, gamma: Tensor, before: Tensor, gradient: Tensor) -> None:
        self.duals = duals
        self.finite = is_finite(gradient)
        self._moving = [gamma, *duals.moving()]
        self._before = torch.stack([before, *self._moving[1:]])

    def put_back(self) -> None:
        """Restore everything after a step with a gradient that was not finite."""
        kept = torch.where(self.finite, torch.stack(self._moving), self._before)
        for tensor, value in zip(self._moving, kept.unbind(0), strict=True):
            tensor.copy_(value)
        self.duals.count_skipped(~self.finite)


def warn_of_skipped(duals: Duals) -> None:
    """Warn once if there were steps with a gradient that was not finite. Waits for the device."""
    if duals.skipped is None or duals.warned:
        return
    skipped = round(float(duals.skipped[0]))
    if skipped:
        duals.warned = True
        warnings.warn(
            f"the loss's gradient at gamma was not finite in {skipped} of {duals.count:,} steps; gamma, lambda and u "
            "keep their values in such steps; if it continues, lower the learning rate",
            AceWarning,
            stacklevel=2,
        )


@dataclass
class Loop(ABC):
    """gamma's place in an optimizer, and the state of a step under way."""

    ace: Ace
    group: int
    index: int
    before: Tensor | None = None
    """gamma at the beginning of the step; None between steps."""
    gradient: Tensor | None = None
    """The gradient that the script computed."""

    @abstractmethod
    def prepare(self, optimizer: Optimizer) -> None:
        """Change gamma's gradient, or the optimizer's groups, for the optimizer's step."""

    @abstractmethod
    def undo(self, optimizer: Optimizer, *, stepped: bool) -> None:
        """Undo what `prepare` changed."""

    @abstractmethod
    def advance(self, optimizer: Optimizer, before: Tensor, gradient: Tensor) -> None:
        """Move the duals, and gamma where the optimizer has not, while gamma has not landed."""

    def check(self, optimizer: Optimizer) -> None:  # noqa: B027  (most loops accept all)
        """Refuse an optimizer that this loop cannot use."""

    def holds(self, optimizer: Optimizer) -> bool:
        """Return whether gamma is still in its place."""
        params = optimizer.param_groups[self.group]["params"]
        return self.index < len(params) and params[self.index] is self.ace.gamma

    def begin(self, optimizer: Optimizer) -> None:
        """Begin a step with gradients that are computed."""
        ace, session, gamma = self.ace, self.ace.session, self.ace.gamma
        if not gamma.requires_grad or gamma.grad is None:
            return  # the model took no part in this step, or its gamma is frozen
        if session.running is not None:
            # Another optimizer's step drives this one (ZeroRedundancyOptimizer): this one moves gamma.
            outer, its_optimizer = session.running
            outer.restore(its_optimizer)
        elif session.ranks is not None:
            session.ranks.reduce(ace)
        if ace.hooks is not None and not ace.hooks.verified:
            ace.sync()  # a compiled forward does not
        self.before = gamma.detach().clone()
        self.gradient = gamma.grad
        session.running = (self, optimizer)
        self.prepare(optimizer)

    def restore(self, optimizer: Optimizer, *, stepped: bool = False) -> None:
        """Give the script its gradient and groups back."""
        if self.before is None:
            return
        self.undo(optimizer, stepped=stepped)
        self.before = self.gradient = self.ace.session.running = None

    def finish(self, optimizer: Optimizer) -> bool:
        """End a step. Returns whether the duals moved."""
        before, gradient = self.before, self.gradient
        self.restore(optimizer, stepped=True)
        if before is None or gradient is None:
            return False
        ace, session = self.ace, self.ace.session
        ace.passes.count = 0
        session.stepped, session.steps_without_gamma = True, 0
        session.observed = LOSSES.take(gradient, optimizer)
        found_inf = getattr(optimizer, "found_inf", None)
        if found_inf is not None and bool(found_inf):
            return False  # the fused kernel skipped the step, so the duals do too
        moves = not ace.landed
        with torch.no_grad():
            if moves:
                self.advance(optimizer, before, gradient)
                if ace.config.may_wait(ace.duals.count):
                    warn_of_skipped(ace.duals)
            if ace.landed:
                ace.gamma.zero_()
        return moves
