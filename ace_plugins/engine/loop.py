"""One model's training in this process: its session, and the loop that moves gamma whenever an optimizer steps.

Steps with a non-finite gradient move neither gamma nor the duals, just as GradScaler skips updates of weights. The loop
restores the old values with tensor operations, so that no step waits for the device. The loss of a step is the tensor
on which ``backward`` was last called, or the sum of such tensors if the script accumulates gradients.
"""

from __future__ import annotations

import threading
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from ..errors import AceWarning
from .duals import Duals

if TYPE_CHECKING:
    import weakref

    from .distributed import Ranks
    from .state import Ace


@dataclass
class Observed:
    """Loss, gradient and learning rates of a model's last step, for observers."""

    loss: Tensor | None = None
    gradient: Tensor | None = None  # gradient of the loss at gamma, [sites]
    rates: tuple[Any, ...] = ()  # learning rates of the optimizer's parameter groups, each a number or a tensor


class Losses(threading.local):
    """The loss of this thread's last backward pass, recorded by wrappers of ``backward`` and ``GradScaler.scale``."""

    idle: ClassVar[Any] = None  # called by the next backward pass, to undo what could not be undone during a step

    def __init__(self) -> None:
        self.last: Tensor | None = None
        self._scaled: tuple[int, Tensor] | None = None  # ``id`` of a GradScaler's last result, and the unscaled loss

    def record(self, tensors: Any, *, accumulates: bool) -> None:
        """Record the loss that ``backward`` is called on. It is added to the last one if the gradients are added."""
        if self.idle is not None:
            self.idle()
        elif isinstance(tensors, Tensor) and tensors.numel() == 1 and not torch.compiler.is_compiling():
            scaled, self._scaled = self._scaled, None
            loss = scaled[1] if scaled is not None and scaled[0] == id(tensors) else tensors.detach()
            self.last = self.last + loss.to(self.last) if accumulates and self.last is not None else loss

    def scale(self, scale: Any, scaler: Any, outputs: Any) -> Any:
        """Wrap ``GradScaler.scale`` to record the loss before it is scaled."""
        made = scale(scaler, outputs)
        self._scaled = (id(made), outputs.detach()) if isinstance(outputs, Tensor) and made is not outputs else None
        return made

    def take(self, gradient: Tensor | None, optimizer: Optimizer) -> Observed:
        """Return loss, gradient and learning rates of the step that ends now, and forget the loss."""
        loss, self.last = self.last, None
        rates = tuple(group["lr"] for group in optimizer.param_groups if "lr" in group)
        return Observed(loss, None if gradient is None else gradient.detach(), rates)


LOSSES = Losses()


@dataclass
class Session:
    """State of one model's training in this process: the step in progress and the ranks that train together."""

    ranks: Ranks | None = None  # the ranks that train the model together, with DDP or ``fully_shard``
    running: tuple[Loop, Optimizer] | None = None  # loop and optimizer of the step in progress; None between steps
    observed: Observed = field(default_factory=Observed)
    warned: bool = False  # True once the user was warned that all sites had landed before training began
    adopted: list[tuple[weakref.ref[Optimizer], list[nn.Parameter]]] = field(default_factory=list)
    """The optimizers to which `adopt` has added parameters, with these parameters."""
    started: bool = False  # True once it was checked that gamma has its initial value
    goes_on: bool = False  # True in a step of a landed model; such a step is only counted
    zeros: MutableMapping[Tensor, tuple[Tensor, int]] = field(default_factory=WeakIdKeyDictionary)
    """Gradients of parameters of landed sites, all 0, each with its number of changes in place when it was created."""


def is_finite(gradient: Tensor) -> Tensor:
    """Return a scalar tensor, on the gradient's device: true if every entry and its square are finite."""
    return gradient.square().isfinite().all()


@contextmanager
def skip_unless_finite(duals: Duals, gamma: Tensor, before: Tensor, gradient: Tensor) -> Iterator[None]:
    """Undo the changes of a ``with`` block to gamma and the duals if the gradient is not finite; count such steps."""
    finite = is_finite(gradient)
    moving = [gamma, *duals.moving()]
    values = torch.stack([before, *moving[1:]])
    yield
    for tensor, value in zip(moving, torch.where(finite, torch.stack(moving), values).unbind(0), strict=True):
        tensor.copy_(value)
    duals.count_skipped(~finite)


def warn_of_skipped(duals: Duals) -> None:
    """Warn once if there were steps with a gradient that was not finite. Waits for the device."""
    skipped = 0 if duals.skipped is None or duals.warned else round(float(duals.skipped[0]))
    if skipped:
        duals.warned = True
        warnings.warn(
            f"the loss's gradient at gamma was not finite in {skipped} of {duals.count:,} steps, so gamma, lambda and "
            "u kept their values in these steps; if this continues, lower the learning rate",
            AceWarning,
            stacklevel=2,
        )


@dataclass
class Loop(ABC):
    """The dual loop of one model: the group that gamma is in, and the state of the step in progress."""

    ace: Ace
    group: int
    before: Tensor | None = None  # gamma at the beginning of the step; None between steps
    gradient: Tensor | None = None  # gradient at gamma that the script computed; None between steps

    @abstractmethod
    def prepare(self, optimizer: Optimizer) -> None:
        """Change gamma's gradient, or the optimizer's groups, for the optimizer's step."""

    @abstractmethod
    def undo(self, optimizer: Optimizer, *, stepped: bool) -> None:
        """Undo what `prepare` changed."""

    @abstractmethod
    def advance(self, optimizer: Optimizer, before: Tensor, gradient: Tensor) -> None:
        """Update the duals, and gamma if the optimizer does not move it. Not called after all sites have landed."""

    def factor(self, optimizer: Optimizer) -> Any:
        """Return the factor of the stored gradients: GradScaler's scale, if any, and -1 if the optimizer maximises.

        The scale counts only for fused optimizers, which divide gradients by it inside their kernel.
        """
        sign = -1 if optimizer.param_groups[self.group].get("maximize") else 1
        scale = getattr(optimizer, "grad_scale", None)
        return sign if scale is None else sign * scale

    def begin(self, optimizer: Optimizer) -> None:
        """Begin a step. Called when the gradients of the step have been computed."""
        ace, session, gamma = self.ace, self.ace.session, self.ace.gamma
        session.goes_on = ace.landed
        if not gamma.requires_grad or gamma.grad is None:
            return  # the model took no part in this step, or its gamma is frozen
        if not session.started:
            ace.start()
        if session.running is not None:
            # This step was called inside another optimizer's step (ZeroRedundancyOptimizer), and moves gamma.
            outer, its_optimizer = session.running
            outer.restore(its_optimizer)
        elif session.ranks is not None:
            session.ranks.reduce(ace)
        if ace.hooks is not None and not ace.hooks.verified:
            ace.sync()  # a compiled forward pass does not update the hooks
        self.before = gamma.detach().clone()
        self.gradient = gamma.grad
        session.running = (self, optimizer)
        self.prepare(optimizer)

    def restore(self, optimizer: Optimizer, *, stepped: bool = False) -> None:
        """Restore the script's gradient and parameter groups."""
        if self.before is None:
            return
        self.undo(optimizer, stepped=stepped)
        self.before = self.gradient = self.ace.session.running = None

    def finish(self, optimizer: Optimizer) -> bool:
        """End a step. Returns True if the duals were updated, or if the model has landed and is still training."""
        ace, session = self.ace, self.ace.session
        before, gradient = self.before, self.gradient
        self.restore(optimizer, stepped=True)
        if session.goes_on:  # False again after a step within a step
            session.goes_on = False
            session.observed = LOSSES.take(None, optimizer)
            if ace.config.paced:  # for reports: a run may be resumed after its landing
                ace.budget.inspect(optimizer, ace.root, ace.duals.count + 1)
            ace.duals.tick()
            if before is not None:
                ace.gamma.detach().zero_()
            return True
        if before is None or gradient is None:
            return False
        ace.passes.forget_frames()
        session.observed = LOSSES.take(gradient, optimizer)
        found_inf = getattr(optimizer, "found_inf", None)
        if found_inf is not None and bool(found_inf):
            return False  # the fused kernel skipped the update, so the duals skip it as well
        with torch.no_grad():
            self.advance(optimizer, before, gradient)
            if ace.config.may_wait(ace.duals.count):
                warn_of_skipped(ace.duals)
            if ace.landed:
                ace.gamma.zero_()
        return True
