"""How the elements of a Euclidean group act on tensors, and on a model's inputs and outputs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, overload

import torch
from torch import Tensor

from ..errors import AdapterError, one_of
from .groups import E3, O3, SE3, SO3, Element, Group
from .parts import part_of, with_part


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
        sign = element.sign
        wigner = _wigner(max((irrep.l for _, irrep in parsed), default=0), sign * element.matrix)
        parts = []
        for (multiplicity, irrep), part in zip(parsed, parsed.slices(), strict=True):
            parity = irrep.p if sign < 0 else 1
            block = x[..., part].reshape(*x.shape[:-1], multiplicity, irrep.dim)
            parts.append(_times(parity * wigner[irrep.l], block).flatten(-2))
        return torch.cat(parts, dim=-1) if parts else x


def _o3() -> Any:
    try:
        from e3nn import o3
    except ImportError as error:
        raise AdapterError("Irreps: e3nn is not installed; pip install e3nn") from error
    return o3


def _wigner(highest: int, rotation: Tensor) -> list[Tensor]:
    """e3nn's Wigner matrices of a rotation, [2l+1, 2l+1] float64 for l = 0..highest.

    e3nn's own D_from_matrix goes through Euler angles (an arc cosine, inaccurate at the poles) and generators
    in the default dtype: six digits, too few to judge a float64 model by. Coupling D_{l-1} with D_1 = R
    through the 3j symbols, which e3nn has in float64, stays at rounding error.
    """
    matrices = [torch.ones_like(rotation[:1, :1]), rotation]
    for degree in range(2, highest + 1):
        c = _o3().wigner_3j(degree - 1, 1, degree, dtype=torch.float64, device=rotation.device).flatten(0, 1)
        matrices.append((2 * degree + 1) * c.T @ torch.kron(matrices[-1], rotation) @ c)
    return matrices


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
                value = None if value is None else part_of(value, step, _label(path))
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
        old = part_of(value, steps[0], where)
        new = _act_at(old, steps[1:], action, element, where)
        return value if new is old else with_part(value, steps[0], new, where)
    try:
        return action(element, value)
    except AdapterError as error:
        raise AdapterError(f"{where}: {error}") from error


__all__ = [
    "E3",
    "O3",
    "SE3",
    "SO3",
    "Action",
    "Element",
    "Group",
    "GroupAction",
    "Invariant",
    "Irreps",
    "Positions",
    "PseudoVectors",
    "Vectors",
]
