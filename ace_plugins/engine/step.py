"""Which optimizer owns which gamma: found, adopted where it was left out, or an error that says what to do.

Where the dual loop meets the script's optimizer: PyTorch's global step hooks.

Before a step of the optimizer that owns gamma, the constraints' pull is added to gamma's gradient; after it lambda and
u move. The script's gradients, parameter groups and schedulers are as it left them when the step is over. An optimizer
that owns no attached model costs one dictionary look-up.
"""

from __future__ import annotations

import atexit
import gc
import inspect
import os
import sys
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import wrapt
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..errors import AceWarning, StepError
from ..plugins.registry import notify
from .branches import convert_norm
from .loop import Owned, tell_of_skipped
from .paced_loop import PacedLoop
from .paper_loop import PaperLoop
from .ranks import find_shards, refusing, wrapping
from .scheduled import Scheduled
from .session import LOSSES
from .spectral_norm import find_bounded, follow
from .state import LIVE, NAME, Ace

ALONE = 50
"""Steps of the weights without one of gamma after which it is told."""


@dataclass
class Ownership:
    """What an optimizer owns, valid as long as ``seen`` describes it."""

    seen: tuple[int, ...]
    owned: list[Owned] = field(default_factory=list)
    moved: list[Ace] = field(default_factory=list)
    """Models whose bounded branches it moves, with gamma or without."""
    trained: list[Ace] = field(default_factory=list)
    """Models whose weights it moves while another optimizer owns gamma."""

    def count_steps_without_gamma(self, optimizer: Optimizer) -> None:
        """Tell where the optimizer that owns gamma has stopped stepping: it was replaced, but lives on somewhere."""
        for ace in self.trained:
            if ace.root is None or ace.landed or not ace.gamma.requires_grad:
                continue
            ace.session.steps_without_gamma += 1
            if ace.session.steps_without_gamma == ALONE:
                warnings.warn(
                    f"{type(optimizer).__name__} has made {ALONE} steps with weights of {type(ace.root).__name__} and "
                    f"the optimizer that owns its gamma (model.{NAME}.gamma) none: the dual loop stands still; build "
                    "the optimizer from model.parameters(), or let go of the old one before",
                    AceWarning,
                    stacklevel=2,
                )


def seen(optimizer: Optimizer) -> tuple[int, ...]:
    return (LIVE.changes, *[len(group["params"]) for group in optimizer.param_groups])


def look(optimizer: Optimizer) -> Ownership:
    """What this optimizer owns; an error if it trains a model whose gamma nobody owns."""
    places = _places(optimizer)
    live = _touched(places)
    owned = [_kind(ace)(ace, *places[id(ace.gamma)]) for ace in live if id(ace.gamma) in places]
    for each in owned:
        each.check(optimizer)
        find_shards(each.ace)
        _check_branches(each.ace, places)
    # Weights that a model shares with one whose gamma is here are here for that one.
    shared = {id(p) for each in owned if each.ace.root is not None for p in each.ace.root.parameters()}
    trained = []
    for ace in live:
        weights = [] if id(ace.gamma) in places else _weights(ace, places.keys() - shared)
        if weights:
            trained.append(ace)
        if weights and not any(_owns(other, ace.gamma) for other in _optimizers()):
            raise StepError(
                f"{type(optimizer).__name__} steps {len(weights)} weights of {type(ace.root).__name__} but no "
                f"optimizer owns its gamma (model.{NAME}.gamma): it was built before attach; build it after, or call "
                f"optimizer.add_param_group({{'params': model.{NAME}.parameters()}}), or freeze gamma with "
                f"model.{NAME}.gamma.requires_grad_(False)"
            )
    moved = [ace for ace in live if any(id(m.weight) in places for m in find_bounded(ace.branches))]
    return Ownership(seen(optimizer), owned, moved, trained)


def _kind(ace: Ace) -> type[Owned]:
    if ace.config.mode == "scheduled":
        return Scheduled
    return PacedLoop if ace.config.loop == "paced" else PaperLoop


@dataclass
class Adopted:
    """ACE's parameters in an optimizer that a script built without them."""

    optimizer: weakref.ref[Optimizer]
    group: dict[str, Any]

    def withdraw(self) -> None:
        """Somebody else has them after all. Only before the first step, which would have left state behind."""
        optimizer = self.optimizer()
        if optimizer is not None and not any(p in optimizer.state for p in self.group["params"]):
            optimizer.param_groups[:] = [group for group in optimizer.param_groups if group is not self.group]


class Adoption:
    """Gives ACE's parameters to an optimizer that was built from a part of the model's parameters.

    Scripts build optimizers from named submodules (MACE) or from parameter lists of their own. Such an optimizer gets
    one more parameter group as soon as it is constructed, before a scheduler sees it.
    """

    def __init__(self) -> None:
        self.adopted: weakref.WeakKeyDictionary[Ace, Adopted] = weakref.WeakKeyDictionary()

    def constructed(self, optimizer: Optimizer) -> None:
        """An optimizer has just been built."""
        places = _places(optimizer)
        for ace in _touched(places):
            if id(ace.gamma) in places:
                before = self.adopted.pop(ace, None)
                if before is not None:
                    before.withdraw()
            elif (weights := _weights(ace, set(places))) and not any(_owns(o, ace.gamma) for o in _optimizers()):
                self.adopted[ace] = _adopt(optimizer, ace, [places[id(p)][0] for p in weights], set(places))


def _adopt(optimizer: Optimizer, ace: Ace, groups: list[int], places: set[int]) -> Adopted:
    # The options of the group that holds most of the model's weights: its learning rate above all.
    like = optimizer.param_groups[max(set(groups), key=groups.count)]
    named = [(f"{NAME}.{name}", p) for name, p in ace.named_parameters() if p.requires_grad and id(p) not in places]
    options = {name: value for name, value in like.items() if name not in ("params", "param_names", "name")}
    if "name" in like:
        options["name"] = NAME
    optimizer.add_param_group({**options, "params": named if "param_names" in like else [p for _, p in named]})
    return Adopted(weakref.ref(optimizer), optimizer.param_groups[-1])


def _places(optimizer: Optimizer) -> dict[int, tuple[int, int]]:
    return {
        id(parameter): (g, i)
        for g, group in enumerate(optimizer.param_groups)
        for i, parameter in enumerate(group["params"])
    }


def _touched(places: dict[int, tuple[int, int]]) -> list[Ace]:
    """The models that may have parameters in these places. With many models alive, most have none."""
    here = set(places)
    return [ace for ace in LIVE.aces if not here.isdisjoint(LIVE.parameters(ace))]


def _weights(ace: Ace, places: set[int]) -> list[nn.Parameter]:
    """Upstream's own weights among these; none where gamma is frozen and need not be moved."""
    model = ace.root
    if model is None or not ace.gamma.requires_grad:
        return []
    added = {id(p) for p in ace.parameters()}
    return [p for p in model.parameters() if id(p) not in added and id(p) in places]


def _check_branches(ace: Ace, places: dict[int, tuple[int, int]]) -> None:
    missed = [p for p in ace.branches.parameters() if p.requires_grad and id(p) not in places]
    if missed and not any(_owns(other, missed[0]) for other in _optimizers()):
        warnings.warn(
            f"no optimizer owns {len(missed)} branch parameters of adapter {ace.adapter!r} (model.{NAME}.branches): "
            "they keep their initial values; build the optimizer from model.parameters()",
            AceWarning,
            stacklevel=2,
        )


def _optimizers() -> list[Optimizer]:
    """Every optimizer alive. A walk over all objects, so only when something looks wrong."""
    return [thing for thing in gc.get_objects() if issubclass(type(thing), Optimizer)]


def _owns(optimizer: Optimizer, parameter: Tensor) -> bool:
    groups = getattr(optimizer, "param_groups", ())
    return any(p is parameter for group in groups for p in group["params"])


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
            wrapt.wrap_function_wrapper("torch.nn", "SyncBatchNorm.convert_sync_batchnorm", convert_norm)
            wrapt.wrap_function_wrapper("torch.autograd", "backward", LOSSES.backward)
            wrapt.wrap_function_wrapper("torch.amp", "GradScaler.scale", LOSSES.scale)
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
            if each.ace.session.ranks is not None and each.ace.session.running is None:
                each.ace.session.ranks.meet(each.ace)
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
                follow(find_bounded(ace.branches))
        for ace in reversed(moved):
            model = ace.root
            if model is not None:
                notify("ace_stepped", model=model, step=ace.duals.count)

    def finish(self) -> None:
        """At exit: tell the observers that the runs are over. A forked child's exit is not the end of its parent's."""
        if os.getpid() != self.process:
            return
        for ace in list(LIVE.aces):
            model = ace.root
            if model is not None and ace.duals.count:
                tell_of_skipped(ace.duals)
                notify("ace_finished", model=model)

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
