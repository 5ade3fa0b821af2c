"""Steps whose gradient is not finite. Neither gamma nor the duals move in them, as GradScaler has it for weights.

Which steps these are is known on the device alone, and nothing waits for it: what a step has moved is put back by
arithmetic. The host looks now and then, and tells once.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from ..errors import AceWarning
from .duals import Duals


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
