"""Groups and their elements: rigid motions of the plane and of space, and finite groups of the plane."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from ..errors import AdapterError


class Element(Protocol):
    """One transformation of a group. An `Action` applies it to tensors."""

    def inverse(self) -> Element:
        """Return the inverse element."""


@runtime_checkable
class Group(Protocol):
    """A group of transformations that can be sampled. Any class with the following members is a group.

    Write groups as frozen dataclasses at module level, because they are pickled with the model's hooks.
    """

    @property
    def name(self) -> str:
        """Name in reports, such as ``SO(3)``."""

    def identity(self) -> Element:
        """Return the element that changes nothing."""

    def sample(self, generator: torch.Generator, *, scale: float = 1.0) -> Element:
        """Return a random element, drawn with ``generator``, from the uniform distribution if the group has one.

        ``scale`` is the typical size of parts that have no uniform distribution, such as translations.
        """


@dataclass(frozen=True, eq=False)  # tensors have no single truth value under ==, so elements compare by identity
class Rigid:
    """The rigid motion that maps x to matrix @ x + translation, in d = 2 or 3 dimensions.

    Raises:
        AdapterError: If a tensor is not float64 on the CPU, a shape is wrong, or the matrix is not orthogonal.
    """

    matrix: Tensor
    """Orthogonal matrix [d, d], float64 on the CPU."""
    translation: Tensor
    """Vector [d], float64 on the CPU."""

    def __post_init__(self) -> None:
        d, both = len(self.translation), (self.matrix, self.translation)
        kinds = {(t.dtype, t.device.type) for t in both}
        if d not in (2, 3) or self.matrix.shape != (d, d) or kinds != {(torch.float64, "cpu")}:
            found = " and ".join(f"{list(t.shape)} {t.dtype} on {t.device.type}" for t in both)
            raise AdapterError(f"element: expected float64 on the CPU, [d, d] and [d] with d = 2 or 3, found {found}")
        excess = float((self.matrix @ self.matrix.T - make_unit(self.dimension)).abs().max())
        if not excess < 1e-6:  # this form also refuses nan
            found = f"M M^T - I with entries up to {excess:.1e}"
            raise AdapterError(f"element: expected an orthogonal matrix M, found {found}")

    @property
    def dimension(self) -> int:
        """Dimension of the space: 2 or 3."""
        return self.translation.shape[-1]

    @property
    def sign(self) -> int:
        """Determinant of the matrix: 1 for rotations, -1 for reflections."""
        return 1 if float(torch.linalg.det(self.matrix)) > 0 else -1

    def multiply(self, matrix: Tensor, x: Tensor) -> Tensor:
        """Return x with its last axis multiplied by ``matrix``, which was computed from this element's matrix."""
        return x @ matrix.T.to(x.dtype).to(x.device)  # cast before moving: some devices have no float64

    def translate(self, x: Tensor) -> Tensor:
        """Return x [..., d] plus the translation."""
        return x + self.translation.to(x.dtype).to(x.device)

    def compose(self, other: Rigid) -> Rigid:
        """Return the motion that applies ``other`` and then this motion."""
        return Rigid(self.matrix @ other.matrix, self.matrix @ other.translation + self.translation)

    def inverse(self) -> Rigid:
        """Return the inverse motion."""
        return Rigid(self.matrix.T.contiguous(), -(self.matrix.T @ self.translation))


@dataclass(frozen=True, eq=False)
class Rigids(Rigid):
    """One rigid motion per graph: matrix [n, d, d] and translation [n, d], applied to the rows of a tensor."""

    index: Tensor
    """For each row, the number of the motion that applies to it (0 to n - 1)."""

    def __post_init__(self) -> None:
        """Skip the checks of `Rigid`, because `Euclidean.sample_many` makes only orthogonal matrices."""

    @property
    def sign(self) -> Any:
        """Determinants of the matrices, [n, 1, 1]."""
        return torch.linalg.det(self.matrix).sign()[:, None, None]

    def multiply(self, matrix: Tensor, x: Tensor) -> Tensor:
        each = matrix.mT.to(x.dtype).to(x.device)[self.index]
        return torch.bmm(x.reshape(len(x), -1, x.shape[-1]), each).reshape(*x.shape[:-1], each.shape[-1])

    def translate(self, x: Tensor) -> Tensor:
        each = self.translation.to(x.dtype).to(x.device)[self.index]
        return x + each.view(len(x), *[1] * (x.dim() - 2), -1)

    def inverse(self) -> Rigids:
        back = self.matrix.mT.contiguous()
        return Rigids(back, -(back @ self.translation[..., None])[..., 0], self.index)


class SampledTogether(ABC):
    """A group of rigid motions that can draw many elements at once, for frames with one element per graph."""

    @abstractmethod
    def sample_many(self, count: int, generator: torch.Generator, *, scale: float = 1.0) -> Rigids:
        """Return ``count`` independent random elements, distributed as in `sample`."""

    def sample(self, generator: torch.Generator, *, scale: float = 1.0) -> Rigid:
        """Return a random element, drawn with ``generator``; see `Group.sample` for ``scale``."""
        drawn = self.sample_many(1, generator, scale=scale)
        return Rigid(drawn.matrix[0], drawn.translation[0])


def make_tensor(values: Any) -> Tensor:
    """Return a float64 tensor on the CPU, independent of the default dtype and device."""
    return torch.tensor(values, dtype=torch.float64, device="cpu")


def make_unit(dimension: int) -> Tensor:
    """Return the unit matrix as a float64 tensor on the CPU."""
    return torch.eye(dimension, dtype=torch.float64, device="cpu")


@dataclass(frozen=True)
class Euclidean(SampledTogether):
    """Rotations about the origin in 2 or 3 dimensions, with or without reflections and translations."""

    dimension: int
    reflections: bool
    translations: bool

    @property
    def name(self) -> str:
        return f"{'' if self.reflections else 'S'}{'E' if self.translations else 'O'}({self.dimension})"

    def identity(self) -> Rigid:
        return Rigid(make_unit(self.dimension), make_tensor([0] * self.dimension))

    def sample_many(self, count: int, generator: torch.Generator, *, scale: float = 1.0) -> Rigids:
        """Return ``count`` random elements: uniform (Haar) orthogonal parts, translations with deviation ``scale``."""
        kind: dict[str, Any] = {"generator": generator, "dtype": torch.float64, "device": generator.device}
        if self.dimension == 3:
            # A normalised Gaussian is uniform on the sphere of unit quaternions.
            quaternion = nn.functional.normalize(torch.randn(count, 4, **kind).cpu(), dim=1)
            w, (x, y, z) = quaternion[:, 0, None, None], quaternion[:, 1:].unbind(1)
            zero = torch.zeros_like(x)
            cross = torch.stack([zero, -z, y, z, zero, -x, -y, x, zero], 1).view(-1, 3, 3)
            matrix = make_unit(3) + 2 * (w * cross + cross @ cross)
            mirror = make_tensor([-1, -1, -1])
        else:
            angle = 2 * math.pi * torch.rand(count, **kind).cpu()
            cosine, sine = angle.cos(), angle.sin()
            matrix = torch.stack([cosine, -sine, sine, cosine], 1).view(-1, 2, 2)
            mirror = make_tensor([1, -1])
        if self.reflections:
            # Rotations, half of them combined with one fixed reflection, are uniform on O(d).
            mirrored = torch.rand(count, **kind).cpu()[:, None, None] < 0.5
            matrix = torch.where(mirrored, matrix * mirror, matrix)
        shift = make_tensor([[0.0] * self.dimension]).expand(count, -1)
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

    @property
    def name(self) -> str:
        return f"C_{self.n}"

    def identity(self) -> Rigid:
        """Return the rotation by 0."""
        return self.rotation(0)

    def rotation(self, k: int) -> Rigid:
        """Return the counterclockwise rotation by k/n of a full turn. Matrices of quarter turns are exact."""
        quarters, rest = divmod(4 * k, self.n)
        cosine, sine = (function(math.pi / 2 * rest / self.n) for function in (math.cos, math.sin))
        turn = torch.linalg.matrix_power(make_tensor([[0, -1], [1, 0]]), quarters % 4)
        return Rigid(turn @ make_tensor([[cosine, -sine], [sine, cosine]]), make_tensor([0, 0]))

    def sample(self, generator: torch.Generator, *, scale: float = 1.0) -> Rigid:
        """Return a uniformly distributed element, drawn with ``generator``; ``scale`` has no effect."""
        return self.rotation(int(torch.randint(self.n, (), generator=generator, device=generator.device)))


@dataclass(frozen=True)
class Dihedral(Cyclic):
    """D_n: the rotations of C_n and n reflections of the plane."""

    axis: float = 0.0
    """Angle in radians between the x axis and the line of the first reflection. The lines of the other reflections
    follow in steps of 180/n degrees."""

    @property
    def name(self) -> str:
        return f"D_{self.n}"

    def reflection(self, k: int) -> Rigid:
        """Return the reflection in the line at ``axis``, followed by a rotation by k/n of a full turn."""
        cosine, sine = math.cos(2 * self.axis), math.sin(2 * self.axis)
        mirror = Rigid(make_tensor([[cosine, sine], [sine, -cosine]]), make_tensor([0, 0]))
        return self.rotation(k).compose(mirror)

    def sample(self, generator: torch.Generator, *, scale: float = 1.0) -> Rigid:
        """Return one of the 2n elements, drawn uniformly with ``generator``; ``scale`` has no effect."""
        drawn = int(torch.randint(2 * self.n, (), generator=generator, device=generator.device))
        return self.rotation(drawn) if drawn < self.n else self.reflection(drawn - self.n)
