"""The forward hooks that add the branches to a model's forward pass.

The model's pre-hook opens a `Forward`, pre-hooks of submodules store the inputs of branches, and each site's hook adds
``gamma * branch`` to its module's output. Hooks are functions or objects, not closures, so that models can be pickled.

With random frames, a training forward pass applies a random group element to its batch, and the inverse to its outputs.
"""

from __future__ import annotations

import functools
import inspect
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..contract.sites import Node, Site
from ..errors import AdapterError, AttachError, StepError
from ..symmetry.groups import Element
from ..symmetry.measure import Call, clone, forward_names, map_tensors
from ..symmetry.parts import iterate_tensors, replace_part, select_output
from . import step as step  # an unpickled model has these hooks, and they need the patches of PyTorch
from .distributed import rank
from .holdout import Parts, apply, split
from .spectral_norm import Bounded, divide, find_bounded
from .state import LIVE, NAME, Ace


class Forward:
    """One forward pass in progress: the inputs and outputs of its branches so far, by name of the site or stem."""

    def __init__(self, ace: Ace, frame: Element | None = None, parts: Parts | None = None, alone: bool = False) -> None:
        self.ace = ace
        self.frame = frame  # group element that was applied to the model's inputs, if any
        self.parts = parts  # which samples judge gamma and which train the branches; None: all samples do both
        self.alone = alone  # True if a submodule was called outside its model's forward pass
        self.gammas = dict(zip((site.name for site in ace.sites), ace.gamma.unbind(0), strict=True))
        self.fired: set[str] = set()  # names of the sites that have added their branch
        self.tapped: dict[str, Any] = {}
        self.values: dict[str, Tensor] = {}
        self.prepared: dict[str, Any] = {}
        self.bounded: list[Bounded] = []
        # Divide all weights by their norms at once. torch.compile does so itself, and drops tensors stored on modules.
        if ace.bounds and not alone and not torch.compiler.is_compiling():
            self.bounded = find_bounded(ace.branches)
            for bounded, weight in zip(self.bounded, divide(self.bounded), strict=True):
                bounded.divided = weight

    def take(self, name: str, read: Any) -> None:
        """Store the input of a site or stem, in place of the input from an earlier call of the module."""
        self.tapped[name] = read
        self.prepared.pop(name, None)

    def add(self, site: Site, output: Any) -> Any:
        """Return the output of the site's module with ``gamma * branch`` added."""
        self.fired.add(site.name)
        add = self._add_itself if site.name in self.ace.prepared_by else self._add_branch
        added = add(site, select_output(output, site))
        if site.output is None:
            return added
        return replace_part(output, str(site.output), added, f"output of {site.module}")

    def _add_branch(self, site: Site, output: Tensor) -> Tensor:
        if self.ace.module_taps.get(site.name) == site.module:
            self.values.pop(site.name, None)  # the module's input differs from call to call
        value = self._compute(site.name)
        if value.shape != output.shape:
            shapes = f"{tuple(value.shape)}, expected {tuple(output.shape)}, the shape of {site.module}'s output"
            raise AdapterError(f"site {site.name!r}: its branch returns shape {shapes}")
        gamma = self.gammas[site.name] if self.parts is None else self.parts.gamma_of_rows(site.name, output)
        return torch.addcmul(output, value, gamma)

    def _add_itself(self, site: Site, output: Tensor) -> Tensor:
        """Return the output with an `AddsItself` branch added. Sites that read the same tensor prepare it once."""
        branch, first = self.ace.branch(site.name), self.ace.prepared_by[site.name]
        if first not in self.prepared:
            self.prepared[first] = self.ace.branch(first).prepare(self._read(site))  # type: ignore[operator]
        prepared = self.prepared[first]
        if self.parts is None:
            return branch.add_to(output, self.gammas[site.name], prepared)  # type: ignore[operator,no-any-return]
        column = self.parts.columns[site.name]
        rows = self.parts.rows_that_fit(site.name, len(output))[:, 0] > 0
        pair = torch.stack([self.parts.fitting[column], self.parts.judging[column]])
        return branch.add_to(output, pair, prepared, fit=rows)  # type: ignore[operator,no-any-return]

    def _compute(self, name: str) -> Tensor:
        """Return the output of a stem or of a site's branch. It is computed only once per forward pass."""
        if name not in self.values:
            node = self.ace.nodes[name]
            self.values[name] = self._apply(node, self._read(node))
        return self.values[name]

    def _read(self, node: Node) -> Any:
        if isinstance(node.reads, str):
            return self._compute(node.reads)
        if node.name in self.tapped:
            return self.tapped[node.name]
        assert node.reads is not None  # a stem without reads is applied by `through` only
        where = f"the input of {node.reads.module!r}" if node.reads.module else "the model's own input"
        raise AttachError(
            f"{node.name!r} reads {where}, which is missing: a submodule was called outside its model's forward pass "
            "(directly, or by activation checkpointing, which recomputes it); call the model, or project(model) first"
        )

    def _apply(self, node: Node, read: Any) -> Tensor:
        """Return the output of the branch of a site or stem, after checking that its input has ``shape_in``."""
        if isinstance(node, Site) and node.through is not None:
            read = self._apply(self.ace.nodes[node.through], read)
        found: Any = node.sizes(read.shape, node.shape_in) if isinstance(read, Tensor) else type(read).__name__
        if found != node.shape_in:
            where = "the last dimensions" if node.axis == -1 else f"dimension {node.axis}"
            whole = f" of {list(read.shape)}" if isinstance(read, Tensor) else ""
            raise AdapterError(
                f"{node.name!r} reads features of shape {found} in {where}{whole}, expected shape_in {node.shape_in}; "
                "correct shape_in, or set axis if the features are in another dimension"
            )
        rows = None if self.parts is None else self.parts.rows_that_fit(node.name, len(read))
        return apply(self.ace.branch(node.name), read, rows, separable=node.name in self.ace.separable)


class OpenForwards(threading.local):
    """The forward passes in progress in this thread, the innermost last. Replicas (nn.DataParallel) share hooks."""

    def __init__(self) -> None:
        self.stack: list[Forward] = []

    def of(self, ace: Ace) -> Forward | None:
        """Return the innermost forward pass of a model."""
        for forward in reversed(self.stack):
            # A replica's hook refers to the original Ace, which shares the object ``nodes`` with the replica's Ace.
            if forward.ace is ace or forward.ace.nodes is ace.nodes:
                return forward
        return None

    def end(self, forward: Forward) -> None:
        self.stack.remove(forward)
        for bounded in forward.bounded:
            bounded.divided = None

    def end_all(self, ace: Ace) -> None:
        """Close the forward passes of a model that were interrupted by Ctrl-C or an error."""
        for forward in [forward for forward in self.stack if forward.ace is ace]:
            self.end(forward)


OPEN = OpenForwards()


def outside_graphs(reason: str) -> Callable[[Any], Any]:
    """Return a decorator that excludes functions from torch.compile. Errors of torch.compile then state the reason."""
    options = {"reason": reason} if "reason" in inspect.signature(torch.compiler.disable).parameters else {}
    return functools.partial(torch.compiler.disable, **options)


# Inside a graph, torch.compile would treat the random matrices as constants.
NO_FRAMES = "for fullgraph=True: set frames = 'off'; random frames are drawn outside of graphs"
NO_BATCH = "for fullgraph=True: set error_every = 0; the measured batch is copied outside of graphs"


@outside_graphs(NO_FRAMES)
def _turn_inputs(model: nn.Module, ace: Ace, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the frame of a forward pass in training mode, and the arguments transformed by it.

    Without gradients there is no frame (None). Activation checkpointing repeats a forward pass inside the backward
    pass, with the same frame. Forward passes of a step are identified by the first tensor of their arguments.
    """
    assert ace.action is not None
    names, passes = forward_names(model), ace.passes
    tensor = next((tensor for _, tensor in iterate_tensors((args, kwargs))), ace.gamma)
    known, frame = tensor in passes.frames, passes.frames.get(tensor, passes.last)
    if torch._C._current_graph_task_id() != -1:  # inside a backward pass
        if not known and passes.differ:
            raise StepError(
                f"cannot tell which random frame a recomputed forward pass of {type(model).__name__} had: expected the "
                "tensors of one forward pass of this step, found others; checkpoint the model alone, with "
                "use_reentrant=False, or set frames = 'off'"
            )
    elif not known or (frame is None) == torch.is_grad_enabled():
        frame = _draw_frame(ace, names, args, kwargs) if torch.is_grad_enabled() else None
        passes.differ, passes.last = passes.differ is not None and (passes.differ or frame is not passes.last), frame
        passes.frames[tensor] = frame
    return (None, args, kwargs) if frame is None else (frame, *ace.action.act_on_inputs(frame, names, args, kwargs))


def _draw_frame(ace: Ace, names: list[str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Element:
    assert ace.action is not None
    # The seed is reproducible, differs between ranks, and does not use the script's random stream.
    ace.passes.count += 1
    seed = random.Random(f"{torch.initial_seed()} {ace.duals.count} {ace.passes.count} {rank()}").getrandbits(63)
    return ace.action.sample_frame(torch.Generator().manual_seed(seed), names, args, kwargs)


@outside_graphs(NO_FRAMES)
def _turn_back(action: Any, frame: Any, output: Any) -> Any:
    return action.act_on_outputs(frame.inverse(), output)


@outside_graphs(NO_BATCH)
def _keep_batch(ace: Ace, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Copy the batch if it is needed after this step; by then the script may have overwritten it."""
    due = ace.learning and not ace.landed and ace.gamma.requires_grad and torch.is_grad_enabled()
    if due and ace.config.copies(ace.duals.count + 1):
        try:
            ace.passes.batch = Call(clone(args), clone(kwargs))
        except Exception as error:
            ace.passes.batch = error


def open_forward(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Forward pre-hook of the model, always registered: opens a `Forward` and updates the other hooks."""
    ace = model._modules[NAME]
    assert isinstance(ace, Ace)
    ace.read_mode(args, kwargs)
    compiling = torch.compiler.is_compiling()
    if ace.config.mode == "auto" and not (ace.learning or compiling):
        ace.duals.evidence.notice_changes()
    active = ace.active()
    if active and ace.learning and not compiling and torch._C._functorch.peek_interpreter_stack() is not None:
        raise AttachError(
            f"{type(model).__name__} is called inside torch.func (grad, vmap, jacrev, ...), where ACE cannot train it: "
            "expected loss.backward() or torch.autograd.grad; to evaluate it, call model.eval() first"
        )
    replica = getattr(model, "_is_replica", False)  # made by nn.DataParallel, with the original model's hooks
    if not replica:
        if ace.root is not model:
            ace.belong_to(model)
            LIVE.add(ace)
        hooks = ace.hooks
        assert hooks is not None
        # A compiled forward pass cannot update hooks. Landings, train(), eval() and loading update them, and the
        # next optimizer step checks hooks that are not verified.
        if not compiling and (hooks.state != hooks.describe(ace) or (active and not hooks.verified)):
            hooks.sync(ace)
        if ace.config.error_every or ace.config.symmetry_left:
            _keep_batch(ace, args, kwargs)
        if ace.learning and not compiling:
            ace.budget.note_batch(args, kwargs)
    OPEN.end_all(ace)
    if not active:
        return None
    frame = parts = None
    # Also without gradients: activation checkpointing with ``use_reentrant`` enables them only in the backward pass.
    training = ace.learning and ace.passes.forced is None
    if ace.config.held_out and training:
        parts = split(ace, forward_names(model), args, kwargs)  # before frames change the inputs
    if not replica and ace.action is not None and training:
        frame, args, kwargs = _turn_inputs(model, ace, args, kwargs)
    forward = Forward(ace, frame, parts)
    OPEN.stack.append(forward)
    for name in ace.model_taps:
        forward.take(name, ace.arguments[name].pick(args, kwargs))
    return None if frame is None else (args, kwargs)


def close_forward(model: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    """Forward hook of the model, also called after an error: closes the `Forward`, and reverses the random frame."""
    if not OPEN.stack or OPEN.stack[-1].ace is not model._modules[NAME]:
        return None
    forward = OPEN.stack[-1]
    OPEN.end(forward)
    if len(forward.fired) < len(forward.ace.live()) and forward.ace.hooks is not None:
        forward.ace.hooks.verified = False  # a module may have been replaced: check before the next forward pass
    turns = forward.frame is not None and output is not None
    return _turn_back(forward.ace.action, forward.frame, output) if turns else None


def touch_freed(model: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    """Forward hook of the model: adds the parameters of landed sites to the graph; see `Ace.needs_touch`."""
    ace = model._modules[NAME]
    assert isinstance(ace, Ace)
    nothing = torch.stack([parameter.flatten()[:0].sum() for parameter in ace.freed]).sum()  # 0, with gradients of 0
    return map_tensors(output, lambda tensor: tensor + nothing.to(tensor) if tensor.requires_grad else tensor)


@dataclass(frozen=True)
class BranchHook:
    """Base class of the hooks of a submodule. Each hook works for one site or stem of one model."""

    ace: Ace
    name: str


class TapHook(BranchHook):
    """Forward pre-hook of a submodule: stores the argument that a branch reads, before the submodule can change it."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        forward = OPEN.of(self.ace)
        if forward is None:
            own = self.ace.module_taps[self.name] == getattr(self.ace.nodes[self.name], "module", None)
            if not own or OPEN.stack or self.ace.root is None or not self.ace.active():
                return
            forward = Forward(self.ace, alone=True)
            OPEN.stack.append(forward)
        forward.take(self.name, self.ace.arguments[self.name].pick(args, kwargs))


class SiteHook(BranchHook):
    """Forward hook of a site's module: adds ``gamma * branch`` to the output that `Site.output` selects."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if not self.ace.active():
            return None
        forward = OPEN.of(self.ace)
        if forward is None:
            if OPEN.stack or self.ace.root is None:
                return None  # called by another model, which shares this module or has a copy of it with this hook
            forward = Forward(self.ace, alone=True)
        site = forward.ace.nodes[self.name]
        assert isinstance(site, Site)
        if not forward.alone:
            return forward.add(site, output)
        try:
            return forward.add(site, output)
        finally:
            last = all(s.name in forward.fired for s in forward.ace.live() if s.module == site.module)
            if last and forward in OPEN.stack:
                OPEN.end(forward)


class RestoreHook(BranchHook):
    """Forward hook: restores the memory layout of an output after an `AddsItself` branch may have changed it."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        forward = OPEN.of(self.ace)
        group = (name for name, first in self.ace.prepared_by.items() if first == self.name)
        if forward is None or forward.fired.isdisjoint(group):
            return None
        return forward.ace.branch(self.name).restore(output)  # type: ignore[operator]


class ModelHooks:
    """All hooks of one attached model. Those in ``permanent`` stay registered as long as the model is attached."""

    def __init__(self, model: nn.Module) -> None:
        self.permanent: list[Any] = [model.register_forward_pre_hook(open_forward, with_kwargs=True)]
        self.handles: list[Any] = []  # handles of hooks that are registered only while they are needed
        self.verified = False  # True if it was checked that every site has its hooks
        self.state: Any = None  # result of `describe` when the hooks were last registered or removed
        self.landed: frozenset[int] = frozenset()  # indices of the landed sites when parameters were last freed

    def describe(self, ace: Ace) -> Any:
        """Return all values that determine which hooks must be registered."""
        return ace.active(), ace.passes.forced, ace.needs_touch, ace.duals.landed_sites, ace.allowed

    def sync(self, ace: Ace) -> None:
        """Register hooks on the sites' modules if the branches are active, otherwise remove these hooks.

        PyTorch calls modules without hooks faster. Submodules that the script has replaced also get their hooks here.
        """
        if (model := ace.root) is None:
            return
        if self.landed != ace.duals.landed_sites:
            self.landed = ace.duals.landed_sites
            ace.free_landed()
        state, plan = self.describe(ace), _plan(ace, model)
        same = state == self.state
        # Compared with this Ace's hooks, since a copied module has hooks of the model it was copied from.
        if not same or any(hook not in {**m._forward_pre_hooks, **m._forward_hooks}.values() for hook, m in plan):
            ace.repaired += same
            self.state = state
            for handle in self.handles:
                handle.remove()
            self.handles = [
                module.register_forward_pre_hook(hook, with_kwargs=True)
                if isinstance(hook, TapHook)
                else module.register_forward_hook(hook)
                for hook, module in plan
            ]
            if ace.active() or (ace.action is not None and not ace.landed):
                # This hook runs first, so that the script's own hooks see outputs in the caller's frame.
                self.handles.append(model.register_forward_hook(close_forward, prepend=True, always_call=True))
            if ace.needs_touch:
                self.handles.append(model.register_forward_hook(touch_freed))
        self.verified = True

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "verified": False}


def _plan(ace: Ace, model: nn.Module) -> list[tuple[Any, nn.Module]]:
    """Return the hooks that the branches need now, each with its module."""
    live = ace.live()
    needed = ace.needed_by(live)
    paths: dict[BranchHook, str] = {TapHook(ace, n): path for n, path in ace.module_taps.items() if n in needed}
    paths |= {SiteHook(ace, site.name): site.module for site in live}
    firsts = dict.fromkeys(ace.prepared_by[site.name] for site in live if site.name in ace.prepared_by)
    paths |= {RestoreHook(ace, first): ace.module_taps[first] for first in firsts}
    plan: list[tuple[Any, nn.Module]] = []
    for hook, path in paths.items():
        try:
            plan.append((hook, model.get_submodule(path)))
        except AttributeError:
            raise AttachError(
                f"site {hook.name!r}: {path} is gone from {type(model).__name__}; attach after the model is complete"
            ) from None
    return plan


def uninstall(ace: Ace, model: nn.Module) -> None:
    """Remove ``ace`` and its hooks from the model."""
    LIVE.discard(ace)
    for handle in () if ace.hooks is None else (*ace.hooks.handles, *ace.hooks.permanent):
        handle.remove()
    OPEN.end_all(ace)
    ace.hooks = None
    ace.belong_to(None)
    ace.passes.forced = None
    del model._modules[NAME]
