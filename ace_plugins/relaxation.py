"""``model.ace``: gamma, the branches and the duals of one model, and the forward hooks that add them.

A forward of an attached model is upstream's own. The model's pre-hook opens a `Forward`, tap hooks note the
tensors that branches read elsewhere, and each site's hook adds ``gamma * branch`` to its module's output.
Hooks are picklable objects. A forward is found through a thread-local stack rather than through the hook,
because replicas of a model (nn.DataParallel) share hook objects but not parameters.
"""

from __future__ import annotations

import inspect
import json
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .config import Config
from .contract import Node, Site, Stem, Tap
from .duals import Duals
from .errors import AdapterError, AttachError

NAME = "ace"
"""The attribute of the model, and so the prefix of ACE's keys in its state_dict."""


@dataclass(frozen=True)
class Argument:
    """A tap resolved against the forward it listens to: position, name and attributes to walk."""

    index: int
    name: str
    attributes: tuple[str, ...] = ()

    def pick(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        value = args[self.index] if 0 <= self.index < len(args) else kwargs[self.name]
        for attribute in self.attributes:
            value = getattr(value, attribute)
        return value


def resolve(tap: Tap, module: nn.Module, where: str) -> Argument:
    """The argument a tap means, checked against the signature of the module's forward."""
    parameters = inspect.signature(module.forward).parameters
    names = list(parameters)
    first, *attributes = [tap.argument] if isinstance(tap.argument, int) else tap.argument.split(".")
    kinds = {parameter.kind for parameter in parameters.values()}
    if isinstance(first, int):
        if first < len(names):
            return Argument(first, names[first])
        if inspect.Parameter.VAR_POSITIONAL in kinds:
            return Argument(first, "")
    elif first in names:
        return Argument(names.index(first), first, tuple(map(str, attributes)))
    elif inspect.Parameter.VAR_KEYWORD in kinds:
        return Argument(-1, first, tuple(map(str, attributes)))
    raise AdapterError(f"{where} reads argument {first!r} of a forward that takes ({', '.join(names)})")


class Ace(nn.Module):
    """Everything ACE adds to one model. Registered as the submodule ``ace``, so state goes where the model goes."""

    manifest: Tensor

    def __init__(
        self,
        adapter: str,
        config: Config,
        nodes: Sequence[Node],
        arguments: Mapping[str, Argument],
        branches: Mapping[str, nn.Module],
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.adapter = adapter
        self.config = config
        self.nodes = {node.name: node for node in nodes}
        self.sites = tuple(node for node in nodes if isinstance(node, Site))
        self.arguments = dict(arguments)
        self.gamma = nn.Parameter(torch.full((len(self.sites),), float(config.gamma_init), dtype=dtype, device=device))
        self.branches = nn.ModuleDict({key(name): branch for name, branch in branches.items()})
        self.duals = Duals(len(self.sites), config, dtype=dtype, device=device)
        about = {"format": 1, "adapter": adapter, "sites": [site.name for site in self.sites]}
        text = json.dumps(about).encode()
        self.register_buffer("manifest", torch.tensor(list(text), dtype=torch.uint8, device=device))
        self.forced: bool | None = None
        """Branches on or off whatever the mode says; None leaves it to the mode."""
        self.handles: list[Any] = []
        self._root: weakref.ref[nn.Module] | None = None
        self._verified = False

    @property
    def landed(self) -> bool:
        """gamma was set to 0 for good: the model is plain upstream from here on."""
        return 0 < self.config.land_at <= self.duals.count

    def active(self) -> bool:
        """Whether the branches take part in a forward now."""
        if self.forced is not None:
            return self.forced
        return (self.training or self.config.branches_in_eval) and not self.landed

    def branch(self, name: str) -> nn.Module:
        return self.branches[key(name)]

    @property
    def root(self) -> nn.Module | None:
        """The model, once it is known: at attach, and after a copy or a load at its first forward."""
        return None if self._root is None else self._root()

    def belong_to(self, model: nn.Module) -> None:
        self._root = weakref.ref(model)

    def verify(self, model: nn.Module) -> None:
        """Every site still carries its hook: a submodule replaced after attach would train without it."""
        for site in self.sites:
            hooks = model.get_submodule(site.module)._forward_hooks.values()
            if not any(isinstance(hook, SiteHook) and hook.site == site.name for hook in hooks):
                raise AttachError(
                    f"site {site.name!r}: {site.module} was replaced after attach, so its branch is never added; "
                    "attach after the model is complete"
                )
        self._verified = True

    def __getstate__(self) -> dict[str, Any]:
        # A copy belongs to another model, and a weak reference cannot be pickled.
        return {**self.__dict__, "_root": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        from .steps import watch

        watch(self)

    def extra_repr(self) -> str:
        return f"adapter={self.adapter!r}, mode={self.config.mode!r}, sites={len(self.sites)}"


def key(name: str) -> str:
    """A site's name as a key of the ModuleDict, which allows no dots."""
    return name.replace(".", "_")


class Forward:
    """One forward under way: the tensors tapped so far and the branch values computed so far."""

    __slots__ = ("ace", "gammas", "tapped", "values")

    def __init__(self, ace: Ace) -> None:
        self.ace = ace
        self.gammas = dict(zip((site.name for site in ace.sites), ace.gamma.unbind(0), strict=True))
        self.tapped: dict[str, Any] = {}
        self.values: dict[str, Tensor] = {}

    def value(self, name: str) -> Tensor:
        """The output of a stem or of a site's branch, computed once in a forward."""
        if name not in self.values:
            node = self.ace.nodes[name]
            if isinstance(node.reads, str):
                read = self.value(node.reads)
            elif name in self.tapped:
                read = self.tapped[name]
            else:
                where = f"the input of {node.reads.module!r}" if node.reads.module else "the model's own input"
                raise AttachError(
                    f"{name!r} reads {where}, which this forward has not seen; "
                    "call the model itself rather than one of its submodules"
                )
            self.values[name] = self.ace.branch(name)(read)
        return self.values[name]


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
    """Forward pre-hook of the model: opens a `Forward` and notes what is read from the model's own input."""

    names: tuple[str, ...]

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ace = model._modules[NAME]
        assert isinstance(ace, Ace)
        if ace.root is not model:
            ace.belong_to(model)
            from .steps import watch

            watch(ace)
        if not ace.active():
            return
        if not ace._verified:
            ace.verify(model)
        forward = Forward(ace)
        for name in self.names:
            forward.tapped[name] = ace.arguments[name].pick(args, kwargs)
        _forwards.open.append(forward)


@dataclass(eq=False)
class CloseHook:
    """Forward hook of the model, called on errors too: closes what `OpenHook` opened."""

    def __call__(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if _forwards.open and _forwards.open[-1].ace is model._modules[NAME]:
            _forwards.open.pop()


@dataclass(eq=False)
class TapHook:
    """Forward pre-hook of a submodule whose argument a branch elsewhere reads."""

    ace: Ace
    name: str

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        forward = _current(self.ace)
        if forward is not None:
            forward.tapped[self.name] = self.ace.arguments[self.name].pick(args, kwargs)


@dataclass(eq=False)
class SiteHook:
    """Forward hook of a site's module: adds ``gamma * branch`` to the output the site names."""

    ace: Ace
    site: str

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        if not self.ace.active():
            return None
        # A submodule called on its own has no forward of the model around it.
        forward = _current(self.ace) or Forward(self.ace)
        site = forward.ace.nodes[self.site]
        assert isinstance(site, Site)
        if isinstance(site.reads, Tap) and site.reads.module is None:
            # Not cached: the module may be called several times in a forward, with other inputs.
            branch = forward.ace.branch(site.name)(forward.ace.arguments[site.name].pick(args, kwargs))
            forward.values[site.name] = branch
        else:
            branch = forward.value(site.name)
        return _added(output, site, forward.gammas[site.name], branch)


def _added(output: Any, site: Site, gamma: Tensor, branch: Tensor) -> Any:
    chosen = output if site.output is None else output[site.output]
    if branch.shape != chosen.shape:
        raise AdapterError(
            f"site {site.name!r}: its branch gives shape {tuple(branch.shape)}, "
            f"expected {tuple(chosen.shape)} as {site.module} gives"
        )
    summed = chosen + gamma * branch
    if site.output is None:
        return summed
    if isinstance(output, Mapping):
        changed = dict(output)
        changed[str(site.output)] = summed
        return type(output)(changed)  # type: ignore[call-arg]
    items = list(output)
    items[site.output] = summed  # type: ignore[index]
    return type(output)(*items) if hasattr(output, "_fields") else type(output)(items)


def install(ace: Ace, model: nn.Module) -> None:
    """Register the submodule and every hook. Nothing here can fail: everything was checked before."""
    ace.train(model.training)
    model.add_module(NAME, ace)
    ace.belong_to(model)
    taps = [node for node in ace.nodes.values() if isinstance(node.reads, Tap) and node.reads.module is not None]
    own = tuple(node.name for node in taps if isinstance(node.reads, Tap) and node.reads.module == "")
    handles = [
        model.register_forward_pre_hook(OpenHook(own), with_kwargs=True),
        model.register_forward_hook(CloseHook(), always_call=True),
    ]
    for node in taps:
        if node.name not in own and isinstance(node.reads, Tap) and node.reads.module is not None:
            hook = TapHook(ace, node.name)
            handles.append(model.get_submodule(node.reads.module).register_forward_pre_hook(hook, with_kwargs=True))
    for site in ace.sites:
        handles.append(
            model.get_submodule(site.module).register_forward_hook(SiteHook(ace, site.name), with_kwargs=True)
        )
    ace.handles = handles


def uninstall(ace: Ace, model: nn.Module) -> None:
    """Take out what `install` put in."""
    for handle in ace.handles:
        handle.remove()
    ace.handles = []
    del model._modules[NAME]


def find(model: nn.Module) -> Ace | None:
    """The model's ACE, if it is attached."""
    ace = model._modules.get(NAME) if isinstance(model, nn.Module) else None
    return ace if isinstance(ace, Ace) else None


__all__ = ["NAME", "Ace", "Argument", "Forward", "Stem", "find", "install", "key", "resolve", "uninstall"]
