"""Spectral normalisation: every linear map of a branch divided by its largest singular value.

A map keeps its weight W and remembers a unit vector, ``direction``, near the one it stretches most: sigma = |W v|.
One power iteration, v <- W^T W v, after each step of the optimizer keeps it there while the weight moves
(`follow`); evaluation makes none. Iterations and divisions are made for all maps of one shape at once, a map and a
transposed one being of one shape: at the size of branches the number of calls is what costs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

SQUARINGS = 12
"""Of W^T W, for a weight that was set rather than trained: as good as 4,096 iterations, and exact to some 1e-5."""
UNIT = 1e-5
"""How far from 1 the length of a direction may be, in single precision."""


class Bounded(nn.Module):
    """What a linear map needs to be divided by its spectral norm: mix it in before the class of the map.

    The map computes with ``matrix()`` where it computed with its weight.
    """

    weight: Tensor
    direction: Tensor

    def begin(self) -> None:
        """Once there is a weight."""
        # Any vector that is not orthogonal to the one sought will do; the script's random stream is not asked.
        start = torch.randn(min(self.weight.shape), generator=torch.Generator().manual_seed(0))
        self.register_buffer("direction", (start / start.norm()).to(self.weight))
        self.divided: Tensor | None = None
        """The divided weight, while a forward of the model is under way."""
        self.known: tuple[int, ...] | None = None
        """Which weight it was, when the direction was last brought up to it."""

    def matrix(self) -> Tensor:
        # On its own, outside a forward of its model, a map divides its weight itself.
        return divided([self])[0] if self.divided is None else self.divided

    @property
    def flat(self) -> bool:
        """Wider than high: then it is the transposed map that is worked with."""
        return self.weight.shape[1] > self.weight.shape[0]

    @property
    def changed(self) -> bool:
        """Whether the weight was set by something else than the steps that `follow` saw."""
        if self.weight.is_inference() or self.weight.is_meta or getattr(self, "_is_replica", False):
            return False  # it cannot be known, or it is known of the original (nn.DataParallel)
        return self.known != self._state()

    def seen(self) -> None:
        self.known = None if self.weight.is_inference() else self._state()

    def _state(self) -> tuple[int, ...]:
        """Another tensor, other memory, or written to."""
        return id(self.weight), self.weight.data_ptr(), self.weight._version

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *rest)
        if {prefix + "weight", prefix + "direction"} <= state_dict.keys() and not self.direction.is_meta:
            # They belong together, and a resumed run goes on as if it had not stopped; but not where checkpoints
            # were averaged, which leaves no unit vector.
            if abs(float(self.direction.double().norm()) - 1) < UNIT:
                self.seen()
            else:
                self.known = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "divided": None, "known": None if self.changed else ()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        if self.known is not None:
            self.seen()  # a copy computes what the original does


class SNLinear(Bounded, nn.Linear):
    """A linear map of spectral norm 1."""

    def __init__(self, linear: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight = linear.weight
        self.bias = linear.bias
        self.begin()

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.matrix(), self.bias)


def bound(branch: nn.Module) -> nn.Module:
    """The branch with its linear maps bounded. In place, but for a branch that is itself one linear map."""
    made: dict[nn.Module, nn.Module] = {}
    for parent in list(branch.modules()):
        for name, child in list(parent._modules.items()):
            if child is not None:
                if child not in made:
                    made[child] = _bounded(child, parent)
                setattr(parent, name, made[child])
    return _bounded(branch, None)


def _bounded(module: nn.Module, parent: nn.Module | None) -> nn.Module:
    if not isinstance(module, nn.Linear) or is_bounded(module) or parametrize.is_parametrized(module):
        return module
    own = getattr(module, "bounded", None)
    if own is not None:
        made: nn.Module = own()
        return made
    # torch's layers, and whoever subclasses Linear, may use the weight in ways of their own: torch divides it for all.
    if type(module) is nn.Linear and not _reaches_inside(parent):
        return SNLinear(module)
    return parametrizations.spectral_norm(module)


def _reaches_inside(parent: nn.Module | None) -> bool:
    containers = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
    return parent is not None and type(parent).__module__.startswith("torch.") and type(parent) not in containers


def is_bounded(module: nn.Module) -> bool:
    if isinstance(module, (Bounded, parametrize.ParametrizationList)):
        return True
    # torch's own, which an adapter may have put on.
    names = getattr(module, "parametrizations", {})
    return any(type(p).__name__ == "_SpectralNorm" for name in names for p in names[name])


def unbounded(branch: nn.Module) -> list[str]:
    """The kinds of module in a branch that hold a matrix which nothing bounds."""
    found = {
        type(module).__name__
        for module in branch.modules()
        if not is_bounded(module) and any(p.dim() > 1 for p in module.parameters(recurse=False))
    }
    return sorted(found)


def maps(branches: nn.Module) -> list[Bounded]:
    return [module for module in branches.modules() if isinstance(module, Bounded)]


@torch.no_grad()
def follow(bounded: Iterable[Bounded]) -> None:
    """One power iteration, after a step has moved the weights."""
    for group in _groups(bounded):
        weights, directions = _stacked(group)
        _store(group, _iterated(weights, directions))


@torch.no_grad()
def settle(bounded: Iterable[Bounded]) -> None:
    """Thousands of iterations at the price of a few, for weights that were set by something else than a step."""
    for group in _groups(m for m in bounded if m.changed):
        weights, directions = _stacked(group)
        power = weights.mT @ weights
        for _ in range(SQUARINGS):
            power = _over(power, torch.linalg.matrix_norm(power)[:, None, None], power)
            power = power @ power
        _store(group, _unit(torch.bmm(power, directions[:, :, None])[:, :, 0], directions))


def divided(bounded: Sequence[Bounded]) -> list[Tensor]:
    """The weights over their sigma, with gradients, in the order of the maps."""
    if not torch.compiler.is_compiling():
        settle(bounded)
    found: dict[Bounded, Tensor] = {}
    for group in _groups(bounded):
        with _without_autocast(group[0].weight):
            weights, directions = _stacked(group)
            sigma = _sigma(weights, directions)
            # A map that is zero stays so.
            quotients = weights / torch.where(sigma > 0, sigma, 1.0)[:, None, None]
        for m, quotient in zip(group, quotients.unbind(0), strict=True):
            found[m] = (quotient.T if m.flat else quotient).to(m.weight.dtype)
    return [found[m] for m in bounded]


def _without_autocast(like: Tensor) -> AbstractContextManager[Any]:
    """It would make the products in half precision."""
    return nullcontext() if like.is_meta else torch.autocast(like.device.type, enabled=False)


def _groups(bounded: Iterable[Bounded]) -> list[list[Bounded]]:
    """Of one shape, type and device."""
    groups: dict[Any, list[Bounded]] = {}
    for m in bounded:
        groups.setdefault((*sorted(m.weight.shape), m.weight.dtype, m.weight.device), []).append(m)
    return list(groups.values())


def _stacked(group: Sequence[Bounded]) -> tuple[Tensor, Tensor]:
    """Weights [maps, high, wide] and directions [maps, wide], in single precision at least; copies, so that a graph
    which holds them outlives the next iteration."""
    weights = torch.stack([m.weight.T if m.flat else m.weight for m in group])
    directions = torch.stack([m.direction for m in group])
    return (weights.float(), directions.float()) if weights.dtype.itemsize < 4 else (weights, directions)


def _sigma(weights: Tensor, directions: Tensor) -> Tensor:
    sigma: Tensor = torch.linalg.vector_norm(torch.bmm(weights, directions[:, :, None]), dim=(1, 2))
    return sigma


def _iterated(weights: Tensor, directions: Tensor) -> Tensor:
    image = torch.bmm(weights.mT, torch.bmm(weights, directions[:, :, None]))[:, :, 0]
    return _unit(image, directions)


def _unit(vectors: Tensor, otherwise: Tensor) -> Tensor:
    # A map that is zero has no direction: it keeps the one it had, for when it moves.
    return _over(vectors, torch.linalg.vector_norm(vectors, dim=1, keepdim=True), otherwise)


def _over(numerator: Tensor, norm: Tensor, otherwise: Tensor) -> Tensor:
    return torch.where(norm > 0, numerator / norm, otherwise)


def _store(group: Sequence[Bounded], directions: Tensor) -> None:
    for m, direction in zip(group, directions.unbind(0), strict=True):
        m.direction.copy_(direction)
        m.seen()
