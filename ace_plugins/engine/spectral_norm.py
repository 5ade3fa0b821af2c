"""Spectral normalisation: divides every linear map of a branch by its largest singular value.

A map stores its weight W and a unit vector v, ``direction``, close to the leading right singular vector, so that the
largest singular value is |W v|. After each optimizer step, `follow` updates v by one power iteration: to W^T W v,
scaled to length 1. Maps of equal shape, transposed or not, are computed in one batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from .holdout import FIT, linear

SQUARINGS = 12  # number of squarings of W^T W in `settle`, as precise as 4,096 power iterations
UNIT = 1e-5  # deviation from length 1 below which a loaded direction counts as a unit vector, given single precision


class Bounded(nn.Module):
    """Mixin for a linear map that is divided by its spectral norm: ``class SNMyLinear(Bounded, MyLinear)``.

    Write a ``forward`` of ``SNMyLinear`` that uses ``self.matrix()`` instead of ``self.weight``, and a method
    ``MyLinear.bounded()`` that returns ``SNMyLinear(self)``.

    Args:
        plain: The plain map. The new map uses its weight, bias and attributes.
    """

    weight: Tensor
    direction: Tensor

    def __init__(self, plain: Any) -> None:
        nn.Module.__init__(self)
        vars(self).update({name: value for name, value in vars(plain).items() if not name.startswith("_")})
        self.weight, self.bias = plain.weight, plain.bias
        # Any start that is not orthogonal to the result works. A new generator leaves the script's stream unchanged.
        start = torch.randn(min(self.weight.shape), generator=torch.Generator().manual_seed(0))
        self.register_buffer("direction", (start / start.norm()).to(self.weight))
        self.divided: Tensor | None = None  # the weight divided by its spectral norm, during a forward pass
        self.known: tuple[int, ...] | None = None  # `_identity` of the weight that the direction was computed for

    def matrix(self) -> Tensor:
        """Return the weight divided by its spectral norm, [outputs, inputs]."""
        divided = divide([self])[0] if self.divided is None else self.divided
        return divided.detach() if FIT.constant else divided

    @property
    def flat(self) -> bool:
        """True if the weight has more columns than rows. Computations then use its transpose."""
        return self.weight.shape[1] > self.weight.shape[0]

    @property
    def changed(self) -> bool:
        """True if the weight has changed since the direction was last computed or updated by `follow`."""
        if self.weight.is_inference() or self.weight.is_meta or getattr(self, "_is_replica", False):
            return False  # cannot be detected, or is handled in the original (replica of nn.DataParallel)
        return self.known != self._identity()

    def mark_seen(self) -> None:
        """Record that the direction belongs to the current weight."""
        self.known = None if self.weight.is_inference() else self._identity()

    def _identity(self) -> tuple[int, ...]:
        """Return numbers that change if the weight is replaced, moved in memory or written to."""
        return id(self.weight), self.weight.data_ptr(), self.weight._version

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *rest)
        if {prefix + "weight", prefix + "direction"} <= state_dict.keys() and not self.direction.is_meta:
            # A resumed run uses the loaded direction. In averaged checkpoints it is not a unit vector: recompute it.
            self.known = None
            if abs(float(self.direction.double().norm()) - 1) < UNIT:
                self.mark_seen()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "divided": None, "known": None if self.changed else ()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        if self.known is not None:
            self.mark_seen()  # a copy keeps the direction of the original


class SNLinear(Bounded, nn.Linear):
    """A linear map of spectral norm 1."""

    fits_rows = True

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.matrix(), self.bias)


def bound(branch: nn.Module) -> nn.Module:
    """Bound the linear maps of a branch in place, and return the branch, or its replacement if it is one linear map.

    `find_unbounded` lists the maps that stay as they are: subclasses of Linear without a method ``bounded``, and maps
    inside other layers of torch, such as attention, which use the weights directly.
    """
    made: dict[nn.Module | None, nn.Module] = {}
    for module in branch.modules():
        convert: Any = getattr(module, "bounded", None)
        if convert is not None and isinstance(module, nn.Linear) and not isinstance(module, Bounded):
            made[module] = convert()
        elif type(module) is nn.Linear:
            made[module] = SNLinear(module)
    for parent in list(branch.modules()):
        container = isinstance(parent, (nn.Sequential, nn.ModuleList, nn.ModuleDict))
        if container or not type(parent).__module__.startswith("torch."):
            for name, child in list(parent._modules.items()):
                if child in made:
                    setattr(parent, name, made[child])
    return made.get(branch, branch)


def find_unbounded(branch: nn.Module) -> list[str]:
    """Return the class names of those modules in a branch that have an unbounded matrix, sorted."""
    plain = [module for module in branch.modules() if not isinstance(module, Bounded)]
    return sorted({type(m).__name__ for m in plain if any(p.dim() > 1 for p in m.parameters(recurse=False))})


def find_bounded(branches: nn.Module) -> list[Bounded]:
    """Return the bounded maps inside a module."""
    return [module for module in branches.modules() if isinstance(module, Bounded)]


@torch.no_grad()
def follow(bounded: Iterable[Bounded]) -> None:
    """Update the directions by one power iteration, after an optimizer step has changed the weights."""
    for group in _group(bounded):
        weights, directions = _stack(group)
        image = torch.bmm(weights.mT, torch.bmm(weights, directions[:, :, None]))[:, :, 0]
        _store_unit(group, image, directions)


@torch.no_grad()
def settle(bounded: Iterable[Bounded]) -> None:
    """Compute the directions of all maps whose weight changed without `follow`, by squaring W^T W repeatedly."""
    for group in _group(m for m in bounded if m.changed):
        weights, directions = _stack(group)
        power = weights.mT @ weights
        for _ in range(SQUARINGS):
            norm = torch.linalg.matrix_norm(power)[:, None, None]
            power = torch.where(norm > 0, power / norm, power)
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
    groups: dict[Any, list[Bounded]] = {}
    for m in bounded:
        groups.setdefault((*sorted(m.weight.shape), m.weight.dtype, m.weight.device), []).append(m)
    return list(groups.values())


def _stack(group: Sequence[Bounded]) -> tuple[Tensor, Tensor]:
    """Return copies of the weights [maps, rows, columns] and directions [maps, columns], at least in float32."""
    weights = torch.stack([m.weight.T if m.flat else m.weight for m in group])
    directions = torch.stack([m.direction for m in group])
    return (weights.float(), directions.float()) if weights.dtype.itemsize < 4 else (weights, directions)


def _store_unit(group: Sequence[Bounded], vectors: Tensor, before: Tensor) -> None:
    """Store the vectors, scaled to length 1, as directions. The direction of a zero map is kept."""
    norm = torch.linalg.vector_norm(vectors, dim=1, keepdim=True)
    directions = torch.where(norm > 0, vectors / norm, before)
    for m, direction in zip(group, directions.unbind(0), strict=True):
        m.direction.copy_(direction)
        m.mark_seen()
