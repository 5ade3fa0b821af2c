"""Steps whose gradient is not finite. Neither gamma nor the duals move in them, as GradScaler has it for weights.

Which steps these are is known on the device alone, and nothing waits for it: what a step has moved is put back by
arithmetic. The host looks now and then, and tells once.

gamma of one model in one optimizer, while a step of it is under way.

What a step does to gamma depends on the loop: see `Owned`'s subclasses in ``paper`` and ``paced``.
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
    """A scalar on the gradient's device: whether every entry, and its square, is finite."""
    return gradient.square().isfinite().all()


class Guard:
    """gamma and the duals as they were before a step."""

    def __init__(self, duals: Duals, gamma: Tensor, before: Tensor, gradient: Tensor) -> None:
        self.duals = duals
        self.finite = is_finite(gradient)
        self._moving = [gamma, duals.lambda_, duals.u, duals.mean, duals.square, duals.error]
        self._before = torch.stack([before, *self._moving[1:]])

    def put_back(self) -> None:
        """After the step: everything as it was, if the step's gradient was not finite."""
        kept = torch.where(self.finite, torch.stack(self._moving), self._before)
        for tensor, value in zip(self._moving, kept.unbind(0), strict=True):
            tensor.copy_(value)
        self.duals.count_skipped(~self.finite)


def tell_of_skipped(duals: Duals) -> None:
    """Once in a run, that there were such steps. Asking waits for the device."""
    if duals.skipped is None or duals.skipped_told:
        return
    skipped = round(float(duals.skipped[0]))
    if skipped:
        duals.skipped_told = True
        warnings.warn(
            f"the loss's gradient at gamma was not finite in {skipped} of {duals.count:,} steps: gamma, lambda and u "
            "keep the values they had before such a step; if it goes on, lower the learning rate",
            AceWarning,
            stacklevel=2,
        )


@dataclass
class Owned(ABC):
    """Where gamma stands in an optimizer, and what a step under way has put aside."""

    ace: Ace
    group: int
    index: int
    before: Tensor | None = None
    """gamma as it was when the step began; None when no step is under way."""
    grad: Tensor | None = None
    """The gradient that the script computed."""

    @abstractmethod
    def take(self, optimizer: Optimizer) -> None:
        """Put gamma's gradient in order for the optimizer's step; ``before`` and ``grad`` are set."""

    @abstractmethod
    def give_back(self, optimizer: Optimizer, *, stepped: bool) -> None:
        """Undo what `take` did to the optimizer and to gamma's gradient."""

    @abstractmethod
    def move(self, optimizer: Optimizer, before: Tensor, gradient: Tensor) -> None:
        """After the script's step, while gamma has not landed: move the duals, and gamma where the loop does so."""

    def check(self, optimizer: Optimizer) -> None:  # noqa: B027  (most loops ask for nothing)
        """Refuse an optimizer that this loop cannot go by."""

    def holds(self, optimizer: Optimizer) -> bool:
        """gamma is still where it was found."""
        params = optimizer.param_groups[self.group]["params"]
        return self.index < len(params) and params[self.index] is self.ace.gamma

    def begin(self, optimizer: Optimizer) -> None:
        """The gradients of the step are there."""
        gamma = self.ace.gamma
        if not gamma.requires_grad or gamma.grad is None:
            return  # the model took no part in this step, or its gamma is frozen
        if self.ace.session.running is not None:
            # This optimizer is driven by another one's step (ZeroRedundancyOptimizer, Lookahead): it moves gamma.
            outer, its_optimizer = self.ace.session.running
            outer.restore(its_optimizer)
        elif self.ace.session.ranks is not None:
            self.ace.session.ranks.reduce(self.ace)
        if self.ace.hooks is not None and not self.ace.hooks.verified:
            self.ace.sync()  # a compiled forward does not
        self.before = gamma.detach().clone()
        self.grad = gamma.grad
        self.ace.session.running = (self, optimizer)
        self.take(optimizer)

    def restore(self, optimizer: Optimizer, *, stepped: bool = False) -> None:
        """Gradient and groups as the script had them."""
        if self.before is None:
            return
        self.give_back(optimizer, stepped=stepped)
        self.before = self.grad = None
        self.ace.session.running = None

    def finish(self, optimizer: Optimizer) -> bool:
        """After the script's step. Says whether the duals moved."""
        before, gradient = self.before, self.grad
        self.restore(optimizer, stepped=True)
        if before is None or gradient is None:
            return False
        self.ace.passes.count = 0
        session = self.ace.session
        session.stepped, session.steps_without_gamma = True, 0
        session.observed = LOSSES.take(gradient, optimizer)
        found_inf = getattr(optimizer, "found_inf", None)
        if found_inf is not None and bool(found_inf):
            return False  # the fused kernel skipped the step, so the duals do too
        moves = not self.ace.landed
        with torch.no_grad():
            if moves:
                self.move(optimizer, before, gradient)
                if self.ace.config.may_wait(self.ace.duals.count):
                    tell_of_skipped(self.ace.duals)
            if self.ace.landed:
                self.ace.gamma.zero_()
        return moves
