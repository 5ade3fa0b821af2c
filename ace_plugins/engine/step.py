"""Runs the dual loop in the steps of the script's optimizer, through PyTorch's global hooks for optimizer steps.

Before a step of the optimizer that owns gamma, the loop prepares gamma's gradient. After the step, the loop
updates lambda and u, and also gamma if the optimizer does not. The script's gradients, parameter groups and schedulers
are unchanged when the step is over. For an optimizer without parameters of an attached model, a step costs one
dictionary look-up more.
"""

from __future__ import annotations

import gc
import inspect
import os
import sys
import warnings
import weakref
from collections.abc import Set
from dataclasses import dataclass
from types import FrameType
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import AceWarning, StepError
from ..plugins.registry import notify
from .distributed import find_shards
from .loop import Loop, warn_of_skipped
from .paced_loop import PacedLoop
from .paper_loop import PaperLoop
from .scheduled import ScheduledLoop
from .spectral_norm import find_bounded, follow
from .state import LIVE, NAME, Ace

Places = dict[int, tuple[int, int]]
"""Mapping from the identity (``id``) of a parameter to its group in an optimizer and its index in this group."""


@dataclass
class Ownership:
    """The attached models with parameters in an optimizer. Valid while `_describe(optimizer)` returns ``seen``."""

    seen: tuple[int, ...]
    loops: list[Loop]
    """One loop for each model whose gamma is in this optimizer."""
    bounded: list[Ace]
    """Models with weights of bounded branches in this optimizer."""


class Steps:
    """The optimizer steps of this process, and the loops that run in them."""

    def __init__(self) -> None:
        self.ownership: weakref.WeakKeyDictionary[Optimizer, Ownership] = weakref.WeakKeyDictionary()
        self.process = os.getpid()
        """Id of the process that attached the models. The exit of a forked child process does not end their runs."""

    def before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Prepare gamma's gradient: now, or after the closure that computes gradients, if the script passes one."""
        if not LIVE.aces:
            return None
        known = self.ownership.get(optimizer)
        if known is not None and any(loop.before is not None for loop in known.loops):
            if _is_nested(optimizer):
                return None  # gamma's gradient is prepared already
            self.recover(optimizer)
        if known is None or known.seen != _describe(optimizer) or not all(o.holds(optimizer) for o in known.loops):
            known = self._look(optimizer, first=known is None)
        loops = known.loops
        if not loops:
            return None
        for loop in loops:
            ace = loop.ace
            ace.forget_gradients()
            # Not if this step is inside another optimizer's step, since other ranks may not make the inner step.
            if ace.session.ranks is not None and ace.session.running is None:
                ace.session.ranks.check_in(ace)
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            for loop in loops:
                loop.begin(optimizer)
            return None
        parameter = inspect.signature(type(optimizer).step).parameters.get("closure")
        if parameter is not None and parameter.default is inspect.Parameter.empty:
            raise _several_gradients(optimizer)
        called = False

        def after() -> Any:
            nonlocal called
            if called:
                raise _several_gradients(optimizer)
            called = True
            result = closure()
            for loop in loops:
                loop.begin(optimizer)
            return result

        return ((args[0], after, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": after})

    def after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Move gamma and the duals, then notify the observers."""
        known = self.ownership.get(optimizer)
        if known is None:
            return
        # In reverse, so that parameter groups that were appended last are removed first.
        moved = [loop.ace for loop in reversed(known.loops) if loop.finish(optimizer)]
        for ace in known.bounded:
            if not ace.landed:
                follow(find_bounded(ace.branches))
        for ace in reversed(moved):
            model = ace.root
            if model is not None:
                notify("ace_stepped", model=model, step=ace.duals.count)

    def finish(self) -> None:
        """Notify the observers at exit that the runs are over."""
        if os.getpid() != self.process:
            return
        for ace in list(LIVE.aces):
            model = ace.root
            if model is not None and ace.duals.count:
                warn_of_skipped(ace.duals)
                notify("ace_finished", model=model)

    def recover(self, optimizer: Optimizer) -> None:
        """Undo the changes that the loops made for a step, if this step raised an error."""
        known = self.ownership.get(optimizer)
        for loop in reversed(known.loops if known else ()):
            loop.restore(optimizer)

    def _look(self, optimizer: Optimizer, *, first: bool) -> Ownership:
        found = self.ownership[optimizer] = _find_ownership(optimizer)
        # Wrappers that skip Optimizer.__init__ (schedule-free) lack these hooks: they save the inner optimizer's state.
        if found.loops and first and hasattr(optimizer, "_optimizer_state_dict_pre_hooks"):
            # If a step raised an error, a state that is saved before the next step must not contain the loop's changes.
            optimizer.register_state_dict_pre_hook(_recover)
            optimizer.register_load_state_dict_pre_hook(_recover)
        return found


STEPS = Steps()


def _recover(optimizer: Optimizer, state: Any = None) -> None:
    """Undo the changes of a failed step. This is a plain function so that optimizers with this hook can be pickled."""
    STEPS.recover(optimizer)


def _several_gradients(optimizer: Optimizer) -> StepError:
    return StepError(
        f"{type(optimizer).__name__} evaluates the loss several times per step, which is not supported; use an "
        "optimizer that evaluates it once, such as SGD or Adam"
    )


def _is_nested(optimizer: Optimizer) -> bool:
    """Return whether this step was called inside a step of the same optimizer, by a subclass's ``super().step()``.

    If it was not, a gradient that is still prepared was left behind by a step that raised an error.
    """
    steps = 0
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        steps += frame.f_code.co_name == "wrapper" and frame.f_locals.get("self") is optimizer
        frame = frame.f_back
    return steps > 1


def _describe(optimizer: Optimizer) -> tuple[int, ...]:
    return (LIVE.changes, *[len(group["params"]) for group in optimizer.param_groups])


def _find_ownership(optimizer: Optimizer) -> Ownership:
    """Return the models with parameters in this optimizer. Raises a StepError if no optimizer owns a model's gamma."""
    places = _find_places(optimizer)
    live = _find_models(places)
    loops = [_choose_loop(ace)(ace, *places[id(ace.gamma)]) for ace in live if id(ace.gamma) in places]
    for loop in loops:
        if isinstance(loop, PaperLoop) and "lr" not in optimizer.param_groups[loop.group]:
            name = type(optimizer).__name__
            raise StepError(f"{name} has no 'lr' in its parameter groups: set preset 'fit', or use another optimizer")
        find_shards(loop.ace)
        _check_branches(loop.ace, places)
    # Weights that two models share count only for the model whose gamma is in this optimizer.
    shared = {id(p) for loop in loops if loop.ace.root is not None for p in loop.ace.root.parameters()}
    for ace in live:
        weights = [] if id(ace.gamma) in places else _find_weights(ace, places.keys() - shared)
        if weights and not _is_owned(ace.gamma):
            raise StepError(
                f"{type(optimizer).__name__} trains {len(weights)} weights of {type(ace.root).__name__} but no "
                f"optimizer owns its gamma (model.{NAME}.gamma): build the optimizer after attach, or call "
                f"optimizer.add_param_group({{'params': model.{NAME}.parameters()}}), or freeze gamma with "
                f"model.{NAME}.gamma.requires_grad_(False)"
            )
    bounded = [ace for ace in live if any(id(m.weight) in places for m in find_bounded(ace.branches))]
    return Ownership(_describe(optimizer), loops, bounded)


def _choose_loop(ace: Ace) -> type[Loop]:
    if ace.config.mode == "scheduled":
        return ScheduledLoop
    return PacedLoop if ace.config.loop == "paced" else PaperLoop


def adopt(optimizer: Optimizer) -> None:
    """Add ACE's parameters to a new optimizer that was built from only some of the model's parameters.

    Scripts build optimizers from named submodules (MACE) or from lists of parameters. Such an optimizer gets one more
    parameter group at construction, before a scheduler sees it. If a later optimizer is built with gamma in it, the
    group is removed again.
    """
    places = _find_places(optimizer)
    for ace in _find_models(places):
        if id(ace.gamma) in places:
            _withdraw(ace)
        elif (weights := _find_weights(ace, places.keys())) and not _is_owned(ace.gamma):
            groups = [places[id(p)][0] for p in weights]
            # ACE's parameters get the options of the group with most of the model's weights.
            like = optimizer.param_groups[max(set(groups), key=groups.count)]
            named = [(f"{NAME}.{n}", p) for n, p in ace.named_parameters() if p.requires_grad and id(p) not in places]
            options = {name: value for name, value in like.items() if name not in ("params", "param_names", "name")}
            if "name" in like:
                options["name"] = NAME
            optimizer.add_param_group({**options, "params": named if "param_names" in like else [p for _, p in named]})
            ace.session.adopted = weakref.ref(optimizer), optimizer.param_groups[-1]


def _withdraw(ace: Ace) -> None:
    """Remove the parameter group that `adopt` added, unless a step has already given its parameters a state."""
    if ace.session.adopted is None:
        return
    reference, adopted = ace.session.adopted
    ace.session.adopted = None
    optimizer = reference()
    if optimizer is not None and not any(p in optimizer.state for p in adopted["params"]):
        optimizer.param_groups[:] = [group for group in optimizer.param_groups if group is not adopted]


def _find_places(optimizer: Optimizer) -> Places:
    groups = enumerate(optimizer.param_groups)
    return {id(parameter): (g, i) for g, group in groups for i, parameter in enumerate(group["params"])}


def _find_models(places: Places) -> list[Ace]:
    """Return the attached models that have parameters among these places of an optimizer."""
    here = places.keys()
    return [ace for ace in LIVE.aces if not here.isdisjoint(LIVE.parameters(ace))]


def _find_weights(ace: Ace, places: Set[int]) -> list[nn.Parameter]:
    """Return upstream's weights among these ids; empty if gamma is frozen, since it then needs no optimizer."""
    model = ace.root
    if model is None or not ace.gamma.requires_grad:
        return []
    added = {id(p) for p in ace.parameters()}
    return [p for p in model.parameters() if id(p) not in added and id(p) in places]


def _check_branches(ace: Ace, places: Places) -> None:
    missed = [p for p in ace.branches.parameters() if p.requires_grad and id(p) not in places]
    if missed and not _is_owned(missed[0]):
        warnings.warn(
            f"no optimizer owns {len(missed)} branch parameters of adapter {ace.adapter!r} (model.{NAME}.branches), so "
            "they keep their initial values; build the optimizer from model.parameters()",
            AceWarning,
            stacklevel=2,
        )


def _is_owned(parameter: Tensor) -> bool:
    """Return whether any optimizer owns a parameter. Slow, since it visits all objects: used only before an error."""
    optimizers = [thing for thing in gc.get_objects() if issubclass(type(thing), Optimizer)]
    groups = [group for optimizer in optimizers for group in getattr(optimizer, "param_groups", ())]
    return any(p is parameter for group in groups for p in group["params"])
