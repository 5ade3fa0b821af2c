"""Places where ACE changes a model: sites, the stems that their branches share, and the tensors that branches read.

A branch reads a `Tap` (an argument of a submodule's forward pass), or names an earlier `Stem` or `Site` and reads its
output. So there can be chains of branches (SchNet) and several outputs of a layer with a shared map (EGNO).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from .upstreams import check_field, check_types

if TYPE_CHECKING:
    from torch import Tensor

    from ..symmetry.actions import Action


@dataclass(frozen=True)
class Tap:
    """An argument of a submodule's forward pass. Its value is read before the submodule runs."""

    argument: int | str = 0
    """Position or name of the argument. Dots lead to an attribute or key inside it: "graph.pos"."""
    module: str | None = None
    """Dotted path of the submodule; "" is the model itself, None is the module of the site that reads this tap."""

    def __post_init__(self) -> None:
        check_types(self, argument=int | str, module=str | None)


class _Features:
    """Common fields of sites and stems. The width of a feature vector is the product of its dimensions."""

    name: str
    reads: Tap | str | None
    shape_in: tuple[int, ...]
    shape_out: tuple[int, ...]
    axis: int = -1

    def __post_init__(self) -> None:
        check_types(self, name=str, reads=Tap | str | None)
        check_field(self, "name", self.name != "", "a name")
        for name, shape in {"shape_in": self.shape_in, "shape_out": self.shape_out}.items():
            sizes = isinstance(shape, tuple) and all(isinstance(size, int) and size > 0 for size in shape)
            check_field(self, name, sizes and shape != (), "a tuple of sizes, as (64,)")

    def sizes(self, shape: Sequence[int], expected: tuple[int, ...]) -> tuple[int, ...]:
        """Return the sizes of a tensor's feature dimensions, for comparison with the ``expected`` sizes."""
        return tuple(shape[-len(expected) :] if self.axis == -1 else shape[self.axis :][:1])

    @property
    def width_in(self) -> int:
        return prod(self.shape_in)

    @property
    def width_out(self) -> int:
        return prod(self.shape_out)


@dataclass(frozen=True)
class Stem(_Features):
    """A module that several branches share. It has no gamma, and its output is not added to the model."""

    name: str
    """Name, unique among the model's sites and stems."""
    reads: Tap | str | None
    """Tensor that the stem reads. The stem's output is computed once per forward pass, for all sites that read it.
    With None, sites share only its weights: each site with `Site.through` applies the stem to the site's own input."""
    shape_in: tuple[int, ...]
    shape_out: tuple[int, ...]
    bounded: bool = True
    """True to bound the linear maps by their spectral norm; False if BatchNorm follows, which sets the scale."""


@dataclass(frozen=True)
class Site(_Features):
    """A place in the model where ``gamma * branch`` is added to a submodule's output.

    Site("layers.0", shape_in=(64,), shape_out=(64,))
    Site("layers.0.coors", "layers.0", (3,), (3,), reads=Tap("coors"), output=1)
    """

    name: str
    """Unique name. Checkpoints contain it, so it must be the same for all versions of upstream."""
    module: str = ""
    """Dotted path of a submodule. The branch is added to its output. By default the site's name."""
    shape_in: tuple[int, ...] = ()
    """Shape of one feature vector in the tensor that the branch reads, such as (d,) or (3, channels)."""
    shape_out: tuple[int, ...] = ()
    """Shape of one feature vector in the submodule's output."""
    reads: Tap | str = field(default_factory=Tap)
    """Tensor that the branch reads: a `Tap` (by default, the module's first argument), or an earlier stem or site."""
    output: int | str | None = None
    """Output of the submodule to add to: an index of a tuple or a key of a dict; None if it returns one tensor."""
    through: str | None = None
    """Name of a stem with ``reads=None``, applied before the branch; ``shape_in`` is then the stem's ``shape_out``."""
    acts: tuple[Action, Action] | None = None
    """Linear actions of the group on the input and on the output, for mode "scheduled" and audits; None if unknown."""
    axis: int = -1
    """Dimension that holds the features, in the input and in the output. By default, -1, they are the trailing
    dimensions. Use 1 for images [batch, channels, height, width]; both shapes then have one entry."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_types(self, module=str, reads=Tap | str, output=int | str | None, through=str | None, axis=int)
        pair = self.acts is None or (isinstance(self.acts, tuple) and len(self.acts) == 2)
        check_field(self, "acts", pair, "two actions, on the input and on the output")
        plain = isinstance(self.reads, Tap) and self.through is None and len(self.shape_in) == len(self.shape_out) == 1
        allowed = "-1 (other values need one-dimensional shapes, a Tap in reads, and no through)"
        check_field(self, "axis", plain or self.axis == -1, allowed)
        object.__setattr__(self, "module", self.module or self.name)


Node = Site | Stem


@runtime_checkable
class AddsItself(Protocol):
    """A branch that adds its output to the submodule's output by itself, where this is faster than a separate addition.

    Its site must read a `Tap` of a submodule. The branch must check the tensor's shape: ACE does not. The branch
    may change the memory layout of the output, because ACE calls ``restore`` on the tapped submodule's output.
    """

    def prepare(self, read: Tensor) -> Any:
        """Return ``read``, the tensor of the site's `Tap`, in the form that `add_to` needs. Called once per tensor."""

    def add_to(self, output: Tensor, gamma: Tensor, prepared: Any, fit: Tensor | None = None) -> Tensor:
        """Return ``output + gamma * branch``; ``output`` may be changed in place.

        ``prepared`` is the result of `prepare`, and ``gamma`` has no dimensions. If ``fit`` [rows] is given, ``gamma``
        has two entries. Rows for which ``fit`` is True train the branch and use the first entry. The other rows judge
        gamma: they use the second entry and give the branch's parameters no gradient.
        """

    def restore(self, output: Tensor) -> Tensor:
        """Return the ``output`` of the tapped submodule in the memory layout that upstream uses."""
