"""How much a branch can stretch: the product of what its parts can."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from .bounded import SNLinear
from .branches import Flat, Norm
from .schedule import Map

STEEPEST: dict[type[nn.Module], Callable[[Any], float]] = {
    nn.Identity: lambda part: 1.0,
    nn.Dropout: lambda part: 1.0,  # which in evaluation does nothing
    nn.Flatten: lambda part: 1.0,
    nn.Unflatten: lambda part: 1.0,
    nn.ReLU: lambda part: 1.0,
    nn.Tanh: lambda part: 1.0,
    nn.Softplus: lambda part: 1.0,
    nn.Sigmoid: lambda part: 0.25,
    nn.LeakyReLU: lambda part: max(1.0, abs(part.negative_slope)),
    nn.ELU: lambda part: max(1.0, abs(part.alpha)),
    nn.GELU: lambda part: 1.1290,  # at the root of 2
    nn.SiLU: lambda part: 1.0999,
}
"""The steepest slope of each nonlinearity, rounded up. That of GELU and SiLU is above 1."""


def parts(branch: nn.Module) -> Iterator[nn.Module]:
    """What a branch is made of, one after the other."""
    if isinstance(branch, Flat):
        yield from parts(branch.inner)
    elif type(branch) is nn.Sequential:
        for part in branch:
            yield from parts(part)
    else:
        yield branch


def lipschitz(branch: nn.Module) -> float | None:
    """The product of the parts' Lipschitz constants in evaluation, which is at least the branch's own.

    None where there is a part of which none is known (`unknown` names them).
    """
    known = [_constant(part) for part in parts(branch)]
    return None if None in known else math.prod(value for value in known if value is not None)


def unknown(branch: nn.Module) -> list[str]:
    """The kinds of the parts that `lipschitz` does not know."""
    return sorted({type(part).__name__ for part in parts(branch) if _constant(part) is None})


@torch.no_grad()
def _constant(part: nn.Module) -> float | None:
    if isinstance(part, SNLinear):
        # Not taken for 1: its direction may lag behind a weight that training moves.
        return float(torch.linalg.matrix_norm(part.matrix().double(), 2))
    kind = parametrize.type_before_parametrizations(part)
    if kind in (nn.Linear, Map):
        weight: Any = part.weight
        return float(torch.linalg.matrix_norm(weight.double(), 2))
    if isinstance(part, nn.BatchNorm1d) and kind in (Norm, nn.BatchNorm1d) and part.running_var is not None:
        scale = (part.running_var + part.eps).rsqrt()
        return float((scale if part.weight is None else scale * part.weight).abs().max())
    steepest = STEEPEST.get(kind)
    return None if steepest is None else steepest(part)
