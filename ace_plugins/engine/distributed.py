"""Keeps gamma, the duals and the budget equal on all ranks of distributed training.

One rank alone may load a checkpoint before the model is wrapped, and each rank detects the length of the run by itself.
So all ranks copy the duals and the budget from rank 0, at wrapping and every ``trace_every`` steps. With
``fully_shard``, ACE's parameters are not sharded, and this module averages their gradients.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed
from torch.nn.parallel import DistributedDataParallel

from ..errors import StepError

if TYPE_CHECKING:
    from .state import Ace

SHARD = "fully_shard(model, ignored_params=set(model.ace.parameters()))"  # named in error messages


def is_distributed() -> bool:
    return distributed.is_available() and distributed.is_initialized()


def rank() -> int:
    """Return the rank of this process; 0 if it trains alone."""
    return distributed.get_rank() if is_distributed() else int(os.environ.get("RANK", "0") or 0)


class Ranks:
    """The ranks that train one model together, with DDP or ``fully_shard``. Each rank has its own instance."""

    def __init__(self, group: Any = None, wrapper: DistributedDataParallel | None = None) -> None:
        self.sharded = wrapper is None
        self._group = group
        # Weak, because the wrapper holds the model, and a process group must not be kept until the process exits.
        self._wrapper: Callable[[], Any] = (lambda: None) if wrapper is None else weakref.ref(wrapper)
        self.steps = 0  # since the model was wrapped. Unlike `Duals.count`, this number is equal on all ranks.

    @property
    def group(self) -> Any:
        return getattr(self._wrapper(), "process_group", self._group)

    def check_in(self, ace: Ace) -> None:
        """Copy the state of rank 0 before every ``trace_every``-th step. Raises a StepError inside torch's ``Join``."""
        wrapper = self._wrapper()
        if wrapper is None and not self.sharded:
            return
        if wrapper is not None and wrapper._join_config.enable:
            unequal = (
                "torch.distributed's Join lets ranks make different numbers of steps, so their gammas would differ"
            )
            raise StepError(f"{unequal}; give all ranks the same number of batches (DistributedSampler does)")
        if ace.config.may_wait(self.steps):
            self.agree(ace)
        self.steps += 1

    def reduce(self, ace: Ace) -> None:
        """Average the gradients of ACE's parameters over the ranks if the model is sharded."""
        gradients = [p.grad for p in ace.parameters() if p.grad is not None] if self.sharded else []
        if gradients:
            _exchange(gradients, self._average)

    def agree(self, ace: Ace) -> None:
        """Copy gamma, ACE's buffers and the budget from rank 0 to all ranks. Waits for the device."""
        known = [-1 if fact is None else fact for fact in ace.budget.facts]
        facts = torch.tensor(known, dtype=torch.float64, device=ace.gamma.device)
        first = list(ace.parameters()) if self.sharded and not self.steps else [ace.gamma]
        tensors = [facts, *(parameter.detach() for parameter in first), *ace.buffers()]
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
            _exchange([tensor for tensor in tensors if tensor.dtype == dtype], self._broadcast)
        ace.budget.agreed = [None if fact < 0 else round(fact) for fact in facts.tolist()]
        ace.duals.read_buffers()
        ace.sync()

    def _average(self, flat: Tensor) -> None:
        distributed.all_reduce(flat, group=self.group)
        flat /= distributed.get_world_size(self.group)

    def _broadcast(self, flat: Tensor) -> None:
        distributed.broadcast(flat, distributed.get_global_rank(self.group, 0), group=self.group)


@torch.no_grad()
def _exchange(tensors: list[Tensor], send: Callable[[Tensor], None]) -> None:
    """Exchange tensors with the other ranks in one message of float32 or wider, and write the result into them."""
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    flat = flat.float() if flat.is_floating_point() and flat.dtype.itemsize < 4 else flat
    send(flat)
    for tensor, received in zip(tensors, torch.split(flat, [tensor.numel() for tensor in tensors]), strict=True):
        value = received.to(tensor.dtype).view_as(tensor)
        if not torch.equal(tensor, value):  # a write would make bounded branches recompute their directions
            tensor.copy_(value)


def find_shards(ace: Ace) -> None:
    """Set the `Ranks` of a model that ``fully_shard`` has sharded. Raises a StepError if ACE itself is sharded."""
    tensor = sys.modules.get("torch.distributed.tensor")
    if tensor is None or ace.root is None or ace.session.ranks is not None:
        return
    if any(isinstance(parameter, tensor.DTensor) for parameter in ace.parameters()):
        raise StepError(f"fully_shard has sharded ACE's parameters, but every rank needs all of gamma; use {SHARD}")
    shards = [parameter for parameter in ace.root.parameters() if isinstance(parameter, tensor.DTensor)]
    if shards:
        mesh = shards[0].device_mesh
        ace.session.ranks = Ranks(mesh.get_group() if mesh.ndim == 1 else distributed.group.WORLD)
