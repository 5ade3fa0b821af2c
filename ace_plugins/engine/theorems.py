"""The paper's two bounds: of what dropping the branches changes, and of the equivariance error.

They are about layers one after the other, z_i = f_eq,i(z_{i-1}) + gamma_i f_neq,i(z_{i-1}) with z_0 = x. Every f_eq,i
is equivariant. Every f_eq,i and f_neq,i is M-Lipschitz and 0 at 0, and ||f_neq,i(z)|| <= B ||z||. The paper does not
say "0 at 0", but its proof needs it: it bounds ||z_i|| by a product of Lipschitz constants times ||x||.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def theorem_1(gammas: Sequence[float], B: float, M: float, norm: float) -> float:
    """A bound of ||f_gamma(x) - f_0(x)||, with ``norm`` = ||x||. The product form, which the proof derives."""
    total, grown = 0.0, 1.0
    for gamma in map(abs, gammas):
        total += gamma * grown
        grown *= 1 + gamma
    return B * M ** (len(gammas) - 1) * total * norm


def theorem_2(gammas: Sequence[float], B: float, M: float, norm: float, *, action: float = 1.0) -> float:
    """A bound of ||rho_Y(g) f(x) - f(rho_X(g) x)||, with ``norm`` = ||x||.

    ``action`` is the bound of the group's actions on features, ||rho(g) z|| <= action ||z||: 1 for rotations and
    reflections. The paper has one B for branches and actions, which for these cannot be below 1. With
    ``action = B`` this is what it prints; kept apart it also holds for branches with B < 1, and is tighter.
    """
    total = 0.0
    for k, gamma in enumerate(gammas):
        # M (1 + C |gamma|) with C = max(B / M, 1), which is written so that M may be 0.
        others = (M + max(B, M) * abs(other) for j, other in enumerate(gammas) if j != k)
        total += abs(gamma) * math.prod(others)
    return 2 * action * B * total * norm
