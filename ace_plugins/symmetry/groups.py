"""The Euclidean groups whose symmetry models keep, and their elements."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import AdapterError, ConfigError


@dataclass(frozen=True, eq=False)  # == on tensors is no truth value, so elements compare by identity
class Element:
    """x -> matrix @ x + translation; matrix [3, 3] orthogonal, translation [3], both float64 on the CPU."""

    matrix: Tensor
    translation: Tensor

    def __post_init__(self) -> None:
        found = [(list(t.shape), t.dtype) for t in (self.matrix, self.translation)]
        if found != [([3, 3], torch.float64), ([3], torch.float64)]:
            raise AdapterError(f"element: expected float64 of shape [3, 3] and [3], found {found}")
        excess = float((self.matrix @ self.matrix.T - torch.eye(3).to(self.matrix)).abs().max())
        if not excess < 1e-6:  # written so that nan is refused too
            raise AdapterError(f"element: expected an orthogonal matrix, found M M^T off 1 by {excess:.1e}")

    @property
    def sign(self) -> int:
        """The determinant: 1 for a rotation, -1 with a reflection."""
        return 1 if float(torch.linalg.det(self.matrix)) > 0 else -1

    def compose(self, other: Element) -> Element:
        """self after other."""
        return Element(self.matrix @ other.matrix, self.matrix @ other.translation + self.translation)

    def inverse(self) -> Element:
        return Element(self.matrix.T.contiguous(), -(self.matrix.T @ self.translation))

    @staticmethod
    def identity() -> Element:
        eye = torch.eye(3, dtype=torch.float64, device="cpu")  # whatever the default device is
        return Element(eye, torch.zeros_like(eye[0]))


@dataclass(frozen=True)
class Group:
    name: str
    reflections: bool
    translations: bool

    def sample(self, generator: torch.Generator, *, scale: float = 1.0) -> Element:
        """Orthogonal part uniform (Haar). R^3 has no uniform distribution, so the translation is normal
        with standard deviation ``scale`` per coordinate. Draws from ``generator`` only."""
        if not (math.isfinite(scale) and scale >= 0):
            raise ConfigError(f"scale: expected a finite number >= 0, found {scale!r}")
        kind: dict[str, Any] = {"generator": generator, "dtype": torch.float64, "device": generator.device}
        q = torch.randn(4, **kind).cpu()  # a normalised Gaussian is uniform on the sphere of unit quaternions
        w, x, y, z = (q / q.norm()).tolist()
        cross = torch.tensor([[0, -z, y], [z, 0, -x], [-y, x, 0]], dtype=torch.float64, device="cpu")
        unit = Element.identity()
        matrix = unit.matrix + 2 * (w * cross + cross @ cross)
        if self.reflections and float(torch.rand((), **kind)) < 0.5:
            matrix = -matrix  # O(3) = SO(3) x {1, -1}, so this is uniform on O(3)
        shift = scale * torch.randn(3, **kind).cpu() if self.translations else unit.translation
        return Element(matrix, shift)


O3 = Group("O(3)", reflections=True, translations=False)
SO3 = Group("SO(3)", reflections=False, translations=False)
E3 = Group("E(3)", reflections=True, translations=True)
SE3 = Group("SE(3)", reflections=False, translations=True)
