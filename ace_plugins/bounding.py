"""Spectral normalisation: every linear map of a branch divided by its largest singular value.

A map keeps its weight W and remembers a unit vector, ``direction``, near the one it stretches most: sigma = |W v|.
One power iteration, v <- W^T W v, after each step of the optimizer keeps it there while the weight moves
(`follow`); evaluation makes none. Iterations and divisions are made for all maps of one shape at once, a map and a
transposed one being of one shape: at the size of branches the number of calls is what costs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

SQUARINGS = 12
"""Of W^T W, for a weight that was set rather than trained: as good as 4,096 iterations, and exact to some 1e-5."""


class SNLinear(nn.Linear):
    """A linear map of spectral norm 1."""

    direction: Tensor

    def __init__(self, linear: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight = linear.weight
        self.bias = linear.bias
        # Any vector that is not orthogonal to the one sought will do; the script's random stream is not asked.
        start = torch.randn(min(self.weight.shape), generator=torch.Generator().manual_seed(0))
        self.register_buffer("direction", (start / start.norm()).to(self.weight))
        self.divided: Tensor | None = None
        """The divided weight, while a forward of the model is under way."""
        self.version: int | None = None
        """Of the weight, when the direction was last brought up to it."""

    def forward(self, x: Tensor) -> Tensor:
        # On its own, outside a forward of its model, a map divides its weight itself.
        weight = divided([self])[0] if self.divided is None else self.divided
        return nn.functional.linear(x, weight, self.bias)

    @property
    def flat(self) -> bool:
        """Wider than high: then it is the transposed map that is worked with."""
        return self.in_features > self.out_features

    @property
    def changed(self) -> bool:
        """Whether the weight was written to by something else than the steps that `follow` saw."""
        if self.weight.is_inference() or getattr(self, "_is_replica", False):
            return False  # it cannot be known, or it is known of the original (nn.DataParallel)
        return self.weight._version != self.version

    def seen(self) -> None:
        self.version = -1 if self.weight.is_inference() else self.weight._version

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *rest)
        if {prefix + "weight", prefix + "direction"} <= state_dict.keys():
            self.seen()  # they belong together: a resumed run goes on as if it had not stopped

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "divided": None, "version": None if self.changed else -1}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        if self.version is not None:
            self.seen()  # a copy computes what the original does


def bound(branch: nn.Module) -> nn.Module:
    """The branch with its linear maps bounded. In place, but for a branch that is itself one linear map."""
    for parent in list(branch.modules()):
        for name, child in list(parent.named_children()):
            setattr(parent, name, _bounded(child))
    return _bounded(branch)


def _bounded(module: nn.Module) -> nn.Module:
    if type(module) is nn.Linear and not parametrize.is_parametrized(module):
        return SNLinear(module)
    if isinstance(module, nn.Linear) and not is_bounded(module):
        # Whoever subclasses Linear may use the weight in ways of its own: torch divides it for all of them.
        parametrizations.spectral_norm(module)
    return module


def is_bounded(module: nn.Module) -> bool:
    if isinstance(module, (SNLinear, parametrize.ParametrizationList)):
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


def maps(branches: nn.Module) -> list[SNLinear]:
    return [module for module in branches.modules() if isinstance(module, SNLinear)]


@torch.no_grad()
def follow(bounded: Iterable[SNLinear]) -> None:
    """One power iteration, after a step has moved the weights."""
    for group in _groups(bounded):
        weights, directions = _stacked(group)
        _store(group, _iterated(weights, directions))


@torch.no_grad()
def settle(bounded: Iterable[SNLinear]) -> None:
    """Thousands of iterations at the price of a few, for weights that were set by something else than a step."""
    for group in _groups(m for m in bounded if m.changed):
        weights, directions = _stacked(group)
        power = weights.mT @ weights
        for _ in range(SQUARINGS):
            power = _over(power, torch.linalg.matrix_norm(power)[:, None, None], power)
            power = power @ power
        _store(group, _unit(torch.bmm(power, directions[:, :, None])[:, :, 0], directions))


def divided(bounded: Sequence[SNLinear]) -> list[Tensor]:
    """The weights over their sigma, with gradients, in the order of the maps."""
    if not torch.compiler.is_compiling():
        settle(bounded)
    found: dict[SNLinear, Tensor] = {}
    for group in _groups(bounded):
        # Autocast would make the products in half precision.
        with torch.autocast(group[0].weight.device.type, enabled=False):
            weights, directions = _stacked(group)
            sigma = _sigma(weights, directions)
            # A map that is zero stays so.
            quotients = weights / torch.where(sigma > 0, sigma, 1.0)[:, None, None]
        for m, quotient in zip(group, quotients.unbind(0), strict=True):
            found[m] = (quotient.T if m.flat else quotient).to(m.weight.dtype)
    return [found[m] for m in bounded]


def _groups(bounded: Iterable[SNLinear]) -> list[list[SNLinear]]:
    """Of one shape, type and device."""
    groups: dict[Any, list[SNLinear]] = {}
    for m in bounded:
        groups.setdefault((*sorted(m.weight.shape), m.weight.dtype, m.weight.device), []).append(m)
    return list(groups.values())


def _stacked(group: Sequence[SNLinear]) -> tuple[Tensor, Tensor]:
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


def _store(group: Sequence[SNLinear], directions: Tensor) -> None:
    for m, direction in zip(group, directions.unbind(0), strict=True):
        m.direction.copy_(direction)
        m.seen()
