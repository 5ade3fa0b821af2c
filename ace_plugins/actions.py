"""How the elements of a Euclidean group act on tensors, and on a model's inputs and outputs."""

from __future__ import annotations

import copy
import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, overload

import torch
from torch import Tensor

from ace_plugins.errors import AdapterError, ConfigError, one_of


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


O3 = Group("O3", reflections=True, translations=False)
SO3 = Group("SO3", reflections=False, translations=False)
E3 = Group("E3", reflections=True, translations=True)
SE3 = Group("SE3", reflections=False, translations=True)


class Action(ABC):
    """How an element acts on one tensor: same shape, dtype and device out; None stays None.

    Subclass it as a frozen dataclass at module level: actions are pickled along with the model's hooks."""

    @overload
    def __call__(self, element: Element, x: None) -> None: ...
    @overload
    def __call__(self, element: Element, x: Tensor) -> Tensor: ...
    def __call__(self, element: Element, x: Tensor | None) -> Tensor | None:
        if x is None:
            return None
        if not isinstance(x, Tensor):
            raise AdapterError(f"{self}: expected a tensor, found {type(x).__name__}")
        return self.act(element, x)

    @abstractmethod
    def act(self, element: Element, x: Tensor) -> Tensor:
        """The transformed tensor; never in place."""


@dataclass(frozen=True)
class Invariant(Action):
    """Any tensor, left as it is."""

    def act(self, element: Element, x: Tensor) -> Tensor:
        return x


class _AlongAxis(Action):
    """Acts on one axis of known size: [..., size, ...]."""

    axis: int

    @property
    def size(self) -> int:
        return 3

    @abstractmethod
    def act_on_last(self, element: Element, x: Tensor) -> Tensor:
        """x: [..., size], float32 or wider."""

    def act(self, element: Element, x: Tensor) -> Tensor:
        found = x.shape[self.axis] if -x.ndim <= self.axis < x.ndim else "no such axis"
        if found != self.size:
            raise AdapterError(f"{self}: expected size {self.size}, found {found} in shape {list(x.shape)}")
        if not (x.is_floating_point() or x.is_complex()):
            raise AdapterError(f"{self}: expected a floating point tensor, found {x.dtype}")
        wide = x.float() if x.is_floating_point() and x.dtype.itemsize < 4 else x
        # autocast's rounding would pass for the model's own error
        with torch.autocast(x.device.type, enabled=False):
            out = self.act_on_last(element, wide.movedim(self.axis, -1)).movedim(-1, self.axis)
        return out.to(x.dtype).contiguous()  # models call .view() on their inputs


def _times(matrix: Tensor, x: Tensor) -> Tensor:
    # cast before moving: some devices have no float64
    return x @ matrix.T.to(x.dtype).to(x.device)


@dataclass(frozen=True)
class Vectors(_AlongAxis):
    """Velocities, forces, displacements: rotate, do not translate."""

    axis: int = -1

    def act_on_last(self, element: Element, x: Tensor) -> Tensor:
        return _times(element.matrix, x)


@dataclass(frozen=True)
class Positions(Vectors):
    """Points: rotate and translate."""

    def act_on_last(self, element: Element, x: Tensor) -> Tensor:
        return super().act_on_last(element, x) + element.translation.to(x.dtype).to(x.device)


@dataclass(frozen=True)
class PseudoVectors(Vectors):
    """Angular momenta, cross products: rotate, and keep their sign under inversion."""

    def act_on_last(self, element: Element, x: Tensor) -> Tensor:
        return element.sign * super().act_on_last(element, x)


@dataclass(frozen=True)
class Irreps(_AlongAxis):
    """Features laid out by e3nn irreps, such as ``"8x0e+4x1o"``; needs e3nn when it is first used."""

    irreps: str
    axis: int = -1

    def __post_init__(self) -> None:
        object.__setattr__(self, "irreps", str(self.irreps))  # an o3.Irreps will do as well

    def _parsed(self) -> Any:
        try:
            return _o3().Irreps(self.irreps)
        except (ValueError, AssertionError) as error:
            raise AdapterError(f"irreps {self.irreps!r}: expected e3nn's notation: {error}") from error

    @property
    def size(self) -> int:
        return int(self._parsed().dim)

    def act_on_last(self, element: Element, x: Tensor) -> Tensor:
        parsed = self._parsed()
        rotation = element.sign * element.matrix
        parts = []
        for (multiplicity, irrep), part in zip(parsed, parsed.slices(), strict=True):
            parity = irrep.p if element.sign < 0 else 1
            block = x[..., part].reshape(*x.shape[:-1], multiplicity, irrep.dim)
            parts.append(_times(parity * _wigner(irrep.l, rotation), block).flatten(-2))
        return torch.cat(parts, dim=-1) if parts else x


def _o3() -> Any:
    try:
        from e3nn import o3
    except ImportError as error:
        raise AdapterError("Irreps: e3nn is not installed; pip install ace-plugins[irreps]") from error
    return o3


def _wigner(degree: int, rotation: Tensor) -> Tensor:
    """e3nn's Wigner matrix of a rotation, [2l+1, 2l+1] float64.

    e3nn's own D_from_matrix goes through Euler angles (an arc cosine, inaccurate at the poles) and generators
    in the default dtype: six digits, too few to judge a float64 model by. Coupling D_{l-1} with D_1 = R
    through the 3j symbols, which e3nn has in float64, stays at rounding error.
    """
    if degree == 0:
        return torch.ones_like(rotation[:1, :1])
    matrix = rotation
    for higher in range(2, degree + 1):
        c = _o3().wigner_3j(higher - 1, 1, higher, dtype=torch.float64, device=rotation.device)
        matrix = (2 * higher + 1) * torch.einsum("ijm,ip,jq,pqn->mn", c, matrix, rotation, c)
    return matrix


@dataclass(frozen=True)
class GroupAction:
    """How a group acts on a model.

    ``inputs``: by the forward's parameter name, or a dotted path into one argument (``"graph.pos"``: a PyG
    graph, another object or a dict); what is not mentioned does not change. ``outputs``: one action for a
    tensor, a sequence for a tuple, a mapping (keys or dotted paths) for a dict or object; None: left as it is
    and not compared.
    """

    group: Group
    inputs: Mapping[str, Action]
    outputs: Action | Sequence[Action | None] | Mapping[str, Action | None]

    def __post_init__(self) -> None:
        # own copies: the caller's containers may change later
        object.__setattr__(self, "inputs", dict(self.inputs))
        if not isinstance(self.outputs, Action):
            own = dict(self.outputs) if isinstance(self.outputs, Mapping) else tuple(self.outputs)
            object.__setattr__(self, "outputs", own)

    def act_on_inputs(
        self,
        element: Element,
        signature_names: Sequence[str],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """New (args, kwargs); the caller's are not touched. ``signature_names``: the forward's parameters in
        order without self, ``*rest`` and ``**more`` with their stars. A parameter that the call leaves at its
        default stays there."""
        new_args, new_kwargs = list(args), dict(kwargs)
        by_position = list(takewhile(lambda name: not name.startswith("*"), signature_names))
        for path, action in self.inputs.items():
            name, *steps = path.split(".")
            where = f"input {path!r}"
            if name in new_kwargs:
                new_kwargs[name] = _act_at(new_kwargs[name], steps, action, element, where)
            elif name not in signature_names:
                raise AdapterError(one_of("input of the forward", name, signature_names))
            elif name in by_position and (i := by_position.index(name)) < len(new_args):
                new_args[i] = _act_at(new_args[i], steps, action, element, where)
        return tuple(new_args), new_kwargs

    def act_on_outputs(self, element: Element, output: Any) -> Any:
        """A new output of the same structure."""
        for path, action in self._output_paths(output):
            output = _act_at(output, path, action, element, _label(path))
        return output

    def compared(self, output: Any) -> dict[str, Tensor]:
        """The tensors of an output that have an action, by name (``output``, ``output.1``, ``output.x``)."""
        found = {}
        for path, _ in self._output_paths(output):
            value = output
            for step in path:
                value = None if value is None else _get(value, step, _label(path))
            if value is not None:
                found[_label(path)] = value
        return found

    def _output_paths(self, output: Any) -> list[tuple[list[str], Action]]:
        if isinstance(self.outputs, Action):
            return [([], self.outputs)]
        if isinstance(self.outputs, Mapping):
            return [(path.split("."), action) for path, action in self.outputs.items() if action is not None]
        expected = len(self.outputs)
        if not isinstance(output, (tuple, list)) or len(output) != expected:
            size = f" of {len(output)}" if isinstance(output, (tuple, list)) else ""
            found = f"{type(output).__name__}{size}"
            raise AdapterError(f"output: the action is for a tuple of {expected}, found {found}")
        return [([str(i)], action) for i, action in enumerate(self.outputs) if action is not None]


def _label(path: Sequence[str]) -> str:
    return ".".join(["output", *path])


def _act_at(value: Any, steps: Sequence[str], action: Action, element: Element, where: str) -> Any:
    if value is None:  # an optional argument or output that is not there
        return None
    if steps:
        old = _get(value, steps[0], where)
        new = _act_at(old, steps[1:], action, element, where)
        return value if new is old else _with(value, steps[0], new, where)
    try:
        return action(element, value)
    except AdapterError as error:
        raise AdapterError(f"{where}: {error}") from error


def _get(value: Any, step: str, where: str) -> Any:
    if isinstance(value, (tuple, list)) and step.isdecimal() and int(step) < len(value):
        return value[int(step)]
    keyed = callable(getattr(value, "keys", None))
    # a PyG graph answers None for x, pos and others it does not hold, so its keys are asked, not hasattr
    known = list(value.keys()) if keyed else list(getattr(value, "__dict__", ()))
    if not (step in known if keyed else hasattr(value, step)):
        raise AdapterError(f"{where}: " + one_of(f"part of {type(value).__name__}", step, map(str, known)))
    return value[step] if isinstance(value, Mapping) else getattr(value, step)


def _with(value: Any, step: str, new: Any, where: str) -> Any:
    """A shallow copy of the container, one part replaced."""
    try:
        if isinstance(value, (tuple, list)) and step.isdecimal():
            items = [new if i == int(step) else item for i, item in enumerate(value)]
            return value._make(items) if hasattr(value, "_make") else type(value)(items)
        if hasattr(value, "_replace"):
            return value._replace(**{step: new})
        if dataclasses.is_dataclass(value) and not isinstance(value, (type, Mapping)):
            return dataclasses.replace(value, **{step: new})
        changed = copy.copy(value)
        if isinstance(value, Mapping):
            changed[step] = new
        else:
            setattr(changed, step, new)
    except (AttributeError, TypeError, ValueError) as error:
        raise AdapterError(f"{where}: a copy of {type(value).__name__} cannot take it: {error}") from error
    return changed
