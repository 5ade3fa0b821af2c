"""State of one model's training in this process that is neither saved nor copied: its steps and its ranks.

The loss of a step is the tensor that ``backward`` was last called on. Only references are kept: nothing is computed,
and nothing waits for the device until somebody reads them.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import AceWarning

if TYPE_CHECKING:
    import weakref
    from collections.abc import Callable

    from .distributed import Ranks
    from .loop import Loop

FORWARDS = 200
"""Training forwards without a step of gamma after which the session checks that no weights move."""


@dataclass
class Observed:
    """Loss, gradient and learning rates of a model's last step, for observers."""

    loss: Tensor | None = None
    gradient: Tensor | None = None
    """Gradient of the loss at gamma, [sites]."""
    rates: tuple[Any, ...] = ()
    """Learning rate of every parameter group, a number or a tensor."""


class Losses:
    """The loss of the last backward of this process, recorded by wrappers of ``backward`` and ``GradScaler.scale``."""

    def __init__(self) -> None:
        self.last: Tensor | None = None
        self._scaled: tuple[int, Tensor] | None = None
        """Identity of the tensor that a GradScaler returned last, and the loss it was computed from."""
        self.idle: Callable[[], None] | None = None
        """Called by the next backward: no optimizer iterates over its step hooks then."""

    def backward(self, backward: Any, tensors: Any, *args: Any, **kwargs: Any) -> None:
        """Wrap ``torch.autograd.backward``."""
        if self.idle is not None:
            self.idle()
        elif isinstance(tensors, Tensor) and tensors.numel() == 1 and not torch.compiler.is_compiling():
            scaled, self._scaled = self._scaled, None
            self.last = scaled[1] if scaled is not None and scaled[0] == id(tensors) else tensors.detach()
        backward(tensors, *args, **kwargs)

    def scale(self, scale: Any, scaler: Any, outputs: Any) -> Any:
        """Wrap ``GradScaler.scale``."""
        made = scale(scaler, outputs)
        self._scaled = (id(made), outputs.detach()) if isinstance(outputs, Tensor) and made is not outputs else None
        return made

    def take(self, gradient: Tensor, optimizer: Optimizer) -> Observed:
        """Return what the step that ends now was made of."""
        loss, self.last = self.last, None
        rates = tuple(group["lr"] for group in optimizer.param_groups if "lr" in group)
        return Observed(loss, gradient.detach(), rates)


LOSSES = Losses()


class Session:
    """Steps and ranks of one model in this process."""

    def __init__(self) -> None:
        self.ranks: Ranks | None = None
        """The processes that train the model together, under DistributedDataParallel or ``fully_shard``."""
        self.running: tuple[Loop, Optimizer] | None = None
        """The optimizer step under way, between its two hooks."""
        self.observed = Observed()
        self.stepped = False
        """Whether gamma has made a step."""
        self.adopted: tuple[weakref.ref[Optimizer], dict[str, Any]] | None = None
        """The optimizer, built without ACE's parameters, that they were added to, and their group in it."""
        self.steps_without_gamma = 0
        """Steps of optimizers with the model's weights since the last step of the one with gamma."""
        self._forwards = 0
        self._sample: tuple[Tensor, Tensor] | None = None
        """One of the model's weights, and its value at the first training forward."""

    def count_forward(self, model: nn.Module) -> None:
        """Count a training forward before gamma's first step. Warns once if weights move without a step."""
        self._forwards += 1
        if self._forwards == 1:
            weights = [p for name, p in model.named_parameters() if p.requires_grad and not name.startswith("ace.")]
            if weights:
                smallest = min(weights, key=Tensor.numel)
                self._sample = smallest, smallest.detach().clone()
        if self._forwards != FORWARDS or self._sample is None:
            return
        weight, before = self._sample
        if weight.shape == before.shape and not torch.equal(weight.detach(), before):
            warnings.warn(
                f"the weights of {type(model).__name__} change, but no torch.optim.Optimizer has updated its gamma "
                f"(model.ace.gamma) in {FORWARDS} training forwards, so ACE has no effect; train with a "
                "torch.optim.Optimizer over model.parameters()",
                AceWarning,
                stacklevel=2,
            )
