"""Group actions on tensors, and on a model's inputs and outputs."""

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
from .graphs import Graphs, PerGraph, Rows
from .groups import Element, Group, Rigid, Rigids, SampledTogether
from .parts import bind_arguments, find_at, get_part, positional_names, replace_part

X = TypeVar("X", Tensor, None)

ANGLE = 1e-4  # angle of the rotations from which generators are computed, in radians; the error is ANGLE^2 / 6


class Action(ABC):
    """An action of group elements on one tensor. It keeps shape, dtype and device, and returns None for None.

    Write subclasses as frozen dataclasses at module level, because they are pickled with the model's hooks.
    """

    def __call__(self, element: Element, x: X) -> X:
        if x is None:
            return None
        if not isinstance(x, Tensor):
            raise AdapterError(f"{self}: expected a tensor, found {type(x).__name__}")
        return self.act(element, x)

    @abstractmethod
    def act(self, element: Any, x: Tensor) -> Tensor:
        """Return x transformed by ``element``. Raise an AdapterError if the element or the tensor is not supported."""


@dataclass(frozen=True)
class Invariant(Action):
    """The trivial action: the tensor does not change."""

    def act(self, element: Any, x: Tensor) -> Tensor:
        return x


class _Rigidly(Action):
    """Base class of actions in which a rigid motion transforms one or several axes of a tensor."""

    axis: int

    def acted_axes(self) -> tuple[int, ...]:
        """Return the axes that the element acts on."""
        return (self.axis,)

    def expected_size(self, element: Rigid) -> int:
        """Return the size that each acted axis must have for ``element``."""
        return element.dimension

    @abstractmethod
    def act_on_last(self, element: Rigid, x: Tensor) -> Tensor:
        """Return x transformed by ``element``. x is float32 or wider and has the acted axes last."""

    def act(self, element: Any, x: Tensor) -> Tensor:
        size, axes = self.expected_size(_rigid(self, element)), self.acted_axes()
        for axis in axes:
            if not -x.ndim <= axis < x.ndim or x.shape[axis] != size:
                raise AdapterError(f"{self}: expected size {size} in axis {axis}, found shape {list(x.shape)}")
        if not (x.is_floating_point() or x.is_complex()):
            raise AdapterError(f"{self}: expected a floating point tensor, found {x.dtype}")
        return _apply_wide(partial(self.act_on_last, element), x, axes)


def _rigid(action: Action, element: Any, dimension: int | None = None) -> Rigid:
    if not isinstance(element, Rigid):
        raise AdapterError(f"{action}: expected a group element of type Rigid, found {type(element).__name__}")
    if dimension not in (None, element.dimension):
        raise AdapterError(f"{action}: expected an element in {dimension} dimensions, found {element.dimension}")
    return element


def _apply_wide(function: Callable[[Tensor], Tensor], x: Tensor, axes: tuple[int, ...]) -> Tensor:
    """Apply a function to x with these axes moved to the end, in float32 or wider, to avoid large rounding errors."""
    wide = x.float() if x.is_floating_point() and x.dtype.itemsize < 4 else x
    last = tuple(range(-len(axes), 0))
    with torch.autocast(x.device.type, enabled=False):
        turned = function(wide.movedim(axes, last)).movedim(last, axes)
        return turned.to(x.dtype).contiguous()  # contiguous, because models call .view() on their inputs


@dataclass(frozen=True)
class Vectors(_Rigidly):
    """Action on velocities, forces or displacements: they rotate and do not translate."""

    axis: int = -1
    """Axis of the coordinates. Its size is the dimension of the group's space: 2 or 3."""

    def act_on_last(self, element: Rigid, x: Tensor) -> Tensor:
        return element.multiply(element.matrix, x)


@dataclass(frozen=True)
class Positions(Vectors):
    """Action on points: they rotate and translate."""

    def act_on_last(self, element: Rigid, x: Tensor) -> Tensor:
        return element.translate(super().act_on_last(element, x))


@dataclass(frozen=True)
class PseudoVectors(Vectors):
    """Action on angular momenta or cross products: they rotate, and reflections also change their sign."""

    def act_on_last(self, element: Rigid, x: Tensor) -> Tensor:
        return element.multiply(element.sign * element.matrix, x)


@dataclass(frozen=True)
class Tensors(_Rigidly):
    """Action on tensors x of rank 2, such as stress, strain or polarisability: x becomes M x M^T.

    Use `Vectors` for a cell that has lattice vectors as rows: its rows rotate independently.
    """

    axes: tuple[int, int] = (-2, -1)

    def acted_axes(self) -> tuple[int, ...]:
        return self.axes

    def act_on_last(self, element: Rigid, x: Tensor) -> Tensor:
        return element.multiply(element.matrix, element.multiply(element.matrix, x).mT).mT


@dataclass(frozen=True)
class Irreps(_Rigidly):
    """Action of groups of 3-dimensional space on features in the layout of e3nn irreps. Needs e3nn on first use."""

    irreps: str
    """Irreps in e3nn's notation, such as ``"8x0e+4x1o"``, or an ``o3.Irreps``."""
    axis: int = -1
    """Axis of the features."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "irreps", str(self.irreps))  # accepts an o3.Irreps

    def expected_size(self, element: Rigid) -> int:
        _rigid(self, element, dimension=3)
        return int(_o3().Irreps(self.irreps).dim)

    def act_on_last(self, element: Rigid, x: Tensor) -> Tensor:
        parsed, sign = _o3().Irreps(self.irreps), element.sign
        wigner = _wigner(max((irrep.l for _, irrep in parsed), default=0), sign * element.matrix)
        parts = []
        for (multiplicity, irrep), part in zip(parsed, parsed.slices(), strict=True):
            parity = sign if irrep.p < 0 else 1
            block = x[..., part].reshape(*x.shape[:-1], multiplicity, irrep.dim)
            parts.append(element.multiply(parity * wigner[irrep.l], block).flatten(-2))
        return torch.cat(parts, dim=-1) if parts else x


def _o3() -> Any:
    try:
        # The file of constants in e3nn 0.4 contains slices, which torch only loads if they are declared safe.
        with torch.serialization.safe_globals([slice]):
            from e3nn import o3
    except ImportError as error:
        raise AdapterError("Irreps: e3nn is not installed; pip install e3nn") from error
    return o3


def _wigner(highest: int, rotation: Tensor) -> list[Tensor]:
    """Return e3nn's Wigner matrices D_l [..., 2l+1, 2l+1] of rotations R [..., 3, 3], in float64 for l = 0..highest.

    e3nn's own D_from_matrix has six accurate digits. Here D_l is computed from D_{l-1} and D_1 = R with 3j symbols.
    """
    matrices = [torch.ones_like(rotation[..., :1, :1]), rotation]
    for degree in range(2, highest + 1):
        c = _o3().wigner_3j(degree - 1, 1, degree, dtype=torch.float64, device=rotation.device).flatten(0, 1)
        both = torch.einsum("...ij,...kl->...ikjl", matrices[-1], rotation).flatten(-4, -3).flatten(-2)
        matrices.append((2 * degree + 1) * c.T @ both @ c)
    return matrices


@dataclass(frozen=True)
class Grid(Action):
    """Action of groups of the plane on an image [..., H, W] or a field on a grid. The centre stays fixed.

    A positive angle rotates the image counterclockwise, as ``torch.rot90(x, 1, (-2, -1))`` does. Rotations by multiples
    of 90 degrees, and reflections combined with them, are exact. Other elements are resampled bilinearly with zeros
    outside the image. Resampling adds to every measured error, so measure with C_4 or D_4 where possible.
    """

    of: Action = field(default_factory=Invariant)
    """Action on the channels of every pixel: ``Grid(of=Vectors(axis=-3))`` is a vector field [..., 2, H, W]."""
    axes: tuple[int, int] = (-2, -1)
    """Axes of the rows and the columns."""

    def act(self, element: Any, x: Tensor) -> Tensor:
        rigid = _rigid(self, element, dimension=2)
        if isinstance(rigid, Rigids):
            raise AdapterError(f"{self}: expected one group element for the whole batch, found one per graph")
        if rigid.translation.any():
            raise AdapterError(f"{self}: expected a group without translations; use O2 or SO2")
        height, width = (x.shape[axis] for axis in self.axes)
        x = self.of(rigid, x)
        # Composed quarter turns contain rounding errors; 1e-9 of an image is far less than a pixel.
        if float((rigid.matrix - rigid.matrix.round()).abs().max()) < 1e-9:
            cosine, sine = (int(entry) for entry in rigid.matrix[:, 0].round())
            quarters = {(1, 0): 0, (0, 1): 1, (-1, 0): 2, (0, -1): 3}[cosine, sine]
            if quarters % 2 and height != width:
                raise AdapterError(f"{self}: expected H = W for a turn of 90 degrees, found {height} and {width}")
            upright = x if rigid.sign > 0 else x.flip(self.axes[0])  # M = rotation after y -> -y
            return torch.rot90(upright, quarters, self.axes).contiguous()
        return _apply_wide(partial(_resample, rigid.matrix), x, self.axes)


def _resample(matrix: Tensor, x: Tensor) -> Tensor:
    """Return the image y(p) = x(matrix^-1 p) for the pixels p of x [..., H, W], interpolated."""
    height, width = x.shape[-2:]
    columns = torch.arange(width, dtype=matrix.dtype, device=matrix.device) - (width - 1) / 2
    rows = (height - 1) / 2 - torch.arange(height, dtype=matrix.dtype, device=matrix.device)
    points = torch.stack([columns.expand(height, width), rows[:, None].expand(height, width)], dim=-1)
    # grid_sample expects (column, row), each from -1 to 1 between the outer edges of the image.
    source = points @ matrix * matrix.new_tensor([2 / width, -2 / height])
    flat = x.reshape(1, math.prod(x.shape[:-2]), height, width)
    sampled = torch.nn.functional.grid_sample(flat, source[None].to(x.dtype).to(x.device), align_corners=False)
    return sampled.reshape(x.shape)


@dataclass(frozen=True)
class GroupAction:
    """The action of a group on a model's inputs and outputs.

        GroupAction(E3, inputs={"pos": Positions()}, outputs=Invariant(), graphs=Graphs(batch="batch"))

    A path names a parameter of the forward pass (``"pos"``). A path with dots leads to an attribute or key of an
    argument (``"graph.pos"``). A path that ends in "?" may be missing (``"data.cell?"``).
    """

    group: Group
    inputs: Mapping[str, Action]
    """Mapping from the path of an input to the action on it. Inputs that are not listed are not transformed."""
    outputs: Action | Sequence[Action | None] | Mapping[str, Action | None]
    """One action if the output is a tensor, a sequence of actions for a tuple, a mapping from paths to actions for a
    dict or object. None instead of an action excludes that output: it is neither transformed nor compared."""
    graphs: Graphs | None = None
    """Mapping from rows to the graphs of a batch. If given, random frames use one element per graph, not per batch."""
    beside: Collection[str] = ()
    """Outputs that are compared only if the model returns no other output. An example is a total energy: it is so large
    that an error of the forces would not show next to it."""

    def sample_frame(
        self, generator: torch.Generator, names: Sequence[str], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Element:
        """Return a random element without translation, or one per graph if ``graphs`` finds the rows of this call.

        ``generator`` is the source of random numbers. For ``names``, ``args`` and ``kwargs`` see `act_on_inputs`.
        """
        rows = None if self.graphs is None else self.graphs.find_rows(names, args, kwargs)
        if rows is None or not isinstance(self.group, SampledTogether):
            return self.group.sample(generator, scale=0.0)
        # One element per node is enough. Counting the graphs would need a synchronisation with the device.
        return PerGraph(self.group.sample_many(len(rows.nodes), generator, scale=0.0), rows)

    def find_samples(
        self, names: Sequence[str], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Rows | None, list[Tensor]]:
        """Return the sample that each row of a batch belongs to, and the floating point ``inputs`` with these rows.

        Without ``graphs``, every row is a sample. If no input has rows, return None and no inputs. For ``names``,
        ``args`` and ``kwargs`` see `act_on_inputs`.
        """
        given = bind_arguments(names, args, kwargs)
        found = [find_at(given, path.removesuffix("?")) for path in self.inputs]
        tensors = [x for x in found if isinstance(x, Tensor) and x.is_floating_point() and x.dim()]
        if not tensors:
            return None, []
        rows = None if self.graphs is None else self.graphs.find_rows(names, args, kwargs)
        if rows is None:
            every = torch.arange(len(tensors[0]), device=tensors[0].device)
            # Without a batch vector, all nodes belong to one graph.
            rows = Rows(every, {}, dense=True) if self.graphs is None else Rows(torch.zeros_like(every), {})
        same = [x for x in tensors if len(x) == len(rows.nodes)]
        return (rows, same) if same else (None, [])

    def act_on_inputs(
        self, element: Element, names: Sequence[str], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return copies of a call's arguments ``args`` and ``kwargs``, transformed by ``element``.

        ``names`` are the parameters of the forward pass in order, without self. ``*rest`` and ``**more`` keep their
        stars. Parameters that the call does not pass stay at their defaults.

        Raises:
            AdapterError: If a listed input does not exist or its action cannot transform it.
        """
        given = bind_arguments(names, args, kwargs)
        for path, action in _find_paths(self.inputs, given):
            name = path.partition(".")[0]
            if name in given:
                given = _transform(given, path, action, element, f"input {path!r}")
            elif name not in names:
                raise AdapterError(one_of("forward argument", name, names))
        by_position = [given[name] for name in positional_names(names)[: len(args)]]
        return (*by_position, *args[len(by_position) :]), {name: given[name] for name in kwargs}

    def act_on_outputs(self, element: Element, output: Any) -> Any:
        """Return a copy of an output of the model, transformed by ``element``."""
        whole = {"output": output}
        for path, action in self._output_paths(output):
            whole = _transform(whole, path, action, element, path)
        return whole["output"]

    def tensors_to_compare(self, output: Any) -> dict[str, Tensor]:
        """Return the tensors that errors are measured on. Keys are names: ``output``, ``output.1``, ``output.x``."""
        found = self._tensors_with_action(output)
        judged = {path: tensor for path, tensor in found.items() if path.partition(".")[2] not in self.beside}
        return judged or found

    def _tensors_with_action(self, output: Any) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}  # without optional outputs that the model leaves out
        for path, _ in self._output_paths(output):
            _change_at({"output": output}, path.split("."), partial(found.setdefault, path), path)
        return found

    def mean(self, outputs: Sequence[Any]) -> Any:
        """Return a copy of the first output in which every tensor that has an action is the mean over all outputs."""
        whole = {"output": outputs[0]}
        found = [self._tensors_with_action(output) for output in outputs]
        for path in found[0]:
            average = torch.stack([each[path] for each in found]).mean(0)
            whole = _change_at(whole, path.split("."), partial(lambda new, old: new, average), path)
        return whole["output"]

    def _output_paths(self, output: Any) -> list[tuple[str, Action]]:
        if isinstance(self.outputs, Action):
            return [("output", self.outputs)]
        if isinstance(self.outputs, Mapping):
            named = {f"output.{path}": action for path, action in self.outputs.items()}
            return _find_paths(named, {"output": output})
        expected = len(self.outputs)
        size = len(output) if isinstance(output, (tuple, list)) else None
        if size != expected:
            kind = type(output).__name__ + ("" if size is None else f" of {size}")
            raise AdapterError(f"output: expected a tuple of {expected}, one for each action in outputs, found {kind}")
        return [(f"output.{i}", action) for i, action in enumerate(self.outputs) if action is not None]


def _find_paths(actions: Mapping[str, Action | None], values: Mapping[str, Any]) -> list[tuple[str, Action]]:
    """Return the paths with their actions. Missing optional paths are left out, others lose their question marks."""
    found = []
    for pattern, action in actions.items():
        path = pattern.removesuffix("?")
        if action is not None and (path == pattern or find_at(values, path) is not None):
            found.append((path, action))
    return found


def _transform(values: dict[str, Any], path: str, action: Action, element: Element, where: str) -> dict[str, Any]:
    """Return a copy of nested values in which the action transforms the tensor at a path."""

    def act(value: Any) -> Any:
        try:
            if isinstance(element, PerGraph) and not isinstance(action, Invariant):
                return action(element.select(value, path), value)
            return action(element, value)
        except AdapterError as error:
            raise AdapterError(f"{where}: {error}") from error

    changed: dict[str, Any] = _change_at(values, path.split("."), act, where)
    return changed


def _change_at(value: Any, steps: Sequence[str], change: Callable[[Any], Any], where: str) -> Any:
    """Return a copy of a value with the part at these steps changed; None if an optional part is missing."""
    if value is None:
        return None
    if not steps:
        return change(value)
    old = get_part(value, steps[0], where)
    new = _change_at(old, steps[1:], change, where)
    return value if new is old else replace_part(value, steps[0], new, where)


def find_generators(action: Action, shape: tuple[int, ...]) -> list[Tensor]:
    """Return the three generators of rotations under this action, as float64 matrices of shape [width, width]."""
    basis = torch.eye(math.prod(shape), dtype=torch.float64).view(-1, *shape)
    found = []
    for axis in range(3):
        cross = torch.zeros(3, 3, dtype=torch.float64)
        one, two = (axis + 1) % 3, (axis + 2) % 3
        cross[one, two], cross[two, one] = -ANGLE, ANGLE
        turns = [Rigid(torch.linalg.matrix_exp(each), torch.zeros(3, dtype=torch.float64)) for each in (cross, -cross)]
        there, back = (action(turn, basis).flatten(1) for turn in turns)
        found.append(((there - back) / (2 * ANGLE)).T)  # rows of the basis become columns of the matrix
    return found
