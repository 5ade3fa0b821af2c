"""The forward hooks that add the branches.

A forward of an attached model is upstream's own. The model's pre-hook opens a `Forward`, tap hooks note the
tensors that branches read elsewhere, and each site's hook adds ``gamma * branch`` to its module's output.
Hooks are picklable objects. A forward is found through a thread-local stack rather than through the hook,
because replicas of a model (nn.DataParallel) share hook objects but not parameters.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .affine import Affine, affine, takes_affine
from .bounded import Bounded, divided, maps
from ..contract.data import Node, Site, Stem, Tap
from ..symmetry.measuring import Call, clone
from ..errors import AdapterError, AttachError
from ..symmetry.parts import part_of, with_part
from .state import NAME, Ace
from .steps import watch


class Forward:
    """One forward under way: the tensors tapped so far and the branch values computed so far."""

    __slots__ = ("ace", "bounded", "fired", "gammas", "prepares", "tapped", "values")

    def __init__(self, ace: Ace) -> None:
        self.ace = ace
        self.gammas = dict(zip((site.name for site in ace.sites), ace.gamma.unbind(0), strict=True))
        self.fired: set[str] = set()
        self.tapped: dict[str, Any] = {}
        self.values: dict[str, Tensor | Affine] = {}
        self.prepares: dict[str, Any] = {}
        self.bounded: list[Bounded] = []

    def divide(self) -> None:
        """The weights of all bounded branches at once, rather than each when it is called."""
        if torch.compiler.is_compiling():
            return  # a compiler merges what it can itself, and does not keep what is put aside on modules
        self.bounded = maps(self.ace.branches)
        for bounded, weight in zip(self.bounded, divided(self.bounded), strict=True):
            bounded.divided = weight

    def close(self) -> None:
        for bounded in self.bounded:
            bounded.divided = None

    def value(self, name: str) -> Tensor | Affine:
        """The output of a stem or of a site's branch, computed once in a forward."""
        if name not in self.values:
            node = self.ace.nodes[name]
            read = self._read(node)
            if isinstance(node, Stem) and isinstance(read, Tensor) and takes_affine(self.ace.branch(name)):
                read = affine(read, node.width_out)
            self.values[name] = self.branch(node, read)
        return self.values[name]

    def prepared(self, site: Site) -> Any:
        """What the site reads as its branch wants it, made once for all sites that read the same."""
        first = self.ace.together[site.name]
        if first not in self.prepares:
            read = self._read(site)
            self._check(site, read)
            self.prepares[first] = self.ace.branch(first).prepare(read)  # type: ignore[operator]
        return self.prepares[first]

    def added(self, output: Any, site: Site) -> Any:
        """By a branch that adds itself, which may be cheaper than making its value first."""
        chosen = _chosen(output, site)
        gamma, points = self.gammas[site.name], self.prepared(site)
        summed = self.ace.branch(site.name).add_to(chosen, gamma, points)  # type: ignore[operator]
        return _with_chosen(output, site, summed)

    def _read(self, node: Node) -> Any:
        if isinstance(node.reads, str):
            return self.value(node.reads)
        if node.name in self.tapped:
            return self.tapped[node.name]
        assert node.reads is not None  # such stems are gone through, not read
        where = f"the input of {node.reads.module!r}" if node.reads.module else "the model's own input"
        raise AttachError(
            f"{node.name!r} reads {where}, which this call has not seen: a submodule was called outside its model's "
            "forward (on its own, taken into another model, or recomputed by activation checkpointing); call "
            "the model itself, or project(model) first"
        )

    def branch(self, node: Node, read: Any) -> Tensor | Affine:
        """The node's module on what it reads, which must be features of the shape the adapter says."""
        if isinstance(node, Site) and node.through is not None:
            read = self.branch(self.ace.nodes[node.through], read)
        self._check(node, read)
        branch = self.ace.branch(node.name)
        value: Tensor | Affine = branch(read if isinstance(read, Tensor) or takes_affine(branch) else read.tensor())
        return value

    @staticmethod
    def _check(node: Node, read: Any) -> None:
        found: tuple[int, ...] | str = type(read).__name__
        if isinstance(read, Tensor | Affine):
            axis = node.axis if isinstance(node, Site) else None
            begin = max(len(read.shape) - len(node.shape_in), 0) if axis is None else axis
            found = tuple(read.shape[begin : begin + len(node.shape_in)])
        if found != node.shape_in:
            raise AdapterError(f"{node.name!r} reads features of shape {found}, expected shape_in {node.shape_in}")


class _Forwards(threading.local):
    def __init__(self) -> None:
        self.open: list[Forward] = []


_forwards = _Forwards()


def _current(ace: Ace) -> Forward | None:
    for forward in reversed(_forwards.open):
        # A replica's hook names the original ace; the nodes object is what the two share.
        if forward.ace is ace or forward.ace.nodes is ace.nodes:
            return forward
    return None


@dataclass(eq=False)
class OpenHook:
    """Forward pre-hook of the model, always there: opens a `Forward`, and sees to the other hooks."""

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ace = model._modules[NAME]
        assert isinstance(ace, Ace)
        active = ace.active()
        if not getattr(model, "_is_replica", False):  # a replica of nn.DataParallel shares its model's hooks
            if ace.root is not model:
                ace.belong_to(model)
                watch(ace)
            if active != bool(ace.handles) or (active and not ace.verified):
                sync(ace, model)
            if ace.wants_batch():
                ace.batch = _kept(args, kwargs)
        _close_all(ace)  # of a forward that was interrupted (Ctrl-C)
        if active:
            forward = Forward(ace)
            for name in ace.from_model:
                forward.tapped[name] = ace.arguments[name].pick(args, kwargs)
            forward.divide()
            _forwards.open.append(forward)


@dataclass(eq=False)
class CloseHook:
    """Forward hook of the model, called on errors too: closes what `OpenHook` opened."""

    def __call__(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if _forwards.open and _forwards.open[-1].ace is model._modules[NAME]:
            forward = _forwards.open.pop()
            forward.close()
            if len(forward.fired) < len(forward.ace.sites):
                forward.ace.verified = False  # its module may have been replaced: look before the next forward


@dataclass(eq=False)
class TapHook:
    """Forward pre-hook of a submodule whose argument a branch elsewhere reads."""

    ace: Ace
    name: str

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        forward = _current(self.ace)
        if forward is not None:
            forward.tapped[self.name] = self.ace.arguments[self.name].pick(args, kwargs)
            forward.prepares.pop(self.name, None)  # of a call before


@dataclass(eq=False)
class SiteHook:
    """Forward hook of a site's module: adds ``gamma * branch`` to the output the site names."""

    ace: Ace
    site: str

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        if not self.ace.active():
            return None
        forward = _current(self.ace)
        if forward is None:
            if _forwards.open or self.ace.root is None:
                return None  # another model runs this module, which it shares or was given a copy of
            forward = Forward(self.ace)  # a submodule called on its own
        forward.fired.add(self.site)
        site = forward.ace.nodes[self.site]
        assert isinstance(site, Site)
        if site.name in forward.ace.together:
            return forward.added(output, site)
        if isinstance(site.reads, Tap) and site.reads.module is None:
            # Not cached: the module may be called several times in a forward, with other inputs.
            branch = forward.branch(site, forward.ace.arguments[site.name].pick(args, kwargs))
            forward.values[site.name] = branch
        else:
            branch = forward.value(site.name)
        return _added(output, site, forward.gammas[site.name], branch)


@dataclass(eq=False)
class RestoreHook:
    """Forward hook of the layer around sites whose branches leave their outputs in another order in memory."""

    ace: Ace
    site: str

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        forward = _current(self.ace)
        if forward is None or self.site not in forward.fired:
            return None
        return forward.ace.branch(self.site).restore(output)  # type: ignore[operator]


def _added(output: Any, site: Site, gamma: Tensor, branch: Tensor | Affine) -> Any:
    chosen = _chosen(output, site)
    if branch.shape != chosen.shape:
        raise AdapterError(
            f"site {site.name!r}: its branch gives shape {tuple(branch.shape)}, "
            f"expected {tuple(chosen.shape)} as {site.module} gives"
        )
    summed = branch.added_to(chosen, gamma) if isinstance(branch, Affine) else torch.addcmul(chosen, branch, gamma)
    return _with_chosen(output, site, summed)


def _chosen(output: Any, site: Site) -> Any:
    return output if site.output is None else part_of(output, str(site.output), f"output of {site.module}")


def _with_chosen(output: Any, site: Site, summed: Tensor) -> Any:
    if site.output is None:
        return summed
    return with_part(output, str(site.output), summed, f"output of {site.module}")


def _kept(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | Exception:
    """A copy, since the script may go on to write into its batch; or why there can be none."""
    try:
        return Call(clone(args), clone(kwargs))
    except Exception as error:
        return error


def _close_all(ace: Ace) -> None:
    for forward in [forward for forward in _forwards.open if forward.ace is ace]:
        _forwards.open.remove(forward)
        forward.close()


def install(ace: Ace, model: nn.Module) -> None:
    """Make ``ace`` a submodule of the model, with its hooks. Everything that could fail was checked before."""
    ace.train(model.training)
    model.add_module(NAME, ace)
    ace.belong_to(model)
    ace.permanent.append(model.register_forward_pre_hook(OpenHook(), with_kwargs=True))
    sync(ace, model)
    ace.verified = False  # a subclass's constructor may go on to replace submodules: the first forward looks again


def uninstall(ace: Ace, model: nn.Module) -> None:
    """Take out what `install` put in."""
    _remove(ace)
    _close_all(ace)
    for handle in ace.permanent:
        handle.remove()
    ace.permanent = []
    ace.forget()
    del model._modules[NAME]


def sync(ace: Ace, model: nn.Module) -> None:
    """Hooks on the sites exactly while the branches take part.

    A module with a hook is called the slow way by PyTorch, so evaluating f_eq without hooks costs what
    upstream costs. Submodules that were replaced since get their hooks here too.
    """
    if ace.active():
        if not _in_place(ace, model):
            _remove(ace)
            ace.handles = _added_hooks(ace, model)
        ace.verified = True
    else:
        _remove(ace)


def _in_place(ace: Ace, model: nn.Module) -> bool:
    """Every site and every tapped module carries this ace's hook, not one that came with a copied module."""
    return (
        bool(ace.handles)
        and all(
            any(isinstance(h, SiteHook) and h.ace is ace and h.site == site.name for h in hooks.values())
            for site in ace.sites
            for hooks in [_module(site, model)._forward_hooks]
        )
        and all(
            any(isinstance(h, TapHook) and h.ace is ace and h.name == name for h in hooks.values())
            for name, path in ace.from_others.items()
            for hooks in [model.get_submodule(path)._forward_pre_hooks]
        )
    )


def _added_hooks(ace: Ace, model: nn.Module) -> list[Any]:
    handles = [model.register_forward_hook(CloseHook(), always_call=True)]
    for name, path in ace.from_others.items():
        module = model.get_submodule(path)
        handles.append(module.register_forward_pre_hook(TapHook(ace, name), with_kwargs=True))
    for site in ace.sites:
        handles.append(_module(site, model).register_forward_hook(SiteHook(ace, site.name), with_kwargs=True))
    layers = {site.layer: site.name for site in reversed(ace.sites) if site.layer is not None}
    for path, name in layers.items():
        handles.append(model.get_submodule(path).register_forward_hook(RestoreHook(ace, name)))
    return handles


def _remove(ace: Ace) -> None:
    for handle in ace.handles:
        handle.remove()
    ace.handles = []
    ace.verified = False


def _module(site: Site, model: nn.Module) -> nn.Module:
    try:
        return model.get_submodule(site.module)
    except AttributeError:
        raise AttachError(
            f"site {site.name!r}: {site.module} is gone from {type(model).__name__}; attach after the model is complete"
        ) from None
