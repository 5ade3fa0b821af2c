"""How the elements of a group act on tensors, and on a model's inputs and outputs."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..errors import AdapterError, one_of
from .graphs import Graphs, PerGraph
from .groups import Element, Euclidean, Group, Rigid, Rigids
from .parts import argument, has_part, part_of, positional, required, with_part

X = TypeVar("X", Tensor, None)


class Action(ABC):
    """How an element acts on one tensor: same shape, dtype and device out; None stays None.

    Subclass it as a frozen dataclass at module level: actions are pickled along with the model's hooks."""

    def __call__(self, element: Element, x: X) -> X:
        if x is None:
            return None
        if not isinstance(x, Tensor):
            raise AdapterError(f"{self}: expected a tensor, found {type(x).__name__}")
        return self.act(element, x)

    @abstractmethod
    def act(self, element: Any, x: Tensor) -> Tensor:
        """The transformed tensor, never in place. An element that the action is not made for is an AdapterError."""


@dataclass(frozen=True)
class Invariant(Action):
    """Any tensor under any group, left as it is."""

    def act(self, element: Any, x: Tensor) -> Tensor:
        return x


class _Rigidly(Action):
    """Acts with rigid motions on axes whose size the element knows."""

    axis: int

    def turned_axes(self) -> tuple[int, ...]:
        """The axes the element acts on."""
        return (self.axis,)

    def expected_size(self, element: Rigid) -> int:
        """The size of each of these axes."""
        return element.dimension

    @abstractmethod
    def act_on_last(self, element: Rigid, x: Tensor) -> Tensor:
        """x: float32 or wider, the turned axes last."""

    def act(self, element: Any, x: Tensor) -> Tensor:
        rigid = _rigid(self, element)
        size = self.expected_size(rigid)
        axes = self.turned_axes()
        for found in _sizes(self, x, axes, size):
            if found != size:
                raise AdapterError(f"{self}: expected size {size}, found {found} in shape {list(x.shape)}")
        if not (x.is_floating_point() or x.is_complex()):
            raise AdapterError(f"{self}: expected a floating point tensor, found {x.dtype}")
        return _precisely(partial(self.act_on_last, rigid), x, axes)


def _rigid(action: Action, element: Any, dimension: int | None = None) -> Rigid:
    if not isinstance(element, Rigid):
        raise AdapterError(f"{action}: expected an element of the kind Rigid, found {type(element).__name__}")
    if dimension not in (None, element.dimension):
        raise AdapterError(f"{action}: expected an element of {dimension} dimensions, found {element.dimension}")
    return element


def _sizes(action: Action, x: Tensor, axes: tuple[int, ...], size: object) -> list[int]:
    for axis in axes:
        if not -x.ndim <= axis < x.ndim:
            raise AdapterError(f"{action}: expected size {size}, found no such axis in shape {list(x.shape)}")
    return [x.shape[axis] for axis in axes]


def _precisely(function: Callable[[Tensor], Tensor], x: Tensor, axes: tuple[int, ...]) -> Tensor:
    """function(x with these axes last), the axes back in their places. Computed in float32 or wider and without
    autocast: their rounding would pass for the model's own error."""
    wide = x.float() if x.is_floating_point() and x.dtype.itemsize < 4 else x
    last = tuple(range(-len(axes), 0))
    with torch.autocast(x.device.type, enabled=False):
        turned = function(wide.movedim(axes, last)).movedim(last, axes)
        return turned.to(x.dtype).contiguous()  # models call .view() on their inputs


@dataclass(frozen=True)
class Vectors(_Rigidly):
    """Velocities, forces, displacements: rotate, do not translate. The axis has 2 or 3 entries, as the group has
    dimensions."""

    axis: int = -1

    def act_on_last(self, element: Rigid, x: Tensor) -> Tensor:
        return element.times(element.matrix, x)


@dataclass(frozen=True)
class Positions(Vectors):
    """Points: rotate and translate."""

    def act_on_last(self, element: Rigid, x: Tensor) -> Tensor:
        return element.moved(super().act_on_last(element, x))


@dataclass(frozen=True)
class PseudoVectors(Vectors):
    """Angular momenta, cross products: rotate, and change sign with every reflection besides."""

    def act_on_last(self, element: Rigid, x: Tensor) -> Tensor:
        return element.times(element.sign * element.matrix, x)


@dataclass(frozen=True)
class Tensors(_Rigidly):
    """Tensors of rank 2, such as stress, strain or polarisability: x becomes M x M^T.

    A cell whose rows are lattice vectors is not one: each row rotates for itself, so that is ``Vectors()``."""

    axes: tuple[int, int] = (-2, -1)

    def turned_axes(self) -> tuple[int, ...]:
        return self.axes

    def act_on_last(self, element: Rigid, x: Tensor) -> Tensor:
        return element.times(element.matrix, element.times(element.matrix, x).mT).mT


@dataclass(frozen=True)
class Irreps(_Rigidly):
    """Features laid out by e3nn irreps, such as ``"8x0e+4x1o"``, under groups of space (3 dimensions). Needs e3nn
    when it is first used."""

    irreps: str
    axis: int = -1

    def __post_init__(self) -> None:
        object.__setattr__(self, "irreps", str(self.irreps))  # an o3.Irreps will do as well

    def _parsed(self) -> Any:
        try:
            return _o3().Irreps(self.irreps)
        except (ValueError, AssertionError) as error:
            raise AdapterError(f"irreps {self.irreps!r}: expected e3nn's notation: {error}") from error

    def expected_size(self, element: Rigid) -> int:
        _rigid(self, element, dimension=3)
        return int(self._parsed().dim)

    def act_on_last(self, element: Rigid, x: Tensor) -> Tensor:
        parsed = self._parsed()
        sign = element.sign
        wigner = _wigner(max((irrep.l for _, irrep in parsed), default=0), sign * element.matrix)
        parts = []
        for (multiplicity, irrep), part in zip(parsed, parsed.slices(), strict=True):
            parity = sign if irrep.p < 0 else 1
            block = x[..., part].reshape(*x.shape[:-1], multiplicity, irrep.dim)
            parts.append(element.times(parity * wigner[irrep.l], block).flatten(-2))
        return torch.cat(parts, dim=-1) if parts else x


def _o3() -> Any:
    try:
        # e3nn 0.4 has slices in its file of constants, which torch reads only where they are named.
        with torch.serialization.safe_globals([slice]):
            from e3nn import o3
    except ImportError as error:
        raise AdapterError("Irreps: e3nn is not installed; pip install e3nn") from error
    return o3


def _wigner(highest: int, rotation: Tensor) -> list[Tensor]:
    """e3nn's Wigner matrices of rotations [..., 3, 3], [..., 2l+1, 2l+1] float64 for l = 0..highest.

    e3nn's own D_from_matrix goes through Euler angles (an arc cosine, inaccurate at the poles) and generators
    in the default dtype: six digits, too few to judge a float64 model by. Coupling D_{l-1} with D_1 = R
    through the 3j symbols, which e3nn has in float64, stays at rounding error.
    """
    matrices = [torch.ones_like(rotation[..., :1, :1]), rotation]
    for degree in range(2, highest + 1):
        c = _o3().wigner_3j(degree - 1, 1, degree, dtype=torch.float64, device=rotation.device).flatten(0, 1)
        both = torch.einsum("...ij,...kl->...ikjl", matrices[-1], rotation).flatten(-4, -3).flatten(-2)
        matrices.append((2 * degree + 1) * c.T @ both @ c)
    return matrices


@dataclass(frozen=True)
class Grid(Action):
    """An image [..., H, W] or a field on a grid, rotated about its centre under groups of the plane.

    ``axes`` are the rows and the columns. x points right and y up, so a positive angle turns the image
    counterclockwise, as ``torch.rot90(x, 1, (-2, -1))`` does. Multiples of 90 degrees and the reflections between
    them move whole pixels, bit for bit. Other elements resample bilinearly, with zeros outside the image; what that
    loses is part of a measured error, so C_4 measures a model alone.

    ``of`` is the action on the channels of every pixel: ``Grid(of=Vectors(axis=-3))`` is a vector field
    [..., 2, H, W]."""

    of: Action = field(default_factory=Invariant)
    axes: tuple[int, int] = (-2, -1)

    def act(self, element: Any, x: Tensor) -> Tensor:
        rigid = _rigid(self, element, dimension=2)
        if isinstance(rigid, Rigids):
            raise AdapterError(f"{self}: expected one element for the whole batch, found one for each graph")
        if rigid.translation.any():
            shift = rigid.translation.tolist()
            raise AdapterError(f"{self}: expected an element without translation, found {shift}; use O2 or SO2")
        height, width = _sizes(self, x, self.axes, "H and W")
        x = self.of(rigid, x)
        # Composed quarter turns of the plane are off by rounding; 1e-9 of an image is far below a pixel.
        if float((rigid.matrix - rigid.matrix.round()).abs().max()) < 1e-9:
            cosine, sine = (int(entry) for entry in rigid.matrix[:, 0].round())
            quarters = {(1, 0): 0, (0, 1): 1, (-1, 0): 2, (0, -1): 3}[cosine, sine]
            if quarters % 2 and height != width:
                raise AdapterError(f"{self}: expected H = W for a turn of 90 degrees, found {height} and {width}")
            upright = x if rigid.sign > 0 else x.flip(self.axes[0])  # M = rotation after y -> -y
            return torch.rot90(upright, quarters, self.axes).contiguous()
        if not x.is_floating_point():
            raise AdapterError(f"{self}: expected a floating point tensor to resample, found {x.dtype}")
        return _precisely(partial(_resampled, rigid.matrix), x, self.axes)


def _resampled(matrix: Tensor, x: Tensor) -> Tensor:
    """x: [..., H, W]; every pixel p takes the value at matrix^-1 p."""
    height, width = x.shape[-2:]
    columns = torch.arange(width, dtype=matrix.dtype, device=matrix.device) - (width - 1) / 2
    rows = (height - 1) / 2 - torch.arange(height, dtype=matrix.dtype, device=matrix.device)
    points = torch.stack([columns.expand(height, width), rows[:, None].expand(height, width)], dim=-1)
    # grid_sample wants (column, row), each from -1 to 1 between the outer edges of the image
    source = points @ matrix * matrix.new_tensor([2 / width, -2 / height])
    flat = x.reshape(1, math.prod(x.shape[:-2]), height, width)
    sampled = torch.nn.functional.grid_sample(flat, source[None].to(x.dtype).to(x.device), align_corners=False)
    return sampled.reshape(x.shape)


@dataclass(frozen=True)
class GroupAction:
    """How a group acts on a model.

    ``inputs`` are keyed by the forward's parameter name, or by a dotted path into one argument (``"graph.pos"``: a
    PyG graph, another object or a dict). What is not mentioned does not change. ``outputs`` is one action for a
    tensor, a sequence for a tuple, a mapping (keys or dotted paths) for a dict or object. None leaves an output as
    it is, and it is not compared. A path that ends in "?" (``"data.cell?"``) names a part that some calls go without.
    ``graphs`` says which rows of a batch belong together, so that random frames can have an element for each graph
    rather than one for the batch. ``beside`` names outputs that are compared only where there are no others: energies
    with the constants of single atoms in them are so large that beside them any error of the forces is small.
    """

    group: Group
    inputs: Mapping[str, Action]
    outputs: Action | Sequence[Action | None] | Mapping[str, Action | None]
    graphs: Graphs | None = None
    beside: Collection[str] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.group, Group):
            raise AdapterError(f"group: expected name, identity() and sample(), found {type(self.group).__name__}")
        # own copies: the caller's containers may change later
        object.__setattr__(self, "inputs", dict(self.inputs))
        if not isinstance(self.outputs, Action):
            own = dict(self.outputs) if isinstance(self.outputs, Mapping) else tuple(self.outputs)
            object.__setattr__(self, "outputs", own)

    def frame(
        self, generator: torch.Generator, names: Sequence[str], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Element:
        """A random element without translation, or one for each graph of the batch where that is known."""
        found = None
        if self.graphs is not None and isinstance(self.group, Euclidean):
            found = self.graphs.look(names, args, kwargs)
        if found is None:
            return self.group.sample(generator, scale=0.0)
        assert isinstance(self.group, Euclidean)
        return PerGraph(self.group.sample_many(found.most, generator, scale=0.0), found)

    def act_on_inputs(
        self,
        element: Element,
        signature_names: Sequence[str],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """New (args, kwargs); the caller's are not touched. ``signature_names`` are the forward's parameters in
        order without self, ``*rest`` and ``**more`` with their stars. A parameter that the call leaves at its
        default stays there."""
        new_args, new_kwargs = list(args), dict(kwargs)
        by_position = positional(signature_names)
        for said, action in self.inputs.items():
            path, needed = required(said)
            name, *steps = path.split(".")
            where = f"input {path!r}"
            if not needed and not has_part(argument(name, signature_names, args, kwargs), steps):
                continue
            if name in new_kwargs:
                new_kwargs[name] = _act_at(new_kwargs[name], steps, action, element, where, path)
            elif name not in signature_names:
                raise AdapterError(one_of("input of the forward", name, signature_names))
            elif name in by_position and (i := by_position.index(name)) < len(new_args):
                new_args[i] = _act_at(new_args[i], steps, action, element, where, path)
        return tuple(new_args), new_kwargs

    def act_on_outputs(self, element: Element, output: Any) -> Any:
        """A new output of the same structure."""
        for path, action in self._output_paths(output):
            output = _act_at(output, path, action, element, _label(path))
        return output

    def compared(self, output: Any) -> dict[str, Tensor]:
        """The tensors of an output that errors are measured on, by name (``output``, ``output.1``, ``output.x``)."""
        found = self._acted_on(output)
        judged = {name: tensor for name, tensor in found.items() if name.partition(".")[2] not in self.beside}
        return judged or found

    def _acted_on(self, output: Any) -> dict[str, Tensor]:
        """The tensors of an output that have an action."""
        found = {}
        for path, _ in self._output_paths(output):
            value = output
            for step in path:
                value = None if value is None else part_of(value, step, _label(path))
            if value is not None:
                found[_label(path)] = value
        return found

    def mean(self, outputs: Sequence[Any]) -> Any:
        """One output, with the mean of every tensor that has an action. The rest is the first one's."""
        mean = outputs[0]
        found = [self._acted_on(output) for output in outputs]
        for path, _ in self._output_paths(mean):
            if _label(path) in found[0]:  # it may be one that the model leaves out
                mean = _put(mean, path, torch.stack([each[_label(path)] for each in found]).mean(0))
        return mean

    def _output_paths(self, output: Any) -> list[tuple[list[str], Action]]:
        if isinstance(self.outputs, Action):
            return [([], self.outputs)]
        if isinstance(self.outputs, Mapping):
            found = []
            for said, action in self.outputs.items():
                path, needed = required(said)
                steps = path.split(".")
                if action is not None and (needed or has_part(output, steps)):
                    found.append((steps, action))
            return found
        expected = len(self.outputs)
        if not isinstance(output, (tuple, list)) or len(output) != expected:
            size = f" of {len(output)}" if isinstance(output, (tuple, list)) else ""
            kind = f"{type(output).__name__}{size}"
            raise AdapterError(f"output: the action is for a tuple of {expected}, found {kind}")
        return [([str(i)], action) for i, action in enumerate(self.outputs) if action is not None]


def _label(path: Sequence[str]) -> str:
    return ".".join(["output", *path])


def _put(value: Any, steps: Sequence[str], new: Tensor) -> Any:
    if not steps:
        return new
    inner = _put(part_of(value, steps[0], "output"), steps[1:], new)
    return with_part(value, steps[0], inner, "output")


def _act_at(value: Any, steps: Sequence[str], action: Action, element: Element, where: str, path: str = "") -> Any:
    """The action at one place of a value; ``path`` is that of an input."""
    if value is None:  # an optional argument or output that is not there
        return None
    if steps:
        old = part_of(value, steps[0], where)
        new = _act_at(old, steps[1:], action, element, where, path)
        return value if new is old else with_part(value, steps[0], new, where)
    try:
        if isinstance(element, PerGraph) and not isinstance(action, Invariant):
            element = element.at(value, path)
        return action(element, value)
    except AdapterError as error:
        raise AdapterError(f"{where}: {error}") from error
