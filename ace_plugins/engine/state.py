"""The training forwards of one step, counted, so that each has a random frame of its own that can be drawn again.

Arguments of forwards: which one a branch reads, and which of them say that nothing is trained.

``model.ace``: gamma, the branches and the duals of one model, as one submodule.
"""

from __future__ import annotations

import inspect
import json
import random
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..contract.sites import AddsItself, Node, Site, Tap
from ..contract.upstreams import Script
from ..errors import AdapterError
from ..settings.config import Config
from ..symmetry.actions import GroupAction
from ..symmetry.groups import Element
from ..symmetry.measure import Call
from ..symmetry.parts import part_of
from .budget import Budget
from .distributed import is_distributed
from .duals import BEYOND_HALF, Duals
from .session import Session
from .spectral_norm import find_bounded, settle


class Turns:
    """The training forwards since the last optimizer step. Nothing of it outlives a step, so none of it is saved."""

    def __init__(self) -> None:
        self.forwards = 0
        self.frame: Element | None = None
        """The frame of the forward under way."""

    def seed(self, count: int, salt: int) -> int:
        """A seed for one more forward of this step, the same whenever the run is made again.

        The script's own random stream is left alone.
        """
        self.forwards += 1
        return random.Random(f"{torch.initial_seed()} {count} {self.forwards} {salt}").getrandbits(63)


@dataclass(frozen=True)
class Argument:
    """A tap resolved against the forward it listens to: position, name and attributes to walk."""

    index: int
    name: str
    attributes: tuple[str, ...] = ()

    def pick(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        value = args[self.index] if 0 <= self.index < len(args) else kwargs[self.name]
        for attribute in self.attributes:
            value = part_of(value, attribute, f"argument {self.name!r}")
        return value


@dataclass(frozen=True)
class Condition:
    """An argument of a forward that has a certain value, because the call says so or by default."""

    argument: Argument
    default: Any
    value: Any

    def holds(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        given = self.argument.index < len(args) or self.argument.name in kwargs
        return bool((self.argument.pick(args, kwargs) if given else self.default) == self.value)


def conditions(wanted: Mapping[str, Any], module: nn.Module) -> tuple[Condition, ...]:
    """What these values of arguments mean for the module's forward; nothing if it does not have all of them."""
    parameters = inspect.signature(module.forward).parameters
    if not wanted.keys() <= parameters.keys():
        return ()
    places = {name: Argument(index, name) for index, name in enumerate(parameters)}
    return tuple(Condition(places[name], parameters[name].default, value) for name, value in wanted.items())


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


NAME = "ace"
"""The attribute of the model, and so the prefix of ACE's keys in its state_dict."""


class Live:
    """The attached models of this process. A copied or unpickled one joins by itself."""

    def __init__(self) -> None:
        self.aces: weakref.WeakSet[Ace] = weakref.WeakSet()
        self._parameters: weakref.WeakKeyDictionary[Ace, frozenset[int]] = weakref.WeakKeyDictionary()
        self.changes = 0
        """Counts changes, so that every optimizer looks again at what it owns."""
        self.began: Callable[[], None] = lambda: None
        """Called when a model joins: the optimizer hooks are installed with the first one."""

    def parameters(self, ace: Ace) -> frozenset[int]:
        """The identities of the model's parameters when they were last looked at, ACE's among them."""
        if ace not in self._parameters:
            self._parameters[ace] = frozenset(map(id, (ace.root or ace).parameters()))
        return self._parameters[ace]

    def add(self, ace: Ace) -> None:
        self._parameters.pop(ace, None)
        self.aces.add(ace)
        self.changes += 1
        self.began()

    def discard(self, ace: Ace) -> None:
        self.aces.discard(ace)
        self.changes += 1


LIVE = Live()


class Hooks(Protocol):
    """The forward hooks of one attached model."""

    verified: bool

    def sync(self, ace: Ace) -> None:
        """Hooks on the sites exactly while the branches take part."""


class Ace(nn.Module):
    """Everything ACE adds to one model. Registered as the submodule ``ace``, so state goes where the model goes."""

    manifest: Tensor
    repaired: int = 0
    """How often hooks were missing where they should have been: a submodule was replaced."""

    def __init__(
        self,
        adapter: str,
        config: Config,
        nodes: Sequence[Node],
        arguments: Mapping[str, Argument],
        branches: Mapping[str, nn.Module],
        *,
        script: Script | None = None,
        action: GroupAction | None = None,
        evaluating: tuple[Condition, ...] = (),
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.adapter = adapter
        self.config = config
        self.nodes = {node.name: node for node in nodes}
        self.sites = tuple(node for node in nodes if isinstance(node, Site))
        self.arguments = dict(arguments)
        taps = {node.name: _tapped(node, node.reads) for node in nodes if isinstance(node.reads, Tap)}
        self.model_taps = tuple(name for name, module in taps.items() if not module)
        """Sites and stems that read an argument of the model itself."""
        self.module_taps = {name: module for name, module in taps.items() if module}
        """Site or stem -> the submodule whose argument it reads."""
        self.prepared_by = _prepared_by(nodes, branches)
        """Site whose branch adds itself -> the site whose prepared input it reuses."""
        self.gamma = nn.Parameter(torch.full((len(self.sites),), config.gamma_start, dtype=dtype, device=device))
        self.branches = nn.ModuleDict({key(name): branch for name, branch in branches.items()})
        self.bounds = bool(find_bounded(self.branches))
        """Whether some of the branches' maps are bounded."""
        self.duals = Duals(len(self.sites), config, dtype=dtype, device=device)
        self.budget = Budget(config, script)
        about = {"format": 1, "adapter": adapter, "sites": [site.name for site in self.sites]}
        text = json.dumps(about).encode()
        # As floats: scripts that average checkpoints do so with every entry, and expect floats.
        self.register_buffer("manifest", torch.tensor(list(text), dtype=torch.float32, device=device))
        self.in_eval = config.branches_in_eval
        self.forced: bool | None = None
        """Branches on or off whatever the mode says; None leaves it to the mode."""
        self.action = action
        """How the group acts on the model, where training forwards are turned into random frames."""
        self.evaluating = evaluating
        """What a forward's arguments say where upstream does not call ``model.eval()``; nothing where it does."""
        self.evaluates = False
        """The last forward was told by its arguments that nothing is trained."""
        self.turns = Turns()
        self.session = Session()
        """Steps and ranks in this process."""
        self.freed: list[nn.Parameter] = []
        """Parameters that only landed sites have: no forward reads them and no optimizer moves them."""
        self.hooks: Hooks | None = None
        self.batch: Call | Exception | None = None
        """The batch of the step under way, where the equivariance error is due; or why it could not be kept."""
        self._root: weakref.ref[nn.Module] | None = None
        self.register_load_state_dict_post_hook(_loaded)  # type: ignore[no-untyped-call]

    def forward(self, *args: Any) -> Any:
        """What comes in. In a model that is an ``nn.Sequential`` every submodule is a step, so this one is too."""
        return args[0] if len(args) == 1 else args

    @property
    def landed(self) -> bool:
        """gamma was set to 0 for good: the model is plain upstream from here on."""
        return self.duals.landed

    def look_at(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """A forward begins with these arguments. Where they say whether it trains, that is like ``model.train()``."""
        evaluates = bool(self.evaluating) and all(each.holds(args, kwargs) for each in self.evaluating)
        if evaluates != self.evaluates:
            self.evaluates = evaluates
            self.budget.switched(self.learning, self.duals.count)

    @property
    def learning(self) -> bool:
        """Whether the model is in training, by its flag and by what its last forward was told."""
        return self.training and not self.evaluates

    def active(self) -> bool:
        """Whether the branches take part in a forward now."""
        assert self.repaired >= 0  # compilers do not watch hooks; they watch this number
        if self.forced is not None:
            return self.forced
        return (self.learning or self.in_eval) and not self.landed

    def trains(self) -> bool:
        """Whether the forward that begins now is one of training."""
        return self.learning and self.forced is None and torch.is_grad_enabled()

    def live(self) -> tuple[Site, ...]:
        """The sites whose branches take part in a forward now."""
        if not self.active():
            return ()
        landed = self.duals.landed_sites if self.forced is None else ()
        return tuple(site for number, site in enumerate(self.sites) if number not in landed)

    def made_of(self, sites: Iterable[Site]) -> set[str]:
        """The names of sites and stems that these sites are made of: a chain goes on through those that have landed."""
        found: set[str] = set()
        ahead = [site.name for site in sites]
        while ahead:
            name = ahead.pop()
            if name not in found:
                found.add(name)
                node = self.nodes[name]
                through = node.through if isinstance(node, Site) else None
                ahead += [each for each in (node.reads, through) if isinstance(each, str)]
        return found

    def touches(self) -> bool:
        """Whether freed parameters must show up in the backward all the same, as DistributedDataParallel wants it."""
        return bool(self.freed) and self.training and is_distributed()

    def free(self) -> None:
        """Take the parameters that only landed sites have out of training."""
        for parameter in self.freed:
            parameter.requires_grad_(True)
        self.freed = []
        landed = self.duals.landed_sites
        if not landed:
            return
        kept = self.made_of(site for number, site in enumerate(self.sites) if number not in landed)
        self.freed = [p for name in self.nodes.keys() - kept for p in self.branch(name).parameters() if p.requires_grad]
        if self.landed and self.gamma.requires_grad:
            self.freed.append(self.gamma)
        self.forget_gradients()
        if not is_distributed():  # there the set of parameters is agreed upon between processes, for good
            for parameter in self.freed:
                parameter.requires_grad_(False)

    def forget_gradients(self) -> None:
        """An optimizer passes over parameters without a gradient. DistributedDataParallel gives all of them one."""
        for parameter in self.freed:
            parameter.grad = None

    def wants_batch(self) -> bool:
        """Whether the step that this forward is for ends with a measurement."""
        if not self.config.error_every or not self.learning or self.landed or not self.gamma.requires_grad:
            return False
        return self.config.measures(self.duals.count + 1) and torch.is_grad_enabled()

    def branch(self, name: str) -> nn.Module:
        return self.branches[key(name)]

    @property
    def root(self) -> nn.Module | None:
        """The model, once it is known: at attach, and after a copy or a load at its first forward."""
        return None if self._root is None else self._root()

    def belong_to(self, model: nn.Module | None) -> None:
        self._root = None if model is None else weakref.ref(model)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Ace:
        """``model.half()`` reaches the branches; gamma and the duals take steps too small for half precision."""

        def precise(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            narrow = moved.is_floating_point() and moved.dtype.itemsize < 4
            return tensor.to(moved.device) if narrow else moved

        self.branches._apply(fn)  # type: ignore[no-untyped-call]
        self.duals._apply(precise)  # type: ignore[no-untyped-call]
        super()._apply(precise, recurse=False)  # type: ignore[no-untyped-call]
        self._settle()
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *rest)
        steps, gamma = (state_dict.get(prefix + name) for name in ("duals.steps", "gamma"))
        if not isinstance(steps, Tensor) or not isinstance(gamma, Tensor) or steps.dtype.itemsize >= 4:
            return
        # Half precision rounds the number of steps, or cannot hold it. Only a landing leaves every gamma at 0.
        if self.config.land_at and not steps.is_meta and float(steps) > 0 and not gamma.any():
            known = steps.float().nan_to_num(posinf=BEYOND_HALF)
            state_dict[prefix + "duals.steps"] = known.clamp_min(self.config.land_at)

    def train(self, mode: bool = True) -> Ace:
        super().train(mode)
        self._settle()
        self.budget.switched(mode, self.duals.count)
        self.sync()
        return self

    def _settle(self) -> None:
        """In evaluation, bring directions up to weights that were set, now and not in the next forward: that one may
        be traced by a compiler, which would take what is done once for a part of the model."""
        if not self.training:
            settle(find_bounded(self.branches))

    def sync(self) -> None:
        """Hooks where they are needed now, and nowhere else."""
        if self.hooks is not None:
            self.hooks.sync(self)

    def __getstate__(self) -> dict[str, Any]:
        # A copy belongs to another model, and a weak reference cannot be pickled.
        # The override is of the block that made it, not of a copy taken inside.
        return {
            **self.__dict__,
            "_root": None,
            "forced": None,
            "evaluates": False,
            "batch": None,
            "turns": Turns(),
            "session": Session(),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        LIVE.add(self)

    def extra_repr(self) -> str:
        return f"adapter={self.adapter!r}, mode={self.config.mode!r}, sites={len(self.sites)}"


def _loaded(ace: nn.Module, keys: Any) -> None:
    """A checkpoint may be from beyond the landing: gamma is 0 from then on, whatever it says."""
    assert isinstance(ace, Ace)
    landed = sorted(ace.duals.landed_sites)
    if landed and not ace.gamma.is_meta:
        with torch.no_grad():
            ace.gamma[landed] = 0.0
    ace.sync()


def _tapped(node: Node, tap: Tap) -> str:
    """The submodule whose argument is read; "" is the model itself."""
    return node.module if tap.module is None and isinstance(node, Site) else tap.module or ""


def _prepared_by(nodes: Sequence[Node], branches: Mapping[str, nn.Module]) -> dict[str, str]:
    first: dict[Any, str] = {}
    found = {}
    for node in nodes:
        branch: Any = branches[node.name]
        if isinstance(node.reads, Tap) and node.reads.module and isinstance(branch, AddsItself):
            found[node.name] = first.setdefault((node.reads, type(branch).prepare), node.name)
    return found


def key(name: str) -> str:
    """A site's name as a key of the ModuleDict, which allows no dots."""
    return name.replace(".", "_")


def find(model: nn.Module) -> Ace | None:
    """The model's ACE, if it is attached."""
    # Asked so, since a scripted module's parts are no dict.
    ace = model._modules[NAME] if isinstance(model, nn.Module) and NAME in model._modules else None
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
