"""``model.ace``: gamma, the branches and the duals of one model, as one submodule."""

from __future__ import annotations

import json
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from ..contract.sites import AddsItself, Node, Site
from ..contract.upstreams import Script
from ..errors import AceWarning
from ..settings.config import Config
from ..symmetry.actions import GroupAction
from ..symmetry.groups import Element
from ..symmetry.measure import Call
from ..symmetry.parts import Argument
from .branches import Norm
from .budget import Budget
from .distributed import is_distributed
from .duals import Duals
from .holdout import is_separable
from .loop import Session
from .spectral_norm import find_bounded, settle

if TYPE_CHECKING:
    from .forward import ModelHooks

NAME = "ace"  # name of the model's attribute that holds its `Ace`, and thus the prefix of ACE's keys in the state_dict


class Live:
    """The attached models of this process, including copied and unpickled models."""

    def __init__(self) -> None:
        self.aces: weakref.WeakSet[Ace] = weakref.WeakSet()
        self._lock = threading.RLock()  # garbage collection may call `discard` at any time, also inside this class
        self._parameters: weakref.WeakKeyDictionary[Ace, frozenset[int]] = weakref.WeakKeyDictionary()
        self.changes = 0  # number of times a model was added or removed. When it grows, optimizers are searched again.
        self.changed: Callable[[], None] = lambda: None  # called after each change: installs or undoes patches

    def parameters(self, ace: Ace) -> frozenset[int]:
        """Return the identities (``id``) of the model's parameters, including ACE's, when it was added."""
        if ace not in self._parameters:
            self._parameters[ace] = frozenset(map(id, (ace.root or ace).parameters()))
        return self._parameters[ace]

    def add(self, ace: Ace) -> None:
        self._parameters.pop(ace, None)
        # An Ace may outlive its model, since an optimizer holds its parameters.
        weakref.finalize(ace.root or ace, self.discard).atexit = False
        self._replace(ace, add=True)

    def discard(self, removed: Ace | None = None) -> None:
        """Discard ``removed``, and all models that were garbage collected."""
        self._replace(removed)

    def _replace(self, changed: Ace | None, *, add: bool = False) -> None:
        # A new set, because other threads, and code that garbage collection interrupts, may iterate over the old one.
        with self._lock:
            known = [
                ace for ace in list(self.aces) if ace is not changed and (ace._root is None or ace.root is not None)
            ]
            self.aces = weakref.WeakSet([*known, changed] if add and changed is not None else known)
            self.changes += 1
            self.changed()


LIVE = Live()


@dataclass
class PassState:
    """State of one model's forward passes in this process; neither saved nor copied."""

    forced: bool | None = None  # True or False inside `use_branches`; None elsewhere: the settings decide
    evaluates: bool = False  # True if the model's last arguments mark an evaluation (`Upstream.evaluating`)
    count: int = 0  # number of random frames drawn since the last step of gamma
    frames: MutableMapping[Tensor, Element | None] = field(default_factory=WeakIdKeyDictionary)
    """Mapping from the first tensor of each forward pass since the last step to its frame; None: without a frame."""
    last: Element | None = None  # the last one of these frames
    differ: bool | None = None  # True if these frames are different; None before the first forward pass
    warned: bool = False  # True once the user was warned that whole batches are held out
    batch: Call | Exception | None = None  # copy of the batch to measure the error on, or the exception in copying

    def forget_frames(self) -> None:
        """Forget the frames of a step that has ended."""
        self.frames.clear()
        self.count, self.last, self.differ = 0, None, None


class Ace(nn.Module):
    """Everything ACE adds to one model. As a submodule, it is part of ``state_dict``, ``.to()``, copies and pickles."""

    manifest: Tensor
    repaired: int = 0  # number of times that hooks were registered again because a submodule had been replaced

    def __init__(
        self,
        adapter: str,
        config: Config,
        nodes: Sequence[Node],
        arguments: Mapping[str, Argument],
        branches: Mapping[str, nn.Module],
        *,
        script: Script | None,
        action: GroupAction | None,
        evaluating: Sequence[tuple[Argument, Any]],
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.adapter = adapter
        self.config = config
        self.nodes = {node.name: node for node in nodes}
        self.sites = tuple(node for node in nodes if isinstance(node, Site))
        self.arguments = dict(arguments)
        self.model_taps = tuple(name for name, argument in arguments.items() if not argument.module)
        self.module_taps = {name: argument.module for name, argument in arguments.items() if argument.module}
        """Sites and stems that read an argument of a submodule, with the path of this submodule."""
        adding = {name: branch for name, branch in branches.items() if isinstance(branch, AddsItself)}
        inputs = {n: (arguments[n], type(branch).prepare) for n, branch in adding.items() if n in self.module_taps}
        first = {read: name for name, read in reversed(inputs.items())}
        # Mapping from each site whose branch is an `AddsItself` to the first such site with the same input.
        self.prepared_by = {name: first[read] for name, read in inputs.items()}
        self.gamma = nn.Parameter(torch.full((len(self.sites),), config.gamma_start, dtype=dtype))
        self.branches = nn.ModuleDict({key(name): branch for name, branch in branches.items()})
        self.bounds = bool(find_bounded(self.branches))
        self.duals = Duals(len(self.sites), config, dtype=dtype, device=self.gamma.device)
        self.budget = Budget(config, script)
        about = json.dumps({"format": 1, "adapter": adapter, "sites": [site.name for site in self.sites]})
        # Stored as floats, because scripts that average checkpoints average every entry.
        self.register_buffer("manifest", torch.tensor(list(about.encode()), dtype=torch.float32))
        self.action = action if config.turns else None  # for random frames
        self.samples = action  # finds the samples of a batch; None if the adapter does not define it
        # Names of the sites and stems whose branch can be trained by some of its rows; see `holdout`.
        self.separable = frozenset(name for name, branch in branches.items() if is_separable(branch))
        self.deploys_kept = config.mode == "auto" and config.eval_branches == "auto"
        self.evaluating = evaluating  # arguments with their values in evaluation, if upstream does not call eval()
        self.passes = PassState()
        self.session = Session()
        self.freed: list[nn.Parameter] = []  # parameters that only landed sites use; training leaves them out
        self.hooks: ModelHooks | None = None
        self._root: weakref.ref[nn.Module] | None = None
        self.register_load_state_dict_post_hook(_finish_load)  # type: ignore[no-untyped-call]

    def forward(self, *args: Any) -> Any:
        """Return the input unchanged, because an ``nn.Sequential`` calls all its submodules, including ``ace``."""
        return args[0] if len(args) == 1 else args

    @property
    def landed(self) -> bool:
        """True if all sites have landed. The model then computes exactly what plain upstream does."""
        return self.duals.landed

    def read_mode(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Detect from the model's arguments whether it is evaluated, and pass changes on to the budget."""
        marks = [argument.pick(args, kwargs) == value for argument, value in self.evaluating]
        evaluates = bool(marks) and all(marks)
        if evaluates != self.passes.evaluates:
            self.passes.evaluates = evaluates
            self.budget.note_mode(self.learning, self.duals.count)

    @property
    def learning(self) -> bool:
        """True if the model is in training mode, according to its flag and to its last arguments."""
        return self.training and not self.passes.evaluates

    def active(self) -> bool:
        """Return whether a forward pass made now would add the branches."""
        assert self.repaired >= 0  # torch.compile recompiles if this number changes, but not if hooks change
        forced = self.passes.forced
        return forced if forced is not None else (self.learning or self.in_eval) and not self.landed

    @property
    def in_eval(self) -> bool:
        """True if ``model.eval()`` uses branches: in mode auto once a site was kept, otherwise by the settings."""
        return bool(self.duals.evidence.kept_sites) if self.deploys_kept else self.config.branches_in_eval

    @property
    def allowed(self) -> frozenset[int] | None:
        """Indices of the sites that a forward pass may use: in evaluation those that mode auto kept; None: all."""
        limited = self.deploys_kept and not self.learning and self.passes.forced is None
        return self.duals.evidence.kept_sites if limited else None

    def live(self) -> tuple[Site, ...]:
        """Return the sites at which a forward pass made now would add branches."""
        if not self.active():
            return ()
        allowed = range(len(self.sites)) if self.allowed is None else self.allowed
        landed = self.duals.landed_sites if self.passes.forced is None else ()
        return tuple(site for number, site in enumerate(self.sites) if number in allowed and number not in landed)

    def needed_by(self, sites: Iterable[Site]) -> set[str]:
        """Return the names of these sites, and of all sites and stems that they use."""
        found = {site.name for site in sites}
        for node in reversed(self.nodes.values()):  # a node uses only earlier ones
            if node.name in found:
                found |= {used for used in (node.reads, getattr(node, "through", None)) if isinstance(used, str)}
        return found

    def start(self) -> None:
        """Restore gamma before the first step if the script has initialised all parameters of the model itself."""
        self.session.started = True
        start = torch.full_like(self.gamma, self.config.gamma_start)
        if self.duals.count or self.config.mode == "scheduled" or torch.allclose(self.gamma, start):
            return
        with torch.no_grad():
            self.gamma.copy_(start)
        warnings.warn(
            f"the script has changed gamma (model.{NAME}.gamma) before the first step, perhaps by initialising all of "
            f"model.parameters(); gamma is {self.config.gamma_start:g} again; set gamma_init to start elsewhere",
            AceWarning,
            stacklevel=2,
        )

    def free_landed(self) -> None:
        """Freeze the parameters that only landed sites use, and list them in ``freed``."""
        landed = self.duals.landed_sites
        kept = self.needed_by(site for number, site in enumerate(self.sites) if number not in landed)
        unused = [self.branch(name) for name in self.nodes.keys() - kept] if landed else []
        self.freed = [p for branch in unused for p in branch.parameters() if p.requires_grad]
        if self.landed and self.gamma.requires_grad:
            self.freed.append(self.gamma)
        self.forget_gradients()

    def give_gradients(self) -> None:
        """Set missing gradients of parameters of landed sites to 0, for scripts that loop over all parameters."""
        zeros = self.session.zeros
        for p in self.freed if self.training else ():
            if p.grad is None:
                zero, changes = zeros.get(p, (None, 0))
                if zero is None or zero._version != changes or (zero.device, zero.dtype) != (p.device, p.dtype):
                    zero = torch.zeros_like(p)
                    zeros[p] = zero, zero._version
                p.grad = zero

    @property
    def needs_touch(self) -> bool:
        """True if freed parameters must be in the autograd graph.

        DistributedDataParallel expects them there, and so do scripts that call ``torch.autograd.grad`` with all
        parameters. Such a script calls no ``backward`` between steps. Before the first step this is unknown.
        """
        return bool(self.freed) and self.training and (is_distributed() or self.session.observed.loss is None)

    def forget_gradients(self) -> None:
        """Remove the gradients of freed parameters, so that optimizers skip these."""
        for parameter in self.freed:
            parameter.grad = None

    def branch(self, name: str) -> nn.Module:
        return self.branches[key(name)]

    @property
    def root(self) -> nn.Module | None:
        """The attached model; None while it is unknown: after copying or unpickling, until the first forward pass."""
        return None if self._root is None else self._root()

    def belong_to(self, model: nn.Module | None) -> None:
        self._root = None if model is None else weakref.ref(model)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Ace:
        """Convert to another dtype or device; gamma and the duals keep at least single precision."""

        def precise(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            narrow = moved.is_floating_point() and moved.dtype.itemsize < 4
            return tensor.to(moved.device) if narrow else moved

        self.branches._apply(fn)  # type: ignore[no-untyped-call]
        self.duals._apply(precise)  # type: ignore[no-untyped-call]
        super()._apply(precise, recurse=False)  # type: ignore[no-untyped-call]
        self._settle()
        return self

    def train(self, mode: bool = True) -> Ace:
        super().train(mode)
        self._settle()
        self.budget.note_mode(mode, self.duals.count)
        self.sync()
        return self

    def set_statistics(self) -> None:
        """Choose the statistics that batch normalisation in branches uses in training.

        In training, a kept branch uses constant statistics, as in evaluation: those of the first training batch after
        the decision. Running averages would lag behind the weights; this error grows along a chain of branches.
        """
        kept = self.needed_by(self.sites[number] for number in self.duals.evidence.kept_sites)
        settled = self.needed_by(self.sites[number] for number in self.duals.evidence.settled_sites)
        for name in self.nodes:
            chosen = "constant" if name in settled else "next" if name in kept else "batch"
            for module in self.branch(name).modules():
                if isinstance(module, Norm):
                    module.statistics = chosen

    def _settle(self) -> None:
        """Update the directions of bounded maps before evaluation, since compiled forward passes do not update them."""
        if not self.training:
            settle(find_bounded(self.branches))

    def sync(self) -> None:
        """Register the forward hooks that are needed now, and remove the others."""
        self.set_statistics()
        if self.hooks is not None:
            self.hooks.sync(self)

    def __getstate__(self) -> dict[str, Any]:
        # A copy belongs to another model, and a weak reference cannot be pickled.
        return {**self.__dict__, "_root": None, "passes": None, "session": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({**state, "passes": PassState(), "session": Session()})  # type: ignore[no-untyped-call]
        LIVE.add(self)

    def extra_repr(self) -> str:
        return f"adapter={self.adapter!r}, mode={self.config.mode!r}, sites={len(self.sites)}"


def _finish_load(ace: nn.Module, keys: Any) -> None:
    """Set the gamma of sites that have landed in a loaded checkpoint to 0, and update the hooks."""
    assert isinstance(ace, Ace)
    landed = sorted(ace.duals.landed_sites)
    if landed and not ace.gamma.is_meta:
        with torch.no_grad():
            ace.gamma[landed] = 0.0
    ace.sync()


def key(name: str) -> str:
    """Return a site's name with dots replaced, since keys of a ModuleDict must not contain dots."""
    return name.replace(".", "_")


def find(model: nn.Module) -> Ace | None:
    """Return the model's `Ace`; None if the model is not attached."""
    # In a scripted module, _modules is not a dict and has no get().
    ace = model._modules[NAME] if isinstance(model, nn.Module) and NAME in model._modules else None
    return ace if isinstance(ace, Ace) else None


def unwrap(model: nn.Module) -> nn.Module:
    """Return the attached model inside wrappers (DataParallel, DDP, AveragedModel, torch.compile), else ``model``."""
    inner = model
    while find(inner) is None:
        within = getattr(inner, "_orig_mod", getattr(inner, "module", None))
        if not isinstance(within, nn.Module):
            return model
        inner = within
    return inner
