"""What a group and its elements are, and the groups of rigid motions of the plane and of space.

The finite groups of the plane: rotations by parts of a turn, with or without reflections.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from ..errors import AdapterError, ConfigError


class Element(Protocol):
    """One transformation. What it does to a tensor is said by an action."""

    def compose(self, other: Any) -> Element:
        """self after other, an element of the same group."""

    def inverse(self) -> Element:
        """The element that undoes this one."""


@runtime_checkable
class Group(Protocol):
    """A set of transformations to draw from. Any class with these members is a group.

    Write it as a frozen dataclass at module level: groups are pickled along with the model's hooks."""

    @property
    def name(self) -> str:
        """How reports call it, such as ``SO(3)``."""

    def identity(self) -> Element:
        """The element that changes nothing."""

    def sample(self, generator: torch.Generator, *, scale: float = 1.0) -> Element:
        """A random element, uniform where there is a uniform distribution. ``scale`` is the size of what has none,
        such as translations. Draws from ``generator`` only."""


@dataclass(frozen=True, eq=False)  # == on tensors is no truth value, so elements compare by identity
class Rigid:
    """x -> matrix @ x + translation; matrix [d, d] orthogonal, translation [d], float64 on the CPU, d = 2 or 3."""

    matrix: Tensor
    translation: Tensor

    def __post_init__(self) -> None:
        both = (self.matrix, self.translation)
        d = self.matrix.shape[0] if self.matrix.shape in ((2, 2), (3, 3)) else None
        kinds = {(t.dtype, t.device.type) for t in both}
        if self.translation.shape != (d,) or kinds != {(torch.float64, "cpu")}:
            found = " and ".join(f"{list(t.shape)} {t.dtype} on {t.device.type}" for t in both)
            raise AdapterError(
                f"element: expected float64 on the CPU of shape [d, d] and [d], d = 2 or 3, found {found}"
            )
        excess = float((self.matrix @ self.matrix.T - _unit(self.dimension)).abs().max())
        if not excess < 1e-6:  # written so that nan is refused too
            raise AdapterError(f"element: expected an orthogonal matrix, found M M^T off 1 by {excess:.1e}")

    @property
    def dimension(self) -> int:
        """2 in the plane, 3 in space."""
        return len(self.translation)

    @property
    def sign(self) -> int:
        """The determinant: 1 for a rotation, -1 with a reflection."""
        return 1 if float(torch.linalg.det(self.matrix)) > 0 else -1

    def times(self, matrix: Tensor, x: Tensor) -> Tensor:
        """A matrix of this element on the last axis of x, [..., d] -> [..., d]."""
        return x @ matrix.T.to(x.dtype).to(x.device)  # cast before moving: some devices have no float64

    def moved(self, x: Tensor) -> Tensor:
        """x [..., d] and the translation."""
        return x + self.translation.to(x.dtype).to(x.device)

    def compose(self, other: Rigid) -> Rigid:
        """self after other."""
        return Rigid(self.matrix @ other.matrix, self.matrix @ other.translation + self.translation)

    def inverse(self) -> Rigid:
        return Rigid(self.matrix.T.contiguous(), -(self.matrix.T @ self.translation))


@dataclass(frozen=True, eq=False)
class Rigids(Rigid):
    """A rigid motion for each row of a tensor: the one of the graph that the row belongs to.

    matrix [n, d, d], translation [n, d], float64 on the CPU; ``index`` has the graph of every row.
    """

    index: Tensor

    def __post_init__(self) -> None:
        """Made by `Euclidean.sample_many`, of matrices that are orthogonal."""

    @property
    def dimension(self) -> int:
        return self.translation.shape[-1]

    @property
    def sign(self) -> Any:
        """[n, 1, 1]: of each."""
        return torch.linalg.det(self.matrix).sign()[:, None, None]

    def times(self, matrix: Tensor, x: Tensor) -> Tensor:
        each = matrix.mT.to(x.dtype).to(x.device)[self.index]
        return torch.bmm(x.reshape(len(x), -1, x.shape[-1]), each).reshape(*x.shape[:-1], each.shape[-1])

    def moved(self, x: Tensor) -> Tensor:
        each = self.translation.to(x.dtype).to(x.device)[self.index]
        return x + each.view(len(x), *[1] * (x.dim() - 2), -1)

    def compose(self, other: Rigid) -> Rigids:
        shifted = (self.matrix @ other.translation[..., None])[..., 0] + self.translation
        return Rigids(self.matrix @ other.matrix, shifted, self.index)

    def inverse(self) -> Rigids:
        back = self.matrix.mT.contiguous()
        return Rigids(back, -(back @ self.translation[..., None])[..., 0], self.index)

    def of(self, index: Tensor) -> Rigids:
        """The same motions for other rows."""
        return Rigids(self.matrix, self.translation, index)


def _tensor(values: Any) -> Tensor:
    """float64 on the CPU, whatever the default dtype and device are."""
    return torch.tensor(values, dtype=torch.float64, device="cpu")


def _unit(dimension: int) -> Tensor:
    return torch.eye(dimension, dtype=torch.float64, device="cpu")


@dataclass(frozen=True)
class Euclidean:
    """Rotations of the plane or of space about the origin, with or without reflections and translations."""

    dimension: int
    reflections: bool
    translations: bool

    @property
    def name(self) -> str:
        return f"{'' if self.reflections else 'S'}{'E' if self.translations else 'O'}({self.dimension})"

    def identity(self) -> Rigid:
        return Rigid(_unit(self.dimension), _tensor([0] * self.dimension))

    def sample(self, generator: torch.Generator, *, scale: float = 1.0) -> Rigid:
        """The orthogonal part is uniform (Haar). R^d has no uniform distribution, so the translation is normal
        with standard deviation ``scale`` per coordinate."""
        drawn = self.sample_many(1, generator, scale=scale)
        return Rigid(drawn.matrix[0], drawn.translation[0])

    def sample_many(self, count: int, generator: torch.Generator, *, scale: float = 1.0) -> Rigids:
        """So many of them at once, independent of each other, for as many rows."""
        if not (math.isfinite(scale) and scale >= 0):
            raise ConfigError(f"scale: expected a finite number >= 0, found {scale!r}")
        kind: dict[str, Any] = {"generator": generator, "dtype": torch.float64, "device": generator.device}
        if self.dimension == 3:
            # A normalised Gaussian is uniform on the sphere of unit quaternions.
            quaternion = nn.functional.normalize(torch.randn(count, 4, **kind).cpu(), dim=1)
            w, (x, y, z) = quaternion[:, 0, None, None], quaternion[:, 1:].unbind(1)
            nought = torch.zeros_like(x)
            cross = torch.stack([nought, -z, y, z, nought, -x, -y, x, nought], 1).view(-1, 3, 3)
            matrix = _unit(3) + 2 * (w * cross + cross @ cross)
            mirror = _tensor([-1, -1, -1])
        else:
            angle = 2 * math.pi * torch.rand(count, **kind).cpu()
            cosine, sine = angle.cos(), angle.sin()
            matrix = torch.stack([cosine, -sine, sine, cosine], 1).view(-1, 2, 2)
            mirror = _tensor([1, -1])
        if self.reflections:
            # One fixed reflection after half of the rotations is uniform on O(d).
            mirrored = torch.rand(count, **kind).cpu()[:, None, None] < 0.5
            matrix = torch.where(mirrored, matrix * mirror, matrix)
        shift = _tensor([[0.0] * self.dimension]).expand(count, -1)
        if self.translations:
            shift = scale * torch.randn(count, self.dimension, **kind).cpu()
        return Rigids(matrix, shift, torch.arange(count))


E3 = Euclidean(3, reflections=True, translations=True)
O3 = Euclidean(3, reflections=True, translations=False)
SE3 = Euclidean(3, reflections=False, translations=True)
SO3 = Euclidean(3, reflections=False, translations=False)
E2 = Euclidean(2, reflections=True, translations=True)
O2 = Euclidean(2, reflections=True, translations=False)
SE2 = Euclidean(2, reflections=False, translations=True)
SO2 = Euclidean(2, reflections=False, translations=False)


@dataclass(frozen=True)
class Cyclic:
    """C_n: the n rotations of the plane by multiples of 360/n degrees."""

    n: int

    def __post_init__(self) -> None:
        if not isinstance(self.n, int) or self.n < 1:
            raise ConfigError(f"{type(self).__name__}: expected a whole number n >= 1, found {self.n!r}")

    @property
    def name(self) -> str:
        return f"C_{self.n}"

    def identity(self) -> Rigid:
        return self.rotation(0)

    def rotation(self, k: int) -> Rigid:
        """Counterclockwise by k/n of a full turn. Multiples of 90 degrees have whole numbers as entries."""
        quarters, rest = divmod(4 * k, self.n)
        angle = math.pi / 2 * rest / self.n
        turn = torch.linalg.matrix_power(_rotation(0, 1), quarters % 4)
        return Rigid(turn @ _rotation(math.cos(angle), math.sin(angle)), _tensor([0, 0]))

    def sample(self, generator: torch.Generator, *, scale: float = 1.0) -> Rigid:
        """Uniform. There is nothing for ``scale`` to say."""
        return self.rotation(int(torch.randint(self.n, (), generator=generator, device=generator.device)))


@dataclass(frozen=True)
class Dihedral(Cyclic):
    """D_n: the rotations of C_n, and n reflections. One of them is at the line through the origin whose angle to the
    x axis is ``axis``, in radians; the others are at lines that divide the half turn from there into n parts."""

    axis: float = 0.0

    @property
    def name(self) -> str:
        return f"D_{self.n}"

    def reflection(self, k: int) -> Rigid:
        """At the line of ``axis``, then a rotation by k/n of a full turn."""
        cosine, sine = math.cos(2 * self.axis), math.sin(2 * self.axis)
        mirror = Rigid(_tensor([[cosine, sine], [sine, -cosine]]), _tensor([0, 0]))
        return self.rotation(k).compose(mirror)

    def sample(self, generator: torch.Generator, *, scale: float = 1.0) -> Rigid:
        """Uniform on all 2n elements."""
        drawn = int(torch.randint(2 * self.n, (), generator=generator, device=generator.device))
        return self.rotation(drawn) if drawn < self.n else self.reflection(drawn - self.n)


def _rotation(cosine: float, sine: float) -> Tensor:
    """[2, 2]: counterclockwise."""
    return _tensor([[cosine, -sine], [sine, cosine]])
