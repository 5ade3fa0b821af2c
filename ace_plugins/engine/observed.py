"""What a step was made of, for observers: the loss, its gradient at gamma, the learning rates.

The loss is the tensor that ``backward`` was last called on. Nothing is computed and nothing waits for the device: only
references are kept, and whoever writes a line of a trace reads them then.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import wrapt
from torch import Tensor
from torch.optim import Optimizer


@dataclass
class Observed:
    """Of the last step of one model."""

    loss: Tensor | None = None
    gradient: Tensor | None = None
    """Of the loss at gamma, [sites]."""
    rates: tuple[Any, ...] = ()
    """The learning rate of every parameter group, a number or a tensor."""


class Losses:
    """The loss of the backward that was made last in this process."""

    def __init__(self) -> None:
        self.last: Tensor | None = None
        self._scaled: tuple[int, Tensor] | None = None
        """A tensor that a GradScaler made, by its identity, and the loss it made it of."""
        self.installed = False

    def install(self) -> None:
        """With the first attached model."""
        if not self.installed:
            self.installed = True
            wrapt.wrap_function_wrapper("torch.autograd", "backward", self._backward)
            wrapt.wrap_function_wrapper("torch.amp", "GradScaler.scale", self._scale)

    def _backward(self, backward: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors = args[0] if args else kwargs.get("tensors")
        if isinstance(tensors, Tensor) and tensors.numel() == 1 and not torch.compiler.is_compiling():
            scaled, self._scaled = self._scaled, None
            self.last = scaled[1] if scaled is not None and scaled[0] == id(tensors) else tensors.detach()
        return backward(*args, **kwargs)

    def _scale(self, scale: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        made = scale(*args, **kwargs)
        loss = args[0] if args else kwargs.get("outputs")
        self._scaled = (id(made), loss.detach()) if isinstance(loss, Tensor) and made is not loss else None
        return made

    def observed(self, gradient: Tensor, optimizer: Optimizer) -> Observed:
        """The step that ends now."""
        loss, self.last = self.last, None
        return Observed(
            loss, gradient.detach(), tuple(group["lr"] for group in optimizer.param_groups if "lr" in group)
        )


LOSSES = Losses()
