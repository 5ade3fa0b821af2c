"""The forward hooks that add the branches.

A forward of an attached model is upstream's own. The model's pre-hook opens a `Forward`, pre-hooks of submodules note
what branches read before the submodule runs, and each site's hook adds ``gamma * branch`` to its module's output.
Hooks are picklable objects.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..contract.sites import Site, Tap
from ..errors import AttachError
from ..symmetry.measuring import Call, clone, mapped
from .compiling import outside_graphs
from .forwards import OPEN, Forward
from .frames import TurnBackHook, turned
from .state import LIVE, NAME, Ace, Unstepped
from .steps import LOOP as LOOP  # a model that comes by pickle brings its hooks, and they bring the optimizer's


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
            if not (compiling or ace.stepped or ace.landed) and ace.trains() and ace.gamma.requires_grad:
                ace.unstepped = ace.unstepped or Unstepped(model)
                ace.unstepped.look(model)
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
