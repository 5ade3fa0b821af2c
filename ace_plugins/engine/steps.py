"""Where the dual loop meets the script's optimizer: PyTorch's global step hooks.

Before a step of the optimizer that owns gamma, the constraints' pull is added to gamma's gradient; after it lambda and
u move. The script's gradients, parameter groups and schedulers are as it left them when the step is over. An optimizer
that owns no attached model costs one dictionary look-up.
"""

from __future__ import annotations

import atexit
import inspect
import os
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any

import wrapt
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..errors import StepError
from ..plugins.registry import tell
from .bounded import follow, maps
from .branches import converting
from .observed import LOSSES
from .owned import Owned
from .ownership import Adoption, Ownership, look, seen
from .ranks import refusing, wrapping
from .skipping import tell_of_skipped
from .state import LIVE


class Loop:
    """The dual loop of every attached model of this process."""

    def __init__(self) -> None:
        self.ownership: weakref.WeakKeyDictionary[Optimizer, Ownership] = weakref.WeakKeyDictionary()
        self.adoption = Adoption()
        self.process = 0
        """The process that has the global hooks; 0 before."""

    def install(self) -> None:
        """The global hooks, with the first attached model: a process without one pays nothing."""
        if not self.process:
            self.process = os.getpid()
            register_optimizer_step_pre_hook(self.before_step)
            register_optimizer_step_post_hook(self.after_step)
            wrapt.wrap_function_wrapper(Optimizer, "__init__", self._constructing)
            wrapt.wrap_function_wrapper("torch.nn.parallel", "DistributedDataParallel.__init__", wrapping)
            wrapt.register_post_import_hook(_refuse_flat_parameters, "torch.distributed.fsdp")
            wrapt.wrap_function_wrapper("torch.nn", "SyncBatchNorm.convert_sync_batchnorm", converting)
            LOSSES.install()
            atexit.register(self.finish)

    def _constructing(self, init: Any, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        init(*args, **kwargs)
        if LIVE.aces:
            self.adoption.constructed(optimizer)

    def before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not LIVE.aces:
            return None
        known = self.ownership.get(optimizer)
        if known is not None and any(o.before is not None for o in known.owned) and _nested(optimizer):
            return None  # the pull is in already
        owned = self._owned(optimizer)
        if not owned:
            return None
        for each in owned:
            each.ace.forget_gradients()
            # Not in the step of an optimizer inside this one, which other processes may not have.
            if each.ace.ranks is not None and each.ace.under_way is None:
                each.ace.ranks.meet(each.ace)
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            for each in owned:
                each.begin(optimizer)
            return None
        parameter = inspect.signature(type(optimizer).step).parameters.get("closure")
        if parameter is not None and parameter.default is inspect.Parameter.empty:
            raise StepError(
                f"{type(optimizer).__name__} computes gradients again and again inside its step, where the dual loop "
                "has no single gamma to go by; expected an optimizer of one gradient a step, such as SGD or Adam"
            )
        after = AfterClosure(closure, optimizer, owned)
        return ((args[0], after, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": after})

    def after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        known = self.ownership.get(optimizer)
        if known is None:
            return
        known.count_steps_without_gamma(optimizer)
        # All of them before anyone is told, in reverse, so that groups appended last are taken out first.
        moved = [owned.ace for owned in reversed(known.owned) if owned.finish(optimizer)]
        for ace in known.moved:
            if not ace.landed:
                follow(maps(ace.branches))
        for ace in reversed(moved):
            model = ace.root
            if model is not None:
                tell("ace_stepped", model=model, step=ace.duals.count)

    def finish(self) -> None:
        """At exit: tell the observers that the runs are over. A forked child's exit is not the end of its parent's."""
        if os.getpid() != self.process:
            return
        for ace in list(LIVE.aces):
            model = ace.root
            if model is not None and ace.duals.count:
                tell_of_skipped(ace.duals)
                tell("ace_finished", model=model)

    def recover(self, optimizer: Optimizer, state: Any = None) -> None:
        """Undo what a step that raised in the middle left behind."""
        known = self.ownership.get(optimizer)
        for owned in reversed(known.owned if known else ()):
            owned.restore(optimizer)

    def _owned(self, optimizer: Optimizer) -> list[Owned]:
        known = self.ownership.get(optimizer)
        if known is not None:
            self.recover(optimizer)
            if known.seen == seen(optimizer) and all(owned.holds(optimizer) for owned in known.owned):
                return known.owned
        found = look(optimizer)
        # Wrappers that leave out Optimizer.__init__ have no such hooks; what they save is of the optimizer inside.
        if found.owned and known is None and hasattr(optimizer, "_optimizer_state_dict_pre_hooks"):
            # Between a step that raised and the next one, a saved state must not show what was put aside.
            optimizer.register_state_dict_pre_hook(_recover)
            optimizer.register_load_state_dict_pre_hook(_recover)
        self.ownership[optimizer] = found
        return found.owned


@dataclass
class AfterClosure:
    """A closure after which the step's gradients are there: that is where the pull is added."""

    closure: Callable[[], Any]
    optimizer: Optimizer
    owned: list[Owned]
    called: bool = False

    def __call__(self) -> Any:
        if self.called:
            raise StepError(
                f"{type(self.optimizer).__name__} called its closure twice in one step, and the dual loop can follow "
                "only one gradient a step; use an optimizer that calls it once, such as SGD or Adam"
            )
        self.called = True
        result = self.closure()
        for each in self.owned:
            each.begin(self.optimizer)
        return result


def _nested(optimizer: Optimizer) -> bool:
    """Whether a step of this very optimizer is under way around this one: a subclass calling ``super().step()``.

    Asked only when something is put aside, to tell that from a step before that raised.
    """
    steps = 0
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        steps += frame.f_code.co_name == "wrapper" and frame.f_locals.get("self") is optimizer
        frame = frame.f_back
    return steps > 1


def _refuse_flat_parameters(fsdp: Any) -> None:
    wrapt.wrap_function_wrapper(fsdp, "FullyShardedDataParallel.__init__", refusing)


LOOP = Loop()
LIVE.began = LOOP.install
if LIVE.aces:  # a model was unpickled before this module was there
    LOOP.install()


def _recover(optimizer: Optimizer, state: Any = None) -> None:
    """As a function: optimizers that carry it are pickled and copied."""
    LOOP.recover(optimizer)
