"""What a compiler must leave to Python.

One forward of an attached model: what its branches have read, and what they have given so far.

Random frames: a training forward sees its batch under a random group element, and answers in the original frame.

For f_eq nothing changes, to rounding. For the branches it is data augmentation that needs neither the script, nor its
targets, nor its loss: they learn to be equivariant on average instead of memorising orientations.

The forward hooks that add the branches.

A forward of an attached model is upstream's own. The model's pre-hook opens a `Forward`, pre-hooks of submodules note
what branches read before the submodule runs, and each site's hook adds ``gamma * branch`` to its module's output.
Hooks are picklable objects.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..contract.sites import Node, Site, Tap
from ..errors import AdapterError, AttachError
from ..symmetry.actions import GroupAction
from ..symmetry.groups import Element
from ..symmetry.measure import Call, clone, forward_names, mapped
from ..symmetry.parts import part_of, with_part
from .distributed import rank
from .spectral_norm import Bounded, divide, find_bounded
from .state import LIVE, NAME, Ace
from .step import LOOP as LOOP  # a model that comes by pickle brings its hooks, and they bring the optimizer's


def outside_graphs(reason: str) -> Callable[[Any], Any]:
    """A function that splits the graph. torch tells the reason where the whole forward was to be one graph."""
    told = {"reason": reason} if "reason" in inspect.signature(torch.compiler.disable).parameters else {}
    return functools.partial(torch.compiler.disable, **told)


class Forward:
    """One forward under way."""

    __slots__ = ("ace", "alone", "bounded", "fired", "gammas", "prepared", "tapped", "values")

    def __init__(self, ace: Ace, *, alone: bool = False) -> None:
        self.ace = ace
        self.alone = alone
        """Of a submodule that was called on its own, outside its model's forward."""
        self.gammas = dict(zip((site.name for site in ace.sites), ace.gamma.unbind(0), strict=True))
        self.fired: set[str] = set()
        """Sites that have added their branch."""
        self.tapped: dict[str, Any] = {}
        self.values: dict[str, Tensor] = {}
        self.prepared: dict[str, Any] = {}
        self.bounded: list[Bounded] = []

    def open(self) -> None:
        """Divide the weights of all bounded branches at once, rather than each when it is called."""
        if not self.ace.bounds or torch.compiler.is_compiling():
            return  # a compiler merges what it can itself, and does not keep what is put aside on modules
        self.bounded = find_bounded(self.ace.branches)
        for bounded, weight in zip(self.bounded, divide(self.bounded), strict=True):
            bounded.divided = weight

    def close(self) -> None:
        for bounded in self.bounded:
            bounded.divided = None

    def take(self, name: str, read: Any) -> None:
        """Note what a site or stem reads. The module it reads from may be called several times in a forward."""
        self.tapped[name] = read
        self.prepared.pop(name, None)

    def add(self, site: Site, output: Any) -> Any:
        """The output of the site's module with ``gamma * branch`` added."""
        self.fired.add(site.name)
        gamma, chosen = self.gammas[site.name], chosen_output(output, site)
        if site.name in self.ace.prepared_by:
            branch: Any = self.ace.branch(site.name)
            return with_output(output, site, branch.add_to(chosen, gamma, self._prepared(site)))
        if self.ace.module_taps.get(site.name) == site.module:
            # Not kept from call to call: the module may be called several times, with other inputs.
            value = self.values[site.name] = self._branch(site, self._read(site))
        else:
            value = self._value(site.name)
        if value.shape != chosen.shape:
            raise AdapterError(
                f"site {site.name!r}: its branch returns shape {tuple(value.shape)}, expected "
                f"{tuple(chosen.shape)}, the shape of {site.module}'s output"
            )
        return with_output(output, site, torch.addcmul(chosen, value, gamma))

    def _value(self, name: str) -> Tensor:
        """The output of a stem or of a site's branch, computed once in a forward."""
        if name not in self.values:
            node = self.ace.nodes[name]
            self.values[name] = self._branch(node, self._read(node))
        return self.values[name]

    def _prepared(self, site: Site) -> Any:
        """What the site reads as its branch wants it, made once for all sites that read the same."""
        first = self.ace.prepared_by[site.name]
        if first not in self.prepared:
            self.prepared[first] = self.ace.branch(first).prepare(self._read(site))  # type: ignore[operator]
        return self.prepared[first]

    def _read(self, node: Node) -> Any:
        if isinstance(node.reads, str):
            return self._value(node.reads)
        if node.name in self.tapped:
            return self.tapped[node.name]
        assert node.reads is not None  # such stems are gone through, not read
        where = f"the input of {node.reads.module!r}" if node.reads.module else "the model's own input"
        raise AttachError(
            f"{node.name!r} reads {where}, which this call has not seen: a submodule was called outside its model's "
            "forward (on its own, taken into another model, or recomputed by activation checkpointing); call "
            "the model itself, or project(model) first"
        )

    def _branch(self, node: Node, read: Any) -> Tensor:
        """The node's module on what it reads, which must be features of the shape the adapter says."""
        if isinstance(node, Site) and node.through is not None:
            read = self._branch(self.ace.nodes[node.through], read)
        found: Any = node.sizes(read.shape, node.shape_in) if isinstance(read, Tensor) else type(read).__name__
        if found != node.shape_in:
            where = "in the last dimensions" if node.axis == -1 else f"in dimension {node.axis}"
            whole = f" of {list(read.shape)}" if isinstance(read, Tensor) else ""
            raise AdapterError(
                f"{node.name!r} reads features of shape {found} {where}{whole}, expected shape_in {node.shape_in}; "
                "correct shape_in, or set axis where the features are another dimension"
            )
        value: Tensor = self.ace.branch(node.name)(read)
        return value


def chosen_output(output: Any, site: Site) -> Any:
    """The tensor of the module's output that the site adds to."""
    chosen = output if site.output is None else part_of(output, str(site.output), f"output of {site.module}")
    if isinstance(chosen, Tensor):
        return chosen
    kind = type(chosen).__name__
    if site.output is not None:
        raise AdapterError(f"site {site.name!r}: output {site.output!r} of {site.module} is a {kind}, not a tensor")
    if isinstance(chosen, (tuple, list)):
        raise AdapterError(f"site {site.name!r}: {site.module} returns a {kind} of {len(chosen)}; set output=0")
    known = f" with {', '.join(map(repr, chosen))}" if isinstance(chosen, dict) else ""
    raise AdapterError(f"site {site.name!r}: {site.module} returns a {kind}{known}; set output= to what it adds to")


def with_output(output: Any, site: Site, summed: Tensor) -> Any:
    """The module's output with that tensor replaced."""
    if site.output is None:
        return summed
    return with_part(output, str(site.output), summed, f"output of {site.module}")


class OpenForwards(threading.local):
    """The forwards under way in this thread, the innermost last.

    A forward is found here rather than through the hook, because replicas of a model (nn.DataParallel) share hook
    objects but not parameters.
    """

    def __init__(self) -> None:
        self.stack: list[Forward] = []

    def of(self, ace: Ace) -> Forward | None:
        for forward in reversed(self.stack):
            # A replica's hook names the original ace; the nodes object is what the two share.
            if forward.ace is ace or forward.ace.nodes is ace.nodes:
                return forward
        return None

    def begin(self, forward: Forward) -> None:
        self.stack.append(forward)

    def end(self, forward: Forward) -> None:
        self.stack.remove(forward)
        forward.close()

    def end_all(self, ace: Ace) -> None:
        """Those that were interrupted (Ctrl-C, an error in a submodule called on its own)."""
        for forward in [forward for forward in self.stack if forward.ace is ace]:
            self.end(forward)


OPEN = OpenForwards()


# Random numbers of its own, and matrices that compilers would take for constants.
WHOLE = "for fullgraph=True: set frames = 'off'; random frames are no part of a graph"


@outside_graphs(WHOLE)
def turned(model: nn.Module, ace: Ace, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The arguments of a training forward in a random frame, which is kept for `TurnBackHook`."""
    assert ace.action is not None
    # Each process has frames of its own.
    generator = torch.Generator().manual_seed(ace.turns.seed(ace.duals.count, rank()))
    names = forward_names(model)
    ace.turns.frame = ace.action.frame(generator, names, args, kwargs)
    return ace.action.act_on_inputs(ace.turns.frame, names, args, kwargs)


@dataclass(eq=False)
class TurnBackHook:
    """Forward hook of the model, the last: its outputs as the caller's frame has them."""

    def __call__(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        ace = model._modules[NAME]
        assert isinstance(ace, Ace)
        frame, ace.turns.frame = ace.turns.frame, None
        return None if frame is None else _turned_back(ace.action, frame, output)


@outside_graphs(WHOLE)
def _turned_back(action: Any, frame: Element, output: Any) -> Any:
    return action.act_on_outputs(frame.inverse(), output)


class Averaged(nn.Module):
    """A model whose output is the mean over random frames: closer to equivariant, at the cost of so many forwards."""

    def __init__(self, model: nn.Module, action: GroupAction, samples: int, seed: int) -> None:
        super().__init__()
        self.model = model
        self.action = action
        self.samples = samples
        self.seed = seed

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        names = forward_names(self.model)
        generator = torch.Generator().manual_seed(self.seed)
        outputs = []
        for _ in range(self.samples):
            element = self.action.group.sample(generator, scale=0.0)
            turned = self.action.act_on_inputs(element, names, args, kwargs)
            outputs.append(self.action.act_on_outputs(element.inverse(), self.model(*turned[0], **turned[1])))
        return self.action.mean(outputs)


@dataclass(eq=False)
class OpenHook:
    """Forward pre-hook of the model, always there: opens a `Forward`, and sees to the other hooks."""

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        ace = model._modules[NAME]
        assert isinstance(ace, Ace)
        ace.look_at(args, kwargs)
        active = ace.active()
        ace.turns.frame = None
        replica = getattr(model, "_is_replica", False)  # of nn.DataParallel: it shares its model's hooks
        if not replica:
            if ace.root is not model:
                ace.belong_to(model)
                LIVE.add(ace)
            hooks = ace.hooks
            assert isinstance(hooks, ModelHooks)
            # A compiled forward takes the hooks as it finds them. What changes them (a landing, train and eval, a
            # checkpoint) puts them in order itself, and a step looks after those that were not seen to be there.
            compiling = torch.compiler.is_compiling()
            if not compiling and (hooks.state != hooks.wanted(ace) or (active and not hooks.verified)):
                hooks.sync(ace)
            if not (compiling or ace.session.stepped or ace.landed) and ace.trains() and ace.gamma.requires_grad:
                ace.session.count_forward(model)
            if ace.config.error_every:
                _keep_batch(ace, args, kwargs)
        OPEN.end_all(ace)
        fresh = None
        if active and not replica and ace.action is not None and ace.trains():
            fresh = args, kwargs = turned(model, ace, args, kwargs)
        if active:
            forward = Forward(ace)
            for name in ace.model_taps:
                forward.take(name, ace.arguments[name].pick(args, kwargs))
            forward.open()
            OPEN.begin(forward)
        return fresh


@dataclass(eq=False)
class CloseHook:
    """Forward hook of the model, called on errors too: closes what `OpenHook` opened."""

    def __call__(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if OPEN.stack and OPEN.stack[-1].ace is model._modules[NAME]:
            forward = OPEN.stack[-1]
            OPEN.end(forward)
            if len(forward.fired) < len(forward.ace.live()) and isinstance(forward.ace.hooks, ModelHooks):
                forward.ace.hooks.verified = False  # its module may have been replaced: look before the next forward


class _Touch(torch.autograd.Function):
    """Passes a tensor on. In the backward the parameters that come with it get no gradient, but are met."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, *parameters: Tensor) -> Tensor:
        ctx.count = len(parameters)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, *[None] * ctx.count


@dataclass(eq=False)
class TouchHook:
    """Forward hook of the model: DistributedDataParallel waits for every parameter, also those without a part."""

    def __call__(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        ace = model._modules[NAME]
        assert isinstance(ace, Ace)
        touched = not ace.freed

        def touch(tensor: Tensor) -> Tensor:
            nonlocal touched
            if touched or not tensor.requires_grad:
                return tensor
            touched = True
            return _Touch.apply(tensor, *ace.freed)  # type: ignore[no-any-return,no-untyped-call]

        return mapped(output, touch)


@dataclass(eq=False)
class TapHook:
    """Forward pre-hook of a submodule whose argument a branch reads. A module may rewrite what it was given."""

    ace: Ace
    name: str

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        forward = OPEN.of(self.ace)
        if forward is None:
            own = self.ace.module_taps[self.name] == getattr(self.ace.nodes[self.name], "module", None)
            if not own or OPEN.stack or self.ace.root is None or not self.ace.active():
                return
            forward = Forward(self.ace, alone=True)
            OPEN.begin(forward)
        forward.take(self.name, self.ace.arguments[self.name].pick(args, kwargs))


@dataclass(eq=False)
class SiteHook:
    """Forward hook of a site's module: adds ``gamma * branch`` to the output the site names."""

    ace: Ace
    site: str

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if not self.ace.active():
            return None
        forward = OPEN.of(self.ace)
        if forward is None:
            if OPEN.stack or self.ace.root is None:
                return None  # another model runs this module, which it shares or was given a copy of
            forward = Forward(self.ace, alone=True)
        site = forward.ace.nodes[self.site]
        assert isinstance(site, Site)
        if not forward.alone:
            return forward.add(site, output)
        try:
            return forward.add(site, output)
        finally:
            last = all(s.name in forward.fired for s in forward.ace.live() if s.module == site.module)
            if last and forward in OPEN.stack:
                OPEN.end(forward)


@dataclass(eq=False)
class RestoreHook:
    """Forward hook of the layer around sites whose branches leave their outputs in another order in memory."""

    ace: Ace
    site: str
    """The first of these sites."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        forward = OPEN.of(self.ace)
        group = (name for name, first in self.ace.prepared_by.items() if first == self.site)
        if forward is None or forward.fired.isdisjoint(group):
            return None
        return forward.ace.branch(self.site).restore(output)  # type: ignore[operator]


@outside_graphs("for fullgraph=True: set error_every = 0; the batch that is measured is kept outside of graphs")
def _keep_batch(ace: Ace, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Where this step ends with a measurement. That hangs on the number of the step, a constant to a compiler."""
    if ace.wants_batch():
        ace.batch = _kept(args, kwargs)


def _kept(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | Exception:
    """A copy, since the script may go on to write into its batch; or why there can be none."""
    try:
        return Call(clone(args), clone(kwargs))
    except Exception as error:
        return error


class ModelHooks:
    """All hooks of one attached model, and what keeps them in place."""

    def __init__(self, model: nn.Module, *, turns: bool = False) -> None:
        self.permanent: list[Any] = [model.register_forward_pre_hook(OpenHook(), with_kwargs=True)]
        if turns:
            self.permanent.append(model.register_forward_hook(TurnBackHook()))
        """Handles of the hooks that stay as long as the model is attached."""
        self.handles: list[Any] = []
        """Handles of the hooks that are there only while the branches take part."""
        self.verified = False
        """Every site was seen to carry its hook since the last change."""
        self.state: Any = None
        """What `wanted` was when the hooks were last put in or taken out."""
        self.landed: frozenset[int] = frozenset()
        """Sites whose parameters were freed."""

    def wanted(self, ace: Ace) -> Any:
        """What the hooks depend on."""
        return ace.active(), ace.forced, ace.touches(), ace.duals.landed_sites

    def sync(self, ace: Ace) -> None:
        """Hooks on the sites exactly while the branches take part.

        A module with a hook is called the slow way by PyTorch, so evaluating f_eq without hooks costs what upstream
        costs. Submodules that were replaced since get their hooks here too.
        """
        model = ace.root
        if model is None:
            return
        if self.landed != ace.duals.landed_sites:
            self.landed = ace.duals.landed_sites
            ace.free()
        wanted = self.wanted(ace)
        same = wanted == self.state
        if not same or not self._in_place(ace, model):
            ace.repaired += same
            self._remove()
            self.handles = _added(ace, model)
            self.state = wanted
        self.verified = True

    def remove(self) -> None:
        """Take out all of them."""
        self._remove()
        for handle in self.permanent:
            handle.remove()
        self.permanent = []

    def _remove(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles = []
        self.verified = False

    def _in_place(self, ace: Ace, model: nn.Module) -> bool:
        """Every site and every tapped module carries this ace's hook, not one that came with a copied module."""
        return all(
            any(isinstance(h, SiteHook) and h.ace is ace and h.site == site.name for h in hooks.values())
            for site in ace.live()
            for hooks in [_module(site.name, site.module, model)._forward_hooks]
        ) and all(
            any(isinstance(h, TapHook) and h.ace is ace and h.name == name for h in hooks.values())
            for name, path in _tapped(ace).items()
            for hooks in [_module(name, path, model)._forward_pre_hooks]
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "verified": False}


def _added(ace: Ace, model: nn.Module) -> list[Any]:
    live = ace.live()
    handles: list[Any] = [model.register_forward_hook(CloseHook(), always_call=True)] if live else []
    for name, path in _tapped(ace).items():
        module = _module(name, path, model)
        handles.append(module.register_forward_pre_hook(TapHook(ace, name), with_kwargs=True))
    for site in live:
        module = _module(site.name, site.module, model)
        handles.append(module.register_forward_hook(SiteHook(ace, site.name)))
    for first in dict.fromkeys(ace.prepared_by[site.name] for site in live if site.name in ace.prepared_by):
        reads = ace.nodes[first].reads
        if isinstance(reads, Tap):
            module = _module(first, reads.module or "", model)
            handles.append(module.register_forward_hook(RestoreHook(ace, first)))
    if ace.touches():
        handles.append(model.register_forward_hook(TouchHook()))
    return handles


def _tapped(ace: Ace) -> dict[str, str]:
    """Node -> the submodule whose argument it reads, for the nodes that take part now."""
    taking_part = ace.made_of(ace.live())
    return {name: path for name, path in ace.module_taps.items() if name in taking_part}


def _module(name: str, path: str, model: nn.Module) -> nn.Module:
    try:
        return model.get_submodule(path)
    except AttributeError:
        raise AttachError(
            f"site {name!r}: {path} is gone from {type(model).__name__}; attach after the model is complete"
        ) from None


def install(ace: Ace, model: nn.Module) -> None:
    """Make ``ace`` a submodule of the model, with its hooks. Everything that could fail was checked before."""
    ace.train(model.training)
    nn.Module.add_module(model, NAME, ace)  # containers may have one of their own, which checks what is a step
    ace.belong_to(model)
    hooks = ace.hooks = ModelHooks(model, turns=ace.action is not None)
    hooks.sync(ace)
    hooks.verified = False  # a subclass's constructor may go on to replace submodules: the first forward looks again
    LIVE.add(ace)


def uninstall(ace: Ace, model: nn.Module) -> None:
    """Take out what `install` put in."""
    LIVE.discard(ace)
    if isinstance(ace.hooks, ModelHooks):
        ace.hooks.remove()
    OPEN.end_all(ace)
    ace.hooks = None
    ace.belong_to(None)
    ace.forced = None
    del model._modules[NAME]
