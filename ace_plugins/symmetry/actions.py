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
from .graphs import Graphs, PerGraph, Rows, value_at
from .groups import Element, Euclidean, Group, Rigid, Rigids
from .parts import get_argument, get_part, has_part, parse_path, positional_names, replace_part

X = TypeVar("X", Tensor, None)


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
        """Return the transformed tensor as a new tensor.

        Args:
            element: The group element.
            x: The tensor to transform.

        Returns:
            A tensor of the same shape, dtype and device.

        Raises:
            AdapterError: If the action does not support the element or the tensor.
        """


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
        """Return the size that each of the acted axes must have for ``element``."""
        return element.dimension

    @abstractmethod
    def act_on_last(self, element: Rigid, x: Tensor) -> Tensor:
        """Return x transformed by ``element``. x is float32 or wider and has the acted axes last."""

    def act(self, element: Any, x: Tensor) -> Tensor:
        rigid = _rigid(self, element)
        size = self.expected_size(rigid)
        axes = self.acted_axes()
        for found in _sizes(self, x, axes, size):
            if found != size:
                raise AdapterError(f"{self}: expected size {size}, found {found} in shape {list(x.shape)}")
        if not (x.is_floating_point() or x.is_complex()):
            raise AdapterError(f"{self}: expected a floating point tensor, found {x.dtype}")
        return _apply_wide(partial(self.act_on_last, rigid), x, axes)


def _rigid(action: Action, element: Any, dimension: int | None = None) -> Rigid:
    if not isinstance(element, Rigid):
        raise AdapterError(f"{action}: expected an element of the kind Rigid, found {type(element).__name__}")
    if dimension not in (None, element.dimension):
        raise AdapterError(f"{action}: expected an element of {dimension} dimensions, found {element.dimension}")
    return element


def _sizes(action: Action, x: Tensor, axes: tuple[int, ...], size: object) -> list[int]:
    for axis in axes:
        if not -x.ndim <= axis < x.ndim:
            raise AdapterError(f"{action}: expected an axis of size {size}, found shape {list(x.shape)}")
    return [x.shape[axis] for axis in axes]


def _apply_wide(function: Callable[[Tensor], Tensor], x: Tensor, axes: tuple[int, ...]) -> Tensor:
    """Move the given axes of x to the end, apply the function, and move the axes back.

    The computation uses float32 or wider and no autocast, because its rounding would add to the model's error.
    """
    wide = x.float() if x.is_floating_point() and x.dtype.itemsize < 4 else x
    last = tuple(range(-len(axes), 0))
    with torch.autocast(x.device.type, enabled=False):
        turned = function(wide.movedim(axes, last)).movedim(last, axes)
        return turned.to(x.dtype).contiguous()  # contiguous, because models call .view() on their inputs


@dataclass(frozen=True)
class Vectors(_Rigidly):
    """Action on velocities, forces or displacements: they rotate and do not translate."""

    axis: int = -1
    """Axis of the coordinates. Its size is the dimension of the group's space, 2 or 3."""

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

    def _parse(self) -> Any:
        try:
            return _o3().Irreps(self.irreps)
        except (ValueError, AssertionError) as error:
            raise AdapterError(f"irreps {self.irreps!r}: expected e3nn's notation: {error}") from error

    def expected_size(self, element: Rigid) -> int:
        _rigid(self, element, dimension=3)
        return int(self._parse().dim)

    def act_on_last(self, element: Rigid, x: Tensor) -> Tensor:
        parsed = self._parse()
        sign = element.sign
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

    e3nn's own D_from_matrix uses Euler angles (inaccurate at the poles) and generators in the default dtype. Its six
    accurate digits are too few to measure a float64 model. Here D_l is computed from D_{l-1} and D_1 = R with the 3j
    symbols, which e3nn has in float64; this is accurate to rounding error.
    """
    matrices = [torch.ones_like(rotation[..., :1, :1]), rotation]
    for degree in range(2, highest + 1):
        c = _o3().wigner_3j(degree - 1, 1, degree, dtype=torch.float64, device=rotation.device).flatten(0, 1)
        both = torch.einsum("...ij,...kl->...ikjl", matrices[-1], rotation).flatten(-4, -3).flatten(-2)
        matrices.append((2 * degree + 1) * c.T @ both @ c)
    return matrices


@dataclass(frozen=True)
class Grid(Action):
    """Action of groups of the plane on an image [..., H, W] or a field on a grid, about its centre.

    x points right and y up, so a positive angle rotates the image counterclockwise, as
    ``torch.rot90(x, 1, (-2, -1))`` does. Multiples of 90 degrees and the reflections between them move whole pixels
    and are exact. Other elements resample bilinearly with zeros outside the image, and the inaccuracy of resampling
    adds to every measured error. So measure with C_4 or D_4 where possible.
    """

    of: Action = field(default_factory=Invariant)
    """Action on the channels of every pixel: ``Grid(of=Vectors(axis=-3))`` is a vector field [..., 2, H, W]."""
    axes: tuple[int, int] = (-2, -1)
    """Axes of the rows and the columns."""

    def act(self, element: Any, x: Tensor) -> Tensor:
        rigid = _rigid(self, element, dimension=2)
        if isinstance(rigid, Rigids):
            raise AdapterError(f"{self}: expected one element for the whole batch, found one per graph")
        if rigid.translation.any():
            shift = rigid.translation.tolist()
            raise AdapterError(f"{self}: expected an element without translation, found {shift}; use O2 or SO2")
        height, width = _sizes(self, x, self.axes, "H and W")
        x = self.of(rigid, x)
        # Composed quarter turns contain rounding errors; 1e-9 of an image is far less than a pixel.
        if float((rigid.matrix - rigid.matrix.round()).abs().max()) < 1e-9:
            cosine, sine = (int(entry) for entry in rigid.matrix[:, 0].round())
            quarters = {(1, 0): 0, (0, 1): 1, (-1, 0): 2, (0, -1): 3}[cosine, sine]
            if quarters % 2 and height != width:
                raise AdapterError(f"{self}: expected H = W for a turn of 90 degrees, found {height} and {width}")
            upright = x if rigid.sign > 0 else x.flip(self.axes[0])  # M = rotation after y -> -y
            return torch.rot90(upright, quarters, self.axes).contiguous()
        if not x.is_floating_point():
            raise AdapterError(f"{self}: expected a floating point tensor to resample, found {x.dtype}")
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

    A path names a parameter of the forward pass (``"pos"``). A path with dots names a part of one argument, which is a
    PyG graph, another object or a dict (``"graph.pos"``). A path that ends in "?" names an optional part
    (``"data.cell?"``).

    Raises:
        AdapterError: If ``group`` does not implement `Group`.
    """

    group: Group
    inputs: Mapping[str, Action]
    """Mapping from the path of an input to the action on it. Inputs that are not listed are not transformed."""
    outputs: Action | Sequence[Action | None] | Mapping[str, Action | None]
    """One action if the output is a tensor, a sequence of actions for a tuple, a mapping from paths to actions for a
    dict or object. None instead of an action excludes that output: it is neither transformed nor compared."""
    graphs: Graphs | None = None
    """Which rows belong to which graph of a batch. If given, random frames use one element per graph, not per batch."""
    beside: Collection[str] = ()
    """Outputs that are compared only if the model returns no other output. Energies that include the constants of
    single atoms are an example: they are so large that an error of the forces would not show next to them."""

    def __post_init__(self) -> None:
        if not isinstance(self.group, Group):
            raise AdapterError(f"group: expected name, identity() and sample(), found {type(self.group).__name__}")
        # Copies, because the caller's containers may change later.
        object.__setattr__(self, "inputs", dict(self.inputs))
        if not isinstance(self.outputs, Action):
            own = dict(self.outputs) if isinstance(self.outputs, Mapping) else tuple(self.outputs)
            object.__setattr__(self, "outputs", own)

    def sample_frame(
        self, generator: torch.Generator, names: Sequence[str], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Element:
        """Return a random element without translation, or one per graph if ``graphs`` is given and finds the rows.

        Args:
            generator: Source of random numbers.
            names: Names of the model's arguments.
            args: Positional arguments of the call.
            kwargs: Keyword arguments of the call.

        Returns:
            The element.
        """
        if self.graphs is not None and isinstance(self.group, Euclidean):
            rows = self.graphs.find_rows(names, args, kwargs)
            if rows is not None:
                # One element per node is enough. Counting the graphs would need a synchronisation with the device.
                return PerGraph(self.group.sample_many(len(rows.nodes), generator, scale=0.0), rows)
        return self.group.sample(generator, scale=0.0)

    def find_samples(
        self, names: Sequence[str], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Rows | None, list[Tensor]]:
        """Return the sample of every row of a batch, and the inputs that have one row per row.

        Without ``graphs``, the first dimension of the inputs counts the samples.

        Args:
            names: Names of the model's arguments.
            args: Positional arguments of the call.
            kwargs: Keyword arguments of the call.

        Returns:
            The sample number of every row and the floating point inputs that are listed in ``inputs`` and have these
            rows; None and no inputs if the samples cannot be found.
        """
        found = {path: value_at(parse_path(path)[0], names, args, kwargs) for path in self.inputs}
        tensors = [value for value in found.values() if isinstance(value, Tensor) and value.is_floating_point()]
        tensors = [tensor for tensor in tensors if tensor.dim()]
        if not tensors:
            return None, []
        if self.graphs is None:
            rows = Rows(torch.arange(len(tensors[0]), device=tensors[0].device), {}, dense=True)
        else:
            # Without a batch vector, all nodes belong to one graph.
            alone = Rows(torch.zeros(len(tensors[0]), dtype=torch.long, device=tensors[0].device), {})
            rows = self.graphs.find_rows(names, args, kwargs) or alone
        same = [tensor for tensor in tensors if len(tensor) == len(rows.nodes)]
        return (rows, same) if same else (None, [])

    def act_on_inputs(
        self,
        element: Element,
        signature_names: Sequence[str],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return transformed copies of a call's arguments.

        Args:
            element: The group element.
            signature_names: Names of the parameters of the forward pass in order, without self. Names such as
                ``*rest`` and ``**more`` keep their stars.
            args: Positional arguments of the call.
            kwargs: Keyword arguments of the call.

        Returns:
            New positional and keyword arguments. Parameters that the call does not pass stay at their defaults.

        Raises:
            AdapterError: If a listed input does not exist or its action cannot transform it.
        """
        new_args, new_kwargs = list(args), dict(kwargs)
        by_position = positional_names(signature_names)
        for pattern, action in self.inputs.items():
            path, needed = parse_path(pattern)
            name, *steps = path.split(".")
            where = f"input {path!r}"
            act = partial(_act, action, element, where, path)
            if not needed and not has_part(get_argument(name, signature_names, args, kwargs), steps):
                continue
            if name in new_kwargs:
                new_kwargs[name] = _change_at(new_kwargs[name], steps, act, where)
            elif name not in signature_names:
                raise AdapterError(one_of("input of the forward", name, signature_names))
            elif name in by_position and (i := by_position.index(name)) < len(new_args):
                new_args[i] = _change_at(new_args[i], steps, act, where)
        return tuple(new_args), new_kwargs

    def act_on_outputs(self, element: Element, output: Any) -> Any:
        """Return a copy of an output of the model, transformed by ``element``."""
        for path, action in self._output_paths(output):
            output = _change_at(output, path, partial(_act, action, element, _label(path), ""), _label(path))
        return output

    def tensors_to_compare(self, output: Any) -> dict[str, Tensor]:
        """Return the tensors that errors are measured on. Keys are names: ``output``, ``output.1``, ``output.x``."""
        found = self._tensors_with_action(output)
        judged = {name: tensor for name, tensor in found.items() if name.partition(".")[2] not in self.beside}
        return judged or found

    def _tensors_with_action(self, output: Any) -> dict[str, Tensor]:
        found = {}
        for path, _ in self._output_paths(output):
            value = output
            for step in path:
                value = None if value is None else get_part(value, step, _label(path))
            if value is not None:
                found[_label(path)] = value
        return found

    def mean(self, outputs: Sequence[Any]) -> Any:
        """Return a copy of the first output in which every tensor that has an action is the mean over all outputs."""
        mean = outputs[0]
        found = [self._tensors_with_action(output) for output in outputs]
        for path, _ in self._output_paths(mean):
            if _label(path) in found[0]:  # the model may leave out an optional output
                average = torch.stack([each[_label(path)] for each in found]).mean(0)
                mean = _change_at(mean, path, partial(lambda new, old: new, average), "output")
        return mean

    def _output_paths(self, output: Any) -> list[tuple[list[str], Action]]:
        if isinstance(self.outputs, Action):
            return [([], self.outputs)]
        if isinstance(self.outputs, Mapping):
            found = []
            for pattern, action in self.outputs.items():
                path, needed = parse_path(pattern)
                steps = path.split(".")
                if action is not None and (needed or has_part(output, steps)):
                    found.append((steps, action))
            return found
        expected = len(self.outputs)
        if not isinstance(output, (tuple, list)) or len(output) != expected:
            size = f" of {len(output)}" if isinstance(output, (tuple, list)) else ""
            kind = f"{type(output).__name__}{size}"
            raise AdapterError(f"output: expected a tuple of {expected} as in the action, found {kind}")
        return [([str(i)], action) for i, action in enumerate(self.outputs) if action is not None]


def _label(path: Sequence[str]) -> str:
    return ".".join(["output", *path])


def _change_at(value: Any, steps: Sequence[str], change: Callable[[Any], Any], where: str) -> Any:
    """Return a copy of a value with the part at these steps changed; None if an optional part is missing."""
    if value is None:
        return None
    if not steps:
        return change(value)
    old = get_part(value, steps[0], where)
    new = _change_at(old, steps[1:], change, where)
    return value if new is old else replace_part(value, steps[0], new, where)


def _act(action: Action, element: Element, where: str, path: str, value: Any) -> Any:
    """Apply an action to one tensor; ``path`` is the path of an input, or "" for an output."""
    try:
        if isinstance(element, PerGraph) and not isinstance(action, Invariant):
            element = element.select(value, path)
        return action(element, value)
    except AdapterError as error:
        raise AdapterError(f"{where}: {error}") from error
