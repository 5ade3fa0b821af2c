"""A step under a schedule: gamma's next value is known beforehand, and the branches are penalised."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, distributed
from torch.optim import Optimizer

from .distributed import is_distributed
from .fitted import Fitted
from .schedule import Map, gamma_at


@dataclass
class Scheduled(Fitted):
    """gamma by the clock. The penalties' gradients join those of the script's loss before its optimizer steps."""

    def take(self, optimizer: Optimizer) -> None:
        super().take(optimizer)
        found = [module for module in self.ace.branches.modules() if isinstance(module, Map)]
        with torch.enable_grad():
            told = [(module.weight, penalty) for module in found if (penalty := module.penalty()) is not None]
            if not told:
                return
            weights, penalties = zip(*told, strict=True)
            gradients = torch.autograd.grad(torch.stack(penalties).sum(), weights)
        scale = getattr(optimizer, "grad_scale", None)  # a fused optimizer divides by it inside its kernel
        sign = -1 if optimizer.param_groups[self.group].get("maximize") else 1
        for weight, gradient in zip(weights, gradients, strict=True):
            if is_distributed():  # each process has read another part of the batch
                distributed.all_reduce(gradient)
                gradient /= distributed.get_world_size()
            if weight.grad is not None:
                weight.grad.add_(sign * gradient if scale is None else sign * scale * gradient)

    def move(self, optimizer: Optimizer, before: Tensor, gradient: Tensor) -> None:
        ace, duals = self.ace, self.ace.duals
        ace.budget.look_at(optimizer, duals.count + 1)
        length = ace.budget.length(duals.count)
        duals.tick()
        if length is None:
            return
        ace.gamma.fill_(gamma_at(duals.count, length))
        if duals.count >= length:
            duals.error.fill_(-1.0)
            duals.note_landed()
            ace.sync()
