"""``model.ace``: gamma, the branches and the duals of one model, as one submodule."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..settings.config import Config
from ..contract.data import Node, Site, Tap
from .duals import Duals
from ..symmetry.measuring import Call
from .taps import Argument

NAME = "ace"
"""The attribute of the model, and so the prefix of ACE's keys in its state_dict."""


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
        taps = {node.name: node.reads.module for node in nodes if isinstance(node.reads, Tap)}
        self.from_model = tuple(name for name, module in taps.items() if module == "")
        self.from_others = {name: module for name, module in taps.items() if module}
        self.together = _together(nodes, branches)
        """Sites whose branches add themselves, with the first of those that read one and the same tensor."""
        self.gamma = nn.Parameter(torch.full((len(self.sites),), float(config.gamma_init), dtype=dtype, device=device))
        self.branches = nn.ModuleDict({key(name): branch for name, branch in branches.items()})
        self.duals = Duals(len(self.sites), config, dtype=dtype, device=device)
        about = {"format": 1, "adapter": adapter, "sites": [site.name for site in self.sites]}
        text = json.dumps(about).encode()
        # As floats: scripts that average checkpoints do so with every entry, and expect floats.
        self.register_buffer("manifest", torch.tensor(list(text), dtype=torch.float32, device=device))
        self.forced: bool | None = None
        """Branches on or off whatever the mode says; None leaves it to the mode."""
        self.in_eval = config.branches_in_eval
        self.permanent: list[Any] = []
        """Handles of the hooks that stay as long as the model is attached."""
        self.handles: list[Any] = []
        """Handles of the hooks that are there only while the branches take part."""
        self.batch: Call | Exception | None = None
        """The batch of the step under way, where the equivariance error is to be measured on it; or why it cannot."""
        self._root: weakref.ref[nn.Module] | None = None
        self.verified = False
        """Every site was seen to carry its hook since the last change."""

    @property
    def landed(self) -> bool:
        """gamma was set to 0 for good: the model is plain upstream from here on."""
        return self.duals.landed

    def active(self) -> bool:
        """Whether the branches take part in a forward now."""
        if self.forced is not None:
            return self.forced
        # In this order: plain evaluation in strict mode should cost nothing.
        return (self.training or self.in_eval) and (not self.landed or (self.training and _distributed()))

    def wants_batch(self) -> bool:
        """Whether the step that this forward is for ends with a measurement."""
        if not self.config.error_every or not self.training or self.landed or not self.gamma.requires_grad:
            return False
        return self.config.measures(self.duals.count + 1) and torch.is_grad_enabled()

    def branch(self, name: str) -> nn.Module:
        return self.branches[key(name)]

    @property
    def root(self) -> nn.Module | None:
        """The model, once it is known: at attach, and after a copy or a load at its first forward."""
        return None if self._root is None else self._root()

    def belong_to(self, model: nn.Module) -> None:
        self._root = weakref.ref(model)

    def forget(self) -> None:
        """The model is no longer this one's."""
        self._root = None
        self.forced = None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Ace:
        """``model.half()`` reaches the branches; gamma and the duals take steps too small for half precision."""

        def precise(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            narrow = moved.is_floating_point() and moved.dtype.itemsize < 4
            return tensor.to(moved.device) if narrow else moved

        self.branches._apply(fn)  # type: ignore[no-untyped-call]
        self.duals._apply(precise)  # type: ignore[no-untyped-call]
        super()._apply(precise, recurse=False)  # type: ignore[no-untyped-call]
        return self

    def train(self, mode: bool = True) -> Ace:
        super().train(mode)
        if self.root is not None:
            from .forwards import sync  # a cycle: the hooks are defined in terms of this class

            sync(self, self.root)
        return self

    def __getstate__(self) -> dict[str, Any]:
        # A copy belongs to another model, and a weak reference cannot be pickled.
        # The override is of the block that made it, not of a copy taken inside.
        return {**self.__dict__, "_root": None, "forced": None, "verified": False, "batch": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        from .steps import watch  # a cycle: steps drives what is defined here

        watch(self)

    def extra_repr(self) -> str:
        return f"adapter={self.adapter!r}, mode={self.config.mode!r}, sites={len(self.sites)}"


def _together(nodes: Sequence[Node], branches: Mapping[str, nn.Module]) -> dict[str, str]:
    """A branch that adds itself has a method ``prepare(read)``, whose result serves all that read the same, and
    ``add_to(output, gamma, prepared)``, which may write to the output."""
    first: dict[Any, str] = {}
    found = {}
    for node in nodes:
        kind: Any = type(branches[node.name])
        if isinstance(node.reads, Tap) and node.reads.module is not None and hasattr(kind, "add_to"):
            found[node.name] = first.setdefault((node.reads, kind.prepare), node.name)
    return found


def _distributed() -> bool:
    """DistributedDataParallel wants every parameter in every backward: branches of landed sites stay, times 0."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def key(name: str) -> str:
    """A site's name as a key of the ModuleDict, which allows no dots."""
    return name.replace(".", "_")


def find(model: nn.Module) -> Ace | None:
    """The model's ACE, if it is attached."""
    ace = model._modules.get(NAME) if isinstance(model, nn.Module) else None
    return ace if isinstance(ace, Ace) else None


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside DataParallel, DDP, AveragedModel or torch.compile, where it is the one that is attached."""
    inner = model
    while find(inner) is None:
        within = getattr(inner, "_orig_mod", getattr(inner, "module", None))
        if not isinstance(within, nn.Module):
            return model
        inner = within
    return inner
