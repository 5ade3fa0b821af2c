"""Which optimizer owns which gamma: found, adopted where it was left out, or an error that says what to do."""

from __future__ import annotations

import gc
import warnings
import weakref
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import AceWarning, StepError
from .bounded import maps
from .fitted import Fitted
from .owned import Owned
from .printed import Printed
from .ranks import find_shards
from .scheduled import Scheduled
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
            ace.without_gamma += 1
            if ace.without_gamma == ALONE:
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
    moved = [ace for ace in live if any(id(m.weight) in places for m in maps(ace.branches))]
    return Ownership(seen(optimizer), owned, moved, trained)


def _kind(ace: Ace) -> type[Owned]:
    if ace.config.mode == "scheduled":
        return Scheduled
    return Fitted if ace.config.loop == "fitted" else Printed


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
