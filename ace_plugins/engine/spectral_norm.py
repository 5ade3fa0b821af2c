"""Spectral normalisation: divides every linear map of a branch by its largest singular value.

A map keeps its weight W and a unit vector v, ``direction``, close to the leading right singular vector: sigma = |W v|.
One power iteration after each optimizer step, v <- W^T W v, updates v (`follow`); evaluation makes none. Maps of the
same shape, transposed or not, are computed in one batch: branches are small, so the number of calls sets the cost.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

SQUARINGS = 12
"""Squarings of W^T W for a weight that was set, not trained: equal to 4,096 iterations, exact to about 1e-5."""
UNIT = 1e-5
"""Largest deviation of a direction's length from 1, in single precision."""


class Bounded(nn.Module):
    """Mixin for a linear map that is divided by its spectral norm.

    Put it before the class of the map: ``class SNMyLinear(Bounded, MyLinear)``. The map computes with ``self.matrix()``
    in place of ``self.weight``, and its plain class returns ``SNMyLinear(self)`` from a method ``bounded()``.

    Args:
        plain: The plain map. Its weight, bias and attributes are taken over.
    """

    weight: Tensor
    direction: Tensor

    def __init__(self, plain: Any) -> None:
        nn.Module.__init__(self)
        vars(self).update({name: value for name, value in vars(plain).items() if not name.startswith("_")})
        self.weight, self.bias = plain.weight, plain.bias
        self.begin()

    def begin(self) -> None:
        """Register the direction. Called once, when ``weight`` exists."""
        # Any start will do that is not orthogonal to the result. A new generator leaves the script's stream alone.
        start = torch.randn(min(self.weight.shape), generator=torch.Generator().manual_seed(0))
        self.register_buffer("direction", (start / start.norm()).to(self.weight))
        self.divided: Tensor | None = None
        """The divided weight, during a forward pass of the model."""
        self.known: tuple[int, ...] | None = None
        """Identity of the weight that the direction was last computed for."""

    def matrix(self) -> Tensor:
        """Return the divided weight, [outputs, inputs]."""
        return divide([self])[0] if self.divided is None else self.divided

    @property
    def flat(self) -> bool:
        """True if the matrix is wider than high: computations use the transposed map."""
        return self.weight.shape[1] > self.weight.shape[0]

    @property
    def changed(self) -> bool:
        """True if the weight has changed other than by the steps that `follow` handled."""
        if self.weight.is_inference() or self.weight.is_meta or getattr(self, "_is_replica", False):
            return False  # cannot be detected, or is handled in the original (replica of nn.DataParallel)
        return self.known != self._identity()

    def mark_seen(self) -> None:
        """Note that the direction fits the weight."""
        self.known = None if self.weight.is_inference() else self._identity()

    def _identity(self) -> tuple[int, ...]:
        """Return numbers that change with the tensor, its memory or its values."""
        return id(self.weight), self.weight.data_ptr(), self.weight._version

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *rest)
        if {prefix + "weight", prefix + "direction"} <= state_dict.keys() and not self.direction.is_meta:
            # A resumed run continues exactly. In averaged checkpoints v is not a unit vector: it is computed again.
            if abs(float(self.direction.double().norm()) - 1) < UNIT:
                self.mark_seen()
            else:
                self.known = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "divided": None, "known": None if self.changed else ()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        if self.known is not None:
            self.mark_seen()  # a copy keeps the direction of the original


class SNLinear(Bounded, nn.Linear):
    """A linear map of spectral norm 1."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.matrix(), self.bias)


def bound(branch: nn.Module) -> nn.Module:
    """Bound the linear maps of a branch in place, and return it; a branch that is one linear map is replaced."""
    made: dict[nn.Module, nn.Module] = {}
    for parent in list(branch.modules()):
        for name, child in list(parent._modules.items()):
            if child is not None:
                if child not in made:
                    made[child] = _bound_one(child, parent)
                setattr(parent, name, made[child])
    return _bound_one(branch, None)


def _bound_one(module: nn.Module, parent: nn.Module | None) -> nn.Module:
    if not isinstance(module, nn.Linear) or is_bounded(module) or parametrize.is_parametrized(module):
        return module
    convert: Any = getattr(module, "bounded", None)
    if convert is not None:
        made: nn.Module = convert()
        return made
    # Layers of torch and subclasses of Linear may use the weight directly, so they get torch's own parametrization.
    if type(module) is nn.Linear and not _uses_weights(parent):
        return SNLinear(module)
    return parametrizations.spectral_norm(module)


def _uses_weights(parent: nn.Module | None) -> bool:
    containers = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
    return parent is not None and type(parent).__module__.startswith("torch.") and type(parent) not in containers


def is_bounded(module: nn.Module) -> bool:
    """Return whether the module's weight is spectrally normalised, by this module or by torch."""
    if isinstance(module, (Bounded, parametrize.ParametrizationList)):
        return True
    names = getattr(module, "parametrizations", {})
    return any(type(p).__name__ == "_SpectralNorm" for name in names for p in names[name])


def find_unbounded(branch: nn.Module) -> list[str]:
    """Return the class names of modules in a branch that hold an unbounded matrix."""
    found = {
        type(module).__name__
        for module in branch.modules()
        if not is_bounded(module) and any(p.dim() > 1 for p in module.parameters(recurse=False))
    }
    return sorted(found)


def find_bounded(branches: nn.Module) -> list[Bounded]:
    """Return the bounded maps inside a module."""
    return [module for module in branches.modules() if isinstance(module, Bounded)]


@torch.no_grad()
def follow(bounded: Iterable[Bounded]) -> None:
    """Make one power iteration, after a step has moved the weights."""
    for group in _group(bounded):
        weights, directions = _stack(group)
        image = torch.bmm(weights.mT, torch.bmm(weights, directions[:, :, None]))[:, :, 0]
        _store_unit(group, image, directions)


@torch.no_grad()
def settle(bounded: Iterable[Bounded]) -> None:
    """Compute the directions of weights that were set by something other than a step, by repeated squaring."""
    for group in _group(m for m in bounded if m.changed):
        weights, directions = _stack(group)
        power = weights.mT @ weights
        for _ in range(SQUARINGS):
            power = _normalise(power, torch.linalg.matrix_norm(power)[:, None, None], power)
            power = power @ power
        _store_unit(group, torch.bmm(power, directions[:, :, None])[:, :, 0], directions)


def divide(bounded: Sequence[Bounded]) -> list[Tensor]:
    """Return the weights divided by their spectral norms, with gradients, in the order of the maps."""
    if not torch.compiler.is_compiling():
        settle(bounded)
    found: dict[Bounded, Tensor] = {}
    for group in _group(bounded):
        like = group[0].weight
        # Autocast would compute the products in half precision.
        with nullcontext() if like.is_meta else torch.autocast(like.device.type, enabled=False):
            weights, directions = _stack(group)
            sigma = torch.linalg.vector_norm(torch.bmm(weights, directions[:, :, None]), dim=(1, 2))
            quotients = weights / torch.where(sigma > 0, sigma, 1.0)[:, None, None]  # a zero map stays zero
        for m, quotient in zip(group, quotients.unbind(0), strict=True):
            found[m] = (quotient.T if m.flat else quotient).to(m.weight.dtype)
    return [found[m] for m in bounded]


def _group(bounded: Iterable[Bounded]) -> list[list[Bounded]]:
    """Group maps by shape, dtype and device."""
    groups: dict[Any, list[Bounded]] = {}
    for m in bounded:
        groups.setdefault((*sorted(m.weight.shape), m.weight.dtype, m.weight.device), []).append(m)
    return list(groups.values())


def _stack(group: Sequence[Bounded]) -> tuple[Tensor, Tensor]:
    """Return weights [maps, high, wide] and directions [maps, wide], at least in single precision.

    They are copies, so that a graph that holds them survives the next iteration.
    """
    weights = torch.stack([m.weight.T if m.flat else m.weight for m in group])
    directions = torch.stack([m.direction for m in group])
    return (weights.float(), directions.float()) if weights.dtype.itemsize < 4 else (weights, directions)


def _store_unit(group: Sequence[Bounded], vectors: Tensor, before: Tensor) -> None:
    """Store the vectors, scaled to length 1, as directions. A zero map keeps the direction it had."""
    directions = _normalise(vectors, torch.linalg.vector_norm(vectors, dim=1, keepdim=True), before)
    for m, direction in zip(group, directions.unbind(0), strict=True):
        m.direction.copy_(direction)
        m.mark_seen()


def _normalise(numerator: Tensor, norm: Tensor, otherwise: Tensor) -> Tensor:
    return torch.where(norm > 0, numerator / norm, otherwise)
