"""What upstream's scripts take from ``pytorch3d.transforms``, in plain torch.

PyTorch3D has to be compiled against one version of torch, and the scripts only turn point clouds with it. Its
conventions are kept: points are row vectors, so a transform with the matrix R maps p to p @ R. A rotation matrix for
column vectors, such as `random_rotations` gives, hence turns points the other way round when handed to `Rotate`;
for uniform rotations that is the same thing.
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
    """Something that is no rotation, or points that do not go with it. A ValueError, as PyTorch3D's own is."""


class Rotate:
    """Rotations by matrices for row vectors: one [3, 3], or a batch [B, 3, 3]."""

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
            # As PyTorch3D does: a script that rounds its matrices goes on, knowing it.
            warnings.warn(
                f"R: expected rotations, R @ R.T = 1 within {orthogonal_tol:g} and det R = 1, found {off:.2g} off",
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
        """[B, 4, 4], for homogeneous row vectors."""
        matrix = torch.eye(4, dtype=self.dtype, device=self.device).repeat(len(self), 1, 1)
        matrix[:, :3, :3] = self._rotations
        return matrix

    def transform_points(self, points: Tensor) -> Tensor:
        """p @ R for points [N, 3] or [B, N, 3].

        One transform turns all clouds, and one cloud is turned by all transforms; one of each given as [N, 3] stays
        [N, 3].
        """
        cloud = _tensor("points", points)
        if cloud.dim() not in (2, 3) or cloud.shape[-1] != 3:
            raise TransformError(f"points: expected [N, 3] or [B, N, 3], found {list(cloud.shape)}")
        if cloud.dtype != self.dtype or cloud.device != self.device:
            raise TransformError(
                f"points: expected {self.dtype} on {self.device} as the transform is, "
                f"found {cloud.dtype} on {cloud.device}; use points.to or the transform's"
            )
        if cloud.dim() == 3 and len(cloud) != len(self) and 1 not in (len(cloud), len(self)):
            raise TransformError(
                f"points: expected a batch of {len(self)} as there are transforms, or of 1, found {len(cloud)}"
            )
        turned = cloud @ self._rotations
        return turned[0] if cloud.dim() == 2 and len(self) == 1 else turned

    def to(self: T, device: Device, copy: bool = False, dtype: torch.dtype | None = None) -> T:
        """This transform on another device or in another precision; itself where that changes nothing."""
        moved = self._rotations.to(device=device, dtype=dtype or self.dtype, copy=copy)
        if moved is self._rotations:
            return self
        other = type(self).__new__(type(self))
        other._rotations = moved
        return other


class RotateAxisAngle(Rotate):
    """Right-handed rotations of points about one axis: about Z by 90 degrees (1, 0, 0) goes to (0, 1, 0)."""

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
    """Rotations [n, 3, 3], uniform on SO(3), from torch's global generator.

    A Gaussian has no preferred direction, so a normalised one in four dimensions is a uniform unit quaternion.
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
    """Matrices [B, 3, 3] for row vectors from angles [B]."""
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
    """How far the worst of the matrices is from a rotation; nan where one is."""
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
