"""All patches that ACE makes to PyTorch. They are installed for the first attached model and undone after the last.

A process without an attached model runs unpatched PyTorch. If another library has wrapped one of our wrappers, both
stay in place when the patches are undone, and our wrapper passes every call through.
"""

from __future__ import annotations

import atexit
import functools
import os
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
import wrapt
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim import optimizer as optimizers

from ..errors import AttachError
from .branches import convert_norm
from .distributed import SHARD, Ranks
from .loop import LOSSES
from .state import LIVE, Ace
from .step import STEPS, adopt

FSDP = "torch.distributed.fsdp"
IGNORED = "_ddp_params_and_buffers_to_ignore"
"""Name of the model's attribute that lists the parameters and buffers which DistributedDataParallel ignores."""


class Patches:
    """The patches of this process, with functions that undo them."""

    def __init__(self) -> None:
        self.undo: list[Callable[[], object]] = []
        """Functions that each undo one installed patch; empty while PyTorch is unpatched."""

    def update(self, *, now: bool = False) -> None:
        """Install the patches if a model is attached, otherwise undo them: at once if ``now``, else outside steps."""
        if next(iter(LIVE.aces), None) is not None:
            LOSSES.idle = None
            if not self.undo:
                self._install()
        elif self.undo and not now and _is_stepping():
            LOSSES.idle = functools.partial(self.update, now=True)  # called by the next backward
        elif self.undo:
            LOSSES.idle = LOSSES.last = None
            for optimizer in list(STEPS.ownership):
                STEPS.recover(optimizer)  # in case its last step raised an error
            STEPS.ownership.clear()
            while self.undo:
                self.undo.pop()()

    def _install(self) -> None:
        STEPS.process = os.getpid()
        atexit.register(STEPS.finish)
        self.undo = [
            lambda: atexit.unregister(STEPS.finish),
            optimizers.register_optimizer_step_pre_hook(STEPS.before_step).remove,
            optimizers.register_optimizer_step_post_hook(STEPS.after_step).remove,
            wrap(Optimizer, "__init__", _construct),
            wrap(torch.autograd, "backward", LOSSES.backward),
            wrap(torch.amp.GradScaler, "scale", LOSSES.scale),
            wrap(DistributedDataParallel, "__init__", _distribute),
            wrap(nn.SyncBatchNorm, "convert_sync_batchnorm", convert_norm),
        ]
        self.wrap_fsdp()

    def wrap_fsdp(self, *imported: Any) -> None:
        """Refuse FSDP1. Called after its import as well, because importing it here would take a second."""
        if self.undo and FSDP in sys.modules:
            self.undo.append(wrap(sys.modules[FSDP].FullyShardedDataParallel, "__init__", _refuse_fsdp))


def wrap(owner: Any, name: str, around: Callable[..., Any]) -> Callable[[], None]:
    """Replace calls of a function by ``around(function, *args, **kwargs)``. Returns a function that undoes this."""
    original = vars(owner)[name]
    function = original.__func__ if isinstance(original, classmethod) else original
    active = True

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return around(function, *args, **kwargs) if active else function(*args, **kwargs)

    def undo() -> None:
        nonlocal active
        active = False
        if vars(owner)[name] is ours:
            setattr(owner, name, original)

    ours = classmethod(wrapper) if isinstance(original, classmethod) else wrapper
    setattr(owner, name, ours)
    return undo


def _is_stepping() -> bool:
    """Return whether any thread is inside an optimizer's step, where torch may be iterating over its step hooks."""
    frame: FrameType | None
    others = [frame for thread, frame in sys._current_frames().items() if thread != threading.get_ident()]
    for frame in (sys._getframe(1), *others):  # not this function's own frame: it would refer to itself
        while frame is not None:
            if frame.f_code.co_name == "wrapper" and frame.f_code.co_filename == optimizers.__file__:
                return True
            frame = frame.f_back
    return False


def _construct(init: Any, optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
    """Wrap ``Optimizer.__init__`` to add ACE's parameters to a new optimizer."""
    init(optimizer, *args, **kwargs)
    adopt(optimizer)


def _distribute(init: Any, wrapper: Any, module: nn.Module, *args: Any, **kwargs: Any) -> None:
    """Wrap ``DistributedDataParallel.__init__`` to hide ACE's buffers from it, and to set the model's ranks.

    The wrapper broadcasts buffers before every forward pass, so that a pass which only rank 0 makes would hang.
    """
    aces = {name: inner for name, inner in module.named_modules() if isinstance(inner, Ace)}
    ignored = getattr(module, IGNORED, [])
    hidden = [f"{prefix}.{name}" for prefix, ace in aces.items() for name, _ in ace.named_buffers()]
    vars(module)[IGNORED] = [*ignored, *hidden]
    try:
        init(wrapper, module, *args, **kwargs)
    finally:
        vars(module)[IGNORED] = ignored
    for ace in aces.values():
        ace.session.ranks = Ranks(wrapper=wrapper)
        ace.session.ranks.agree(ace)


def _refuse_fsdp(init: Any, wrapper: Any, module: nn.Module, *args: Any, **kwargs: Any) -> None:
    """Wrap ``FullyShardedDataParallel.__init__`` to refuse models with ACE."""
    if any(isinstance(inner, Ace) for inner in module.modules()):
        raise AttachError(
            "FullyShardedDataParallel shards gamma, so the dual loop would run on one rank only; use "
            f"{SHARD}, or DistributedDataParallel"
        )
    init(wrapper, module, *args, **kwargs)


PATCHES = Patches()
LIVE.changed = PATCHES.update
wrapt.register_post_import_hook(PATCHES.wrap_fsdp, FSDP)
PATCHES.update()  # a model may have been unpickled before this module was imported
