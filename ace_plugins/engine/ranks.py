"""Processes that train one model together: what they agree on, and what DistributedDataParallel is told.

DistributedDataParallel makes gradients equal in all processes, so gamma and the duals move alike by themselves. Two
things would part them. A checkpoint that one process loads before the model is wrapped: the wrapping sends parameters
and buffers to all, but not what is derived from them. And the run's length, which each process finds out for itself,
while often only the first one evaluates. So all take both from the first process, when the model is wrapped and every
``trace_every`` steps.

A model that ``fully_shard`` shards keeps ACE whole in every process, where the script says so; its gradients are made
equal here.

ACE's buffers are hidden from DistributedDataParallel. It would send them before every forward, also before one that
only the first process makes: what plain upstream may do would hang.
"""

from __future__ import annotations

import sys
import weakref
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from ..errors import AttachError, StepError
from .state import NAME, Ace

SHARD = f"fully_shard(model, ignored_params=set(model.{NAME}.parameters()))"
"""How a model is sharded with ACE left whole."""

IGNORED = "_ddp_params_and_buffers_to_ignore"
"""Where DistributedDataParallel looks for the names of what it is to leave alone."""


class Ranks:
    """The processes that train one model, seen from one of them."""

    def __init__(self, group: Any = None, wrapper: DistributedDataParallel | None = None) -> None:
        self.sharded = wrapper is None
        """Then nobody else makes the gradients of ACE's parameters equal."""
        self._group = group
        # Weakly: the wrapper holds the model, and a group of processes that outlives its end aborts the process.
        self._wrapper = None if wrapper is None else weakref.ref(wrapper)
        self.steps = 0
        """Since the model was wrapped. The model's own count may come from a checkpoint that not all have loaded."""

    @property
    def wrapper(self) -> DistributedDataParallel | None:
        """None where the model is sharded, and once nobody has the wrapper any more."""
        return None if self._wrapper is None else self._wrapper()

    @property
    def group(self) -> Any:
        return self._group if self.wrapper is None else self.wrapper.process_group

    def meet(self, ace: Ace) -> None:
        """Before each step: refuse what would let the processes make different numbers of them, and agree if due."""
        if self.wrapper is None and not self.sharded:
            return
        if self.wrapper is not None and self.wrapper._join_config.enable:
            raise StepError(
                "torch.distributed's Join lets processes make different numbers of steps, and gamma and lambda would "
                "part; give all processes equally many batches (DistributedSampler does), or attach with mode 'off'"
            )

        if ace.config.may_wait(self.steps):
            self.agree(ace)
        self.steps += 1

    @torch.no_grad()
    def reduce(self, ace: Ace) -> None:
        """Once the gradients of a step are there: those of ACE's parameters become their mean over the processes."""
        if not self.sharded:
            return
        gradients = [parameter.grad for parameter in ace.parameters() if parameter.grad is not None]
        if not gradients:
            return
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        distributed.all_reduce(flat, group=self.group)
        flat /= distributed.get_world_size(self.group)
        for gradient, mean in zip(gradients, torch.split(flat, [g.numel() for g in gradients]), strict=True):
            gradient.copy_(mean.view_as(gradient))

    @torch.no_grad()
    def agree(self, ace: Ace) -> None:
        """Everything as the first process has it. Waits for the device."""
        facts = torch.tensor(ace.budget.facts(), dtype=torch.float64, device=ace.gamma.device)
        first = list(ace.parameters()) if self.sharded and not self.steps else [ace.gamma]
        tensors = [facts, *(parameter.detach() for parameter in first), *ace.buffers()]
        for kind in dict.fromkeys(tensor.dtype for tensor in tensors):
            alike = [tensor for tensor in tensors if tensor.dtype == kind]
            _broadcast(alike, self.group)
        ace.budget.agree([round(fact) for fact in facts.tolist()])
        ace.duals.read_buffers()
        ace.sync()


def _broadcast(tensors: list[Tensor], group: Any) -> None:
    """From the first process, in one message."""
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    flat = flat.float() if flat.is_floating_point() and flat.dtype.itemsize < 4 else flat
    distributed.broadcast(flat, distributed.get_global_rank(group, 0), group=group)
    for tensor, sent in zip(tensors, torch.split(flat, [tensor.numel() for tensor in tensors]), strict=True):
        sent = sent.to(tensor.dtype)
        if not torch.equal(tensor.flatten(), sent):  # writing to weights tells those who watch that they were set
            tensor.copy_(sent.view_as(tensor))


def wrapping(init: Any, wrapper: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """In place of ``DistributedDataParallel.__init__``, around it."""
    module = args[0] if args else kwargs.get("module")
    found = _aces(module) if isinstance(module, nn.Module) else {}
    if not found:
        init(*args, **kwargs)
        return
    before = getattr(module, IGNORED, None)
    names = [f"{prefix}.{name}" for prefix, ace in found.items() for name, _ in ace.named_buffers()]
    setattr(module, IGNORED, [*(before or ()), *names])
    try:
        init(*args, **kwargs)
    finally:
        if before is None:
            delattr(module, IGNORED)
        else:
            setattr(module, IGNORED, before)
    for ace in found.values():
        ranks = ace.session.ranks = Ranks(wrapper=wrapper)
        ranks.agree(ace)


def refusing(init: Any, wrapper: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """In place of ``FullyShardedDataParallel.__init__``, around it."""
    module = args[0] if args else kwargs.get("module")
    if isinstance(module, nn.Module) and _aces(module):
        raise AttachError(
            "FullyShardedDataParallel takes gamma apart, and its dual loop would run in one process only; use "
            f"{SHARD}, or DistributedDataParallel"
        )
    init(*args, **kwargs)


def find_shards(ace: Ace) -> None:
    """Know the processes of a model that ``fully_shard`` has sharded; refuse if that sharded ACE too."""
    tensor = sys.modules.get("torch.distributed.tensor")
    model = ace.root
    if tensor is None or model is None or ace.session.ranks is not None:
        return
    if any(isinstance(parameter, tensor.DTensor) for parameter in ace.parameters()):
        raise StepError(f"fully_shard has taken ACE's parameters apart, and gamma must be whole; use {SHARD}")
    shards = [parameter for parameter in model.parameters() if isinstance(parameter, tensor.DTensor)]
    if shards:
        mesh = shards[0].device_mesh
        ace.session.ranks = Ranks(mesh.get_group() if mesh.ndim == 1 else distributed.group.WORLD)


def _aces(module: nn.Module) -> dict[str, Ace]:
    return {name: inner for name, inner in module.named_modules() if isinstance(inner, Ace)}
