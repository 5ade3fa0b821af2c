"""Runs the dual loop in the steps of the script's optimizer, and makes all patches of PyTorch that this needs.

Before a step of the optimizer that owns gamma, the loop prepares gamma's gradient. After the step, the loop updates
lambda and u, and also gamma if the optimizer does not. Then the script's gradients, parameter groups and schedulers are
as before. The patches are installed for the first attached model and undone after the last.
"""

from __future__ import annotations

import atexit
import functools
import inspect
import os
import sys
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass
from types import FrameType, ModuleType
from typing import Any

import torch
import wrapt
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim import optimizer as optimizers

from ..errors import AceWarning, AttachError, StepError
from ..plugins.registry import notify
from .branches import Norm
from .budget import find_instances
from .distributed import SHARD, Ranks, find_shards
from .loop import LOSSES, Loop, Losses, is_finite, skip_unless_finite, warn_of_skipped
from .paced_loop import PacedLoop
from .scheduled import ScheduledLoop
from .spectral_norm import find_bounded, follow
from .state import LIVE, NAME, Ace

FSDP = "torch.distributed.fsdp"
Places = dict[int, int]  # from a parameter's ``id`` to the number of its group


@dataclass
class PaperLoop(Loop):
    """The paper's loop: the constraints' gradient is added to gamma's, and the script's optimizer moves gamma."""

    pulled: Tensor | None = None  # gamma's gradient during the step: the script's gradient plus that of the constraints
    version: int = 0  # version counter of ``pulled`` at the beginning of the step, to detect writes to this tensor
    params: list[Any] | None = None  # parameters of gamma's group, while gamma is in the group ``separate``
    separate: dict[str, Any] | None = None

    def prepare(self, optimizer: Optimizer) -> None:
        assert self.before is not None
        assert self.gradient is not None
        pull = self.factor(optimizer) * self.ace.duals.pull(self.before)
        # The optimizer's running averages would never recover from a gradient that is not finite.
        self.ace.gamma.grad = self.pulled = torch.where(is_finite(self.gradient), self.gradient + pull, 0.0)
        self.version = self.pulled._version
        if changes := self.changes(optimizer):  # move gamma into a separate group, only for this step
            group = optimizer.param_groups[self.group]
            self.separate = {**group, "params": [self.ace.gamma], **changes}
            self.params = group["params"]
            group["params"] = [p for p in self.params if p is not self.ace.gamma]
            optimizer.param_groups.append(self.separate)

    def changes(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the learning rate and weight decay that gamma needs, where its parameter group has other values."""
        config, group = self.ace.config, optimizer.param_groups[self.group]
        found = {} if config.gamma_lr == 1 else {"lr": group["lr"] * config.gamma_lr}
        if group.get("weight_decay", 0) and not config.gamma_weight_decay:
            found["weight_decay"] = 0.0
        # An optimizer that wraps another one does not move gamma itself.
        wraps = found and any(isinstance(value, Optimizer) for value in vars(optimizer).values())
        return {} if wraps else found

    def undo(self, optimizer: Optimizer, *, stepped: bool) -> None:
        gamma = self.ace.gamma
        # If the step raised an error, the script may since have zeroed or recomputed the gradient, which is then kept.
        # In a successful step only the optimizer can have written to it (fused optimizers unscale in place).
        if gamma.grad is self.pulled and (stepped or self.pulled is None or self.pulled._version == self.version):
            gamma.grad = self.gradient
        if self.params is not None:
            optimizer.param_groups[:] = [group for group in optimizer.param_groups if group is not self.separate]
            optimizer.param_groups[self.group]["params"] = self.params
        self.pulled = self.params = self.separate = None

    def advance(self, optimizer: Optimizer, before: Tensor, gradient: Tensor) -> None:
        with skip_unless_finite(self.ace.duals, self.ace.gamma, before, gradient):
            self.ace.duals.ascend(before, optimizer.param_groups[self.group]["lr"])
        if self.ace.landed:
            self.ace.sync()


@dataclass
class Ownership:
    """The attached models with parameters in an optimizer. Valid while `_describe(optimizer)` returns ``seen``."""

    seen: tuple[int, ...]
    aces: list[Ace]  # all of these models
    loops: list[Loop]  # one loop for each model whose gamma is in this optimizer
    bounded: list[Ace]  # models with weights of bounded branches in this optimizer


class Steps:
    """Registers hooks on the optimizer steps of this process, runs the loops in them, and patches PyTorch for this."""

    def __init__(self) -> None:
        self.undo: list[Callable[[], object]] = []  # one function per patch; empty while PyTorch is unpatched
        self.ownership: weakref.WeakKeyDictionary[Optimizer, Ownership] = weakref.WeakKeyDictionary()
        self.process = os.getpid()  # the exit of a forked child process does not end the runs of its parent

    def update(self, *, now: bool = False) -> None:
        """Install the patches if a model is attached, otherwise undo them. If not ``now``, running steps end first."""
        if next(iter(LIVE.aces), None) is not None:
            Losses.idle = None
            if not self.undo:
                self._install()
        elif self.undo and not now and any(map(_running_steps, sys._current_frames().values())):
            # A thread is inside an optimizer's step, where torch may be iterating over its step hooks.
            Losses.idle = functools.partial(self.update, now=True)  # called by the next backward
        elif self.undo:
            Losses.idle = LOSSES.last = None
            for optimizer in list(self.ownership):
                self.recover(optimizer)  # in case its last step raised an error
            self.ownership.clear()
            while self.undo:
                self.undo.pop()()

    def _install(self) -> None:
        """Install the patches. This is the list of everything that ACE patches in PyTorch."""
        self.process = os.getpid()
        atexit.register(self.finish)
        self.undo = [
            lambda: atexit.unregister(self.finish),
            optimizers.register_optimizer_step_pre_hook(self.before_step).remove,
            optimizers.register_optimizer_step_post_hook(self.after_step).remove,
            wrap(Optimizer, "__init__", adopt),
            wrap(Optimizer, "add_param_group", _add_group),
            wrap(torch.autograd, "backward", _run_backward),
            wrap(torch.amp.GradScaler, "scale", LOSSES.scale),
            wrap(DistributedDataParallel, "__init__", _distribute),
            wrap(nn.SyncBatchNorm, "convert_sync_batchnorm", _convert_norm),
            *_wrap_everywhere(nn.utils.clip_grad, "clip_grad_norm_", _clip_separately),
        ]
        self.wrap_fsdp()

    def wrap_fsdp(self, *imported: Any) -> None:
        """Make FSDP1 refuse models with ACE. Called again when the script imports FSDP1: importing it is slow."""
        if self.undo and FSDP in sys.modules:
            self.undo.append(wrap(sys.modules[FSDP].FullyShardedDataParallel, "__init__", _refuse_fsdp))

    def before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Prepare gamma's gradient: now, or after the closure that computes gradients, if the script passes one."""
        if not LIVE.aces:
            return None
        known = self.ownership.get(optimizer)
        if known is not None and any(loop.before is not None for loop in known.loops):
            if sum(running is optimizer for running in _running_steps(sys._getframe())) > 1:
                return None  # called by a subclass's ``super().step()``: gamma's gradient is prepared already
            self.recover(optimizer)  # the last step raised an error
        if known is None or known.seen != _describe(optimizer):
            first, known = known is None, _find_ownership(optimizer)
            self.ownership[optimizer] = known
            # If a step raised an error, a state that is saved before the next step must not contain the loop's changes.
            # Wrappers that skip Optimizer.__init__ (schedule-free) have no hooks: they save the inner optimizer.
            if known.loops and first and hasattr(optimizer, "_optimizer_state_dict_pre_hooks"):
                optimizer.register_state_dict_pre_hook(_recover)
                optimizer.register_load_state_dict_pre_hook(_recover)
        aces, loops = known.aces, known.loops
        for loop in loops:
            ace = loop.ace
            # Not if this step is inside another optimizer's step, since other ranks may not make the inner step.
            if ace.session.ranks is not None and ace.session.running is None:
                ace.session.ranks.check_in(ace)

        def begin() -> None:
            for ace in aces:
                ace.forget_gradients()
            for loop in loops:
                loop.begin(optimizer)

        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None or not loops:
            begin()
            return None
        several = StepError(
            f"{type(optimizer).__name__} evaluates the loss several times per step, which is not supported; use an "
            "optimizer that evaluates it once, such as SGD or Adam"
        )
        parameter = inspect.signature(type(optimizer).step).parameters.get("closure")
        if parameter is not None and parameter.default is inspect.Parameter.empty:
            raise several
        called = False

        def after() -> Any:
            nonlocal called
            if called:
                raise several
            called = True
            result = closure()
            begin()
            return result

        return ((args[0], after, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": after})

    def after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Move gamma and the duals, then notify the observers."""
        known = self.ownership.get(optimizer)
        if known is None:
            return
        # In reverse, so that parameter groups that were appended last are removed first.
        moved = [loop.ace for loop in reversed(known.loops) if loop.finish(optimizer)]
        for ace in known.aces:
            ace.give_gradients()
        for ace in known.bounded:
            if not ace.landed:
                follow(find_bounded(ace.branches))
        for ace in reversed(moved):
            if (model := ace.root) is not None:
                notify("ace_stepped", model=model, step=ace.duals.count)

    def finish(self) -> None:
        """Notify the observers at exit that the runs are over."""
        for ace in list(LIVE.aces) if os.getpid() == self.process else ():
            if (model := ace.root) is not None and ace.duals.count:
                warn_of_skipped(ace.duals)
                notify("ace_finished", model=model)

    def recover(self, optimizer: Optimizer) -> None:
        """Undo the changes that the loops made for a step, if this step raised an error."""
        if (known := self.ownership.get(optimizer)) is not None:
            for loop in reversed(known.loops):
                loop.restore(optimizer)


def _recover(optimizer: Optimizer, state: Any = None) -> None:
    """Undo the changes of a failed step. This is a plain function so that optimizers with this hook can be pickled."""
    STEPS.recover(optimizer)


def _describe(optimizer: Optimizer) -> tuple[int, ...]:
    return (LIVE.changes, *[len(group["params"]) for group in optimizer.param_groups])


def _find_ownership(optimizer: Optimizer) -> Ownership:
    """Return the models with parameters in this optimizer. Raises a StepError if no optimizer owns a model's gamma."""
    places = _find_places(optimizer)
    live = _find_models(places)
    loops: list[Loop] = []
    for ace in live:
        # A resumed run has an optimizer with a state, and needs no warning.
        fresh = not (ace.session.observed.rates or ace.session.warned or optimizer.state)
        if ace.landed and fresh and ace.root is not None:
            ace.session.warned = True
            warnings.warn(
                f"all sites of {type(ace.root).__name__} had landed before this training began, so ACE has no effect "
                "in it; to train with branches again, load the weights without ACE: load_state_dict(export(state))",
                AceWarning,
                stacklevel=2,
            )
        if id(ace.gamma) in places:
            paced = ScheduledLoop if ace.config.mode == "scheduled" else PacedLoop
            loops.append((paced if ace.config.paced else PaperLoop)(ace, places[id(ace.gamma)]))
    for loop in loops:
        if isinstance(loop, PaperLoop) and "lr" not in optimizer.param_groups[loop.group]:
            name = type(optimizer).__name__
            raise StepError(f"{name} has no 'lr' in its parameter groups: set preset 'fit', or use another optimizer")
        if isinstance(loop, PaperLoop) and loop.changes(optimizer) and (listed := _lists_per_group(optimizer)):
            raise StepError(
                f"{type(optimizer).__name__} has a list with a value per parameter group ({listed[0]}), so gamma "
                "cannot have a separate group: set gamma_weight_decay = true and gamma_lr = 1, or preset 'fit'"
            )
        find_shards(loop.ace)
        owned = {*places, *map(id, loop.ace.freed)}
        missed = [p for p in loop.ace.branches.parameters() if p.requires_grad and id(p) not in owned]
        if missed and id(missed[0]) not in _find_owned():
            text = f"no optimizer owns {len(missed)} branch parameters (model.{NAME}.branches), so they stay constant"
            warnings.warn(f"{text}; build the optimizer from model.parameters()", AceWarning, stacklevel=2)
    # Weights that two models share count only for the model whose gamma is in this optimizer.
    shared = {id(p) for loop in loops if loop.ace.root is not None for p in loop.ace.root.parameters()}
    for ace in live:
        weights = [] if id(ace.gamma) in places else _find_weights(ace, places.keys() - shared)
        if weights and id(ace.gamma) not in _find_owned():
            do = f"build the optimizer after attach, or add model.{NAME}.parameters() with optimizer.add_param_group"
            if all(p.ndim == 2 for group in optimizer.param_groups for p in group["params"]):  # Muon takes no gamma
                do = f"pass model.{NAME}.parameters() to another optimizer, such as AdamW"
            raise StepError(
                f"{type(optimizer).__name__} trains {len(weights)} weights of {type(ace.root).__name__} but no "
                f"optimizer owns its gamma (model.{NAME}.gamma): {do}, or freeze gamma with "
                f"model.{NAME}.gamma.requires_grad_(False)"
            )
    bounded = [ace for ace in live if any(id(m.weight) in places for m in find_bounded(ace.branches))]
    return Ownership(_describe(optimizer), live, loops, bounded)


def adopt(init: Any, optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
    """Wrap ``Optimizer.__init__`` to add ACE's parameters if it gets only some of the model's parameters.

    Scripts build optimizers from named submodules (MACE) or from lists of parameters. ACE's parameters join the group
    with most of the model's weights, since scripts may count on the number of groups. If a later optimizer is built
    with gamma in it, ACE's parameters are removed from the group again, unless they already have optimizer state.
    """
    init(optimizer, *args, **kwargs)
    places = _find_places(optimizer)
    for ace in _find_models(places):
        weights = _find_weights(ace, places.keys())
        if id(ace.gamma) in places:
            for reference, adopted in ace.session.adopted:
                earlier = reference()
                if earlier is None or any(p in earlier.state for p in adopted):
                    continue
                if not any(one is two for one in earlier.param_groups for two in optimizer.param_groups):  # as in SAM
                    _remove(earlier, adopted)
            ace.session.adopted = []
        elif weights:
            replaced = [o for reference, _ in ace.session.adopted if (o := reference()) is not None]
            # An optimizer of the same weights takes the place of an earlier one, whose state it may load.
            replaced = [o for o in replaced if not _find_places(o).keys().isdisjoint(map(id, weights))]
            owned = _find_owned(besides=replaced)
            if id(ace.gamma) not in owned:
                _extend(optimizer, ace, weights, owned | places.keys())


def _extend(optimizer: Optimizer, ace: Ace, weights: list[nn.Parameter], owned: Set[int]) -> None:
    """Add ACE's parameters to groups of an optimizer that owns some of the model's weights."""
    places = _find_places(optimizer)
    counts = Counter(places[id(p)] for p in weights)
    groups = [optimizer.param_groups[number] for number, _ in counts.most_common()]
    # Muon accepts matrices only, and groups of matrices alone usually have weight decay.
    mixed = [group for group in groups if any(p.ndim != 2 for p in group["params"])]
    later = any(p.ndim != 2 and p.requires_grad for p in _find_weights(ace) if id(p) not in places)
    adopted = []
    for name, parameter in ace.named_parameters():
        fitting = groups if parameter.ndim == 2 else mixed or ([] if later else groups)
        if parameter.requires_grad and id(parameter) not in owned and fitting:
            group = fitting[0]
            group["params"].append(parameter)
            if "param_names" in group:
                group["param_names"].append(f"{NAME}.{name}")
            adopted.append(parameter)
    ace.session.adopted.append((weakref.ref(optimizer), adopted))


def _remove(optimizer: Optimizer, parameters: Iterable[Tensor]) -> None:
    """Remove parameters that `adopt` has added to an optimizer."""
    gone = set(map(id, parameters))
    for group in optimizer.param_groups:
        kept = [number for number, p in enumerate(group["params"]) if id(p) not in gone]
        if len(kept) < len(group["params"]):
            for key in group.keys() & {"params", "param_names"}:
                group[key] = [group[key][number] for number in kept]


def _add_group(add: Any, optimizer: Optimizer, param_group: dict[str, Any]) -> None:
    """Wrap ``Optimizer.add_param_group``: `adopt` may already have added parameters of the new group to another one."""
    adopted = {id(p): p for ace in list(LIVE.aces) for ref, ps in ace.session.adopted if ref() is optimizer for p in ps}
    params = param_group.get("params")
    if adopted and isinstance(params, Iterable) and not isinstance(params, (Tensor, set)):
        given = [(part, part[1] if isinstance(part, tuple) else part) for part in params]
        _remove(optimizer, [p for _, p in given if id(p) in adopted and p not in optimizer.state])
        present = _find_places(optimizer).keys() & adopted.keys()
        param_group["params"] = [part for part, p in given if id(p) not in present]
    add(optimizer, param_group)


def _lists_per_group(optimizer: Optimizer) -> list[str]:
    """Return the names of an optimizer's attributes that are lists with one number per group (AdaBound)."""
    lists = [(name, value) for name, value in vars(optimizer).items() if isinstance(value, list)]
    return [name for name, value in lists if name != "param_groups" and len(value) == len(optimizer.param_groups)]


def _find_places(optimizer: Optimizer) -> Places:
    return {id(p): number for number, group in enumerate(optimizer.param_groups) for p in group["params"]}


def _find_models(places: Places) -> list[Ace]:
    """Return the attached models that have parameters among these places of an optimizer."""
    return [ace for ace in LIVE.aces if not places.keys().isdisjoint(LIVE.parameters(ace))]


def _find_weights(ace: Ace, places: Set[int] | None = None) -> list[nn.Parameter]:
    """Return upstream's weights, or only those whose ids are in ``places``. Empty if gamma needs no optimizer."""
    model = ace.root
    if model is None or ace.landed or not ace.gamma.requires_grad:
        return []
    added = {id(p) for p in ace.parameters()}
    return [p for p in model.parameters() if id(p) not in added and (places is None or id(p) in places)]


def _find_owned(besides: Sequence[Optimizer] = ()) -> set[int]:
    """Return the ids of the parameters of all other optimizers. Slow, since it visits all objects."""
    others = [each for each in find_instances(Optimizer) if not any(each is one for one in besides)]
    return {id(p) for each in others for group in getattr(each, "param_groups", ()) for p in group["params"]}


def wrap(owner: Any, name: str, around: Callable[..., Any]) -> Callable[[], None]:
    """Replace calls of a function by ``around(function, *args, **kwargs)``. Returns a function that undoes this.

    If another library wraps the new function before the undo, the new function stays, but only calls the original.
    """
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


def _wrap_everywhere(owner: ModuleType, name: str, around: Callable[..., Any]) -> list[Callable[[], object]]:
    """Replace calls of a function as `wrap` does, also in modules that imported it by name. Return an undo function."""
    original = vars(owner)[name]
    undo = wrap(owner, name, around)
    ours = vars(owner)[name]

    def rename(old: Any, new: Any) -> None:
        for module in list(sys.modules.values()):
            if getattr(module, "__dict__", {}).get(name) is old:
                setattr(module, name, new)

    rename(original, ours)
    return [lambda: rename(ours, original), undo]


def _clip_separately(clip: Any, parameters: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap ``clip_grad_norm_`` to clip ACE's gradients separately, so that they do not shrink upstream's step."""
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    added = {id(p) for ace in list(LIVE.aces) for p in ace.parameters()}
    ours = [p for p in parameters if id(p) in added]
    norm = clip(ours, *args, **kwargs) if ours else None
    if norm is not None and len(ours) == len(parameters):
        return norm
    return clip([p for p in parameters if id(p) not in added], *args, **kwargs)


def _running_steps(frame: FrameType | None) -> list[Any]:
    """Return the optimizers whose ``step`` is running, given the innermost frame of a thread."""
    found = []
    while frame is not None:
        if frame.f_code.co_name == "wrapper" and frame.f_code.co_filename == optimizers.__file__:
            found.append(frame.f_locals.get("self"))
        frame = frame.f_back
    return found


def _run_backward(backward: Any, tensors: Any, *args: Any, **kwargs: Any) -> None:
    """Wrap ``torch.autograd.backward`` to record the loss, and to give all parameters of landed models a gradient."""
    LOSSES.record(tensors, accumulates=any(ace.gamma.grad is not None for ace in list(LIVE.aces)))
    backward(tensors, *args, **kwargs)
    for ace in list(LIVE.aces):
        ace.give_gradients()


def _convert_norm(convert: Any, cls: Any, module: nn.Module, process_group: Any = None) -> Any:
    """Wrap ``convert_sync_batchnorm`` to skip `Norm`: torch would normalise its dimension 1 instead of the last."""
    return module if isinstance(module, Norm) else convert(cls, module, process_group)


def _distribute(init: Any, wrapper: Any, module: nn.Module, *args: Any, **kwargs: Any) -> None:
    """Wrap ``DistributedDataParallel.__init__`` to hide ACE's buffers from it, and to set the model's ranks."""
    # DDP broadcasts buffers before every forward pass, so a forward pass that only rank 0 makes would hang.
    aces = {name: inner for name, inner in module.named_modules() if isinstance(inner, Ace)}
    attribute = "_ddp_params_and_buffers_to_ignore"
    ignored = getattr(module, attribute, [])
    hidden = [f"{prefix}.{name}" for prefix, ace in aces.items() for name, _ in ace.named_buffers()]
    vars(module)[attribute] = [*ignored, *hidden]
    try:
        init(wrapper, module, *args, **kwargs)
    finally:
        vars(module)[attribute] = ignored
    for ace in aces.values():
        ace.session.ranks = Ranks(wrapper=wrapper)
        ace.session.ranks.agree(ace)


def _refuse_fsdp(init: Any, wrapper: Any, module: nn.Module, *args: Any, **kwargs: Any) -> None:
    if any(isinstance(inner, Ace) for inner in module.modules()):
        what = "FullyShardedDataParallel shards gamma, so the dual loop would run on one rank only"
        raise AttachError(f"{what}; use {SHARD}, or DistributedDataParallel")
    init(wrapper, module, *args, **kwargs)


STEPS = Steps()
LIVE.changed = STEPS.update
wrapt.register_post_import_hook(STEPS.wrap_fsdp, FSDP)
STEPS.update()  # a model may have been unpickled before this module was imported
