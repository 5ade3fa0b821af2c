"""The part of ``pytorch3d.transforms`` that upstream's scripts use, in plain torch.

PyTorch3D has to be compiled for one version of torch, and the scripts only rotate point clouds with it. Its conventions
are kept: points are row vectors, so a transform with the matrix R maps p to p @ R. A rotation matrix for column
vectors, such as those of `random_rotations`, therefore rotates in the opposite direction when it is passed to `Rotate`.
For uniformly distributed rotations this makes no difference.
"""

from __future__ import annotations

import math
import warnings
from typing import TypeVar

import torch
from torch import Tensor

from ace_plugins import AceError, AceWarning
from ace_plugins.adapter import one_of

Device = str | torch.device
T = TypeVar("T", bound="Rotate")

AXES = "XYZ"


class TransformError(AceError, ValueError):
    """An invalid rotation, or points that do not fit. A ValueError, as in PyTorch3D."""


class Rotate:
    """Rotates row vectors by one matrix [3, 3] or a batch of matrices [B, 3, 3]."""

    def __init__(
        self,
        R: Tensor,
        dtype: torch.dtype = torch.float32,
        device: Device | None = None,
        orthogonal_tol: float = 1e-5,
    ) -> None:
        matrices = _tensor("R", R)
        if matrices.dim() not in (2, 3) or matrices.shape[-2:] != (3, 3):
            raise TransformError(f"R: expected [3, 3] or [B, 3, 3], found {list(matrices.shape)}")
        self._rotations = matrices.reshape(-1, 3, 3).to(device=device, dtype=dtype)
        off = _off_orthogonal(self._rotations)
        if not off <= orthogonal_tol:
            # A warning, as in PyTorch3D: scripts may round their matrices.
            warnings.warn(
                f"R: expected rotations, R @ R.T = 1 and det R = 1 within {orthogonal_tol:g}, found {off:.2g}",
                AceWarning,
                stacklevel=2,
            )

    def __len__(self) -> int:
        return len(self._rotations)

    @property
    def dtype(self) -> torch.dtype:
        return self._rotations.dtype

    @property
    def device(self) -> torch.device:
        return self._rotations.device

    def get_matrix(self) -> Tensor:
        """Return the matrices [B, 4, 4] for homogeneous row vectors."""
        matrix = torch.eye(4, dtype=self.dtype, device=self.device).repeat(len(self), 1, 1)
        matrix[:, :3, :3] = self._rotations
        return matrix

    def transform_points(self, points: Tensor) -> Tensor:
        """Return p @ R for points [N, 3] or [B, N, 3].

        One transform applies to all clouds, and several transforms apply to one cloud. One transform of points [N, 3]
        gives [N, 3].
        """
        cloud = _tensor("points", points)
        if cloud.dim() not in (2, 3) or cloud.shape[-1] != 3:
            raise TransformError(f"points: expected [N, 3] or [B, N, 3], found {list(cloud.shape)}")
        if cloud.dtype != self.dtype or cloud.device != self.device:
            raise TransformError(
                f"points: expected {self.dtype} on {self.device}, like the transform, "
                f"found {cloud.dtype} on {cloud.device}; call .to() on one of them"
            )
        if cloud.dim() == 3 and len(cloud) != len(self) and 1 not in (len(cloud), len(self)):
            raise TransformError(
                f"points: expected a batch of 1 or {len(self)}, the number of transforms, found {len(cloud)}"
            )
        turned = cloud @ self._rotations
        return turned[0] if cloud.dim() == 2 and len(self) == 1 else turned

    def to(self: T, device: Device, copy: bool = False, dtype: torch.dtype | None = None) -> T:
        """Return this transform on another device or in another precision; itself if nothing changes."""
        moved = self._rotations.to(device=device, dtype=dtype or self.dtype, copy=copy)
        if moved is self._rotations:
            return self
        other = type(self).__new__(type(self))
        other._rotations = moved
        return other


class RotateAxisAngle(Rotate):
    """Right-handed rotations about one axis: by 90 degrees about Z, (1, 0, 0) becomes (0, 1, 0)."""

    def __init__(
        self,
        angle: float | Tensor,
        axis: str = "X",
        degrees: bool = True,
        dtype: torch.dtype = torch.float32,
        device: Device | None = None,
    ) -> None:
        if not isinstance(axis, str) or axis.upper() not in tuple(AXES):
            raise TransformError(one_of("axis", axis, AXES))
        if not isinstance(angle, Tensor | int | float):
            raise TransformError(f"angle: expected a number or a tensor [B], found {type(angle).__name__}")
        angles = torch.as_tensor(angle, dtype=dtype, device=device)
        if angles.dim() > 1:
            raise TransformError(f"angle: expected a number or a tensor [B], found {list(angles.shape)}")
        super().__init__(_about(axis.upper(), angles.reshape(-1), degrees), dtype=dtype, device=device)


def random_rotations(n: int, dtype: torch.dtype | None = None, device: Device | None = None) -> Tensor:
    """Draw rotations [n, 3, 3] uniformly from SO(3), with torch's global generator.

    A normalised Gaussian vector in four dimensions is a uniformly distributed unit quaternion.
    """
    if n < 0:
        raise TransformError(f"n: expected 0 or more rotations, found {n}")
    quaternions = torch.nn.functional.normalize(torch.randn(n, 4, dtype=dtype, device=device), dim=1)
    real, vector = quaternions[:, 0], quaternions[:, 1:]
    # R = (w^2 - |v|^2) 1 + 2 v v^T + 2 w [v]x, the rotation of column vectors by the quaternion (w, v).
    identity = torch.eye(3, dtype=quaternions.dtype, device=quaternions.device)
    x, y, z = vector.unbind(1)
    zero = torch.zeros_like(x)
    cross = torch.stack((zero, -z, y, z, zero, -x, -y, x, zero), dim=1).view(n, 3, 3)
    scalar = real.square() - vector.square().sum(1)
    outer = vector[:, :, None] * vector[:, None, :]
    return scalar[:, None, None] * identity + 2 * outer + 2 * real[:, None, None] * cross


def _about(axis: str, angles: Tensor, degrees: bool) -> Tensor:
    """Return matrices [B, 3, 3] for row vectors from angles [B]."""
    radians = angles * (math.pi / 180) if degrees else angles
    cos, sin = radians.cos(), radians.sin()
    one, zero = torch.ones_like(cos), torch.zeros_like(cos)
    rows = {
        "X": (one, zero, zero, zero, cos, sin, zero, -sin, cos),
        "Y": (cos, zero, -sin, zero, one, zero, sin, zero, cos),
        "Z": (cos, sin, zero, -sin, cos, zero, zero, zero, one),
    }[axis]
    return torch.stack(rows, dim=1).view(-1, 3, 3)


def _off_orthogonal(matrices: Tensor) -> float:
    """Return the largest deviation of the matrices from rotations; nan if one of them contains a nan."""
    if not len(matrices):
        return 0.0
    matrices = matrices.detach()
    identity = torch.eye(3, dtype=matrices.dtype, device=matrices.device)
    products = (matrices @ matrices.transpose(1, 2) - identity).abs().amax()
    first, second, third = matrices.unbind(1)
    volumes = (torch.linalg.cross(first, second) * third).sum(1)
    return float(torch.maximum(products, (volumes - 1).abs().amax()))


def _tensor(name: str, value: object) -> Tensor:
    if not isinstance(value, Tensor):
        raise TransformError(f"{name}: expected a tensor, found {type(value).__name__}")
    return value
