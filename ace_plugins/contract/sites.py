"""Where ACE goes into a model: sites, the stems their branches share, and what a branch reads.

A branch reads one tensor and writes one tensor. What it reads is a `Tap` (an argument of some submodule's forward) or
the name of a `Stem` or `Site` whose output it takes. That covers a branch on a layer's own input (SEGNN), a chain fed
from the model's input (SchNet), several outputs of one layer and a map that all layers share (EGNO), and several maps
inside one layer that share an input (vector neurons).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor

    from ..symmetry.actions import Action


@dataclass(frozen=True)
class Tap:
    """An argument of a submodule's forward, by position or by name, with dots into attributes and keys.

    It is read when the submodule is called, before it runs.
    """

    argument: int | str = 0
    module: str | None = None
    """Dotted path of the submodule. "" is the model itself; None is the module of the site that reads."""

    def __post_init__(self) -> None:
        if type(self.argument) not in (int, str) or self.argument == "":
            raise ValueError(f"Tap: argument: expected a position or a name, found {self.argument!r}")
        if not isinstance(self.module, (str, type(None))):
            raise ValueError(f"Tap: module: expected the dotted path of a submodule or None, found {self.module!r}")


class _Features:
    """A feature vector is one or several trailing dimensions; its width is their product."""

    name: str
    reads: Tap | str | None
    shape_in: tuple[int, ...]
    shape_out: tuple[int, ...]
    axis: int = -1

    def __post_init__(self) -> None:
        """Said here, where the adapter's author sees which node it is, and not when a forward stumbles over it."""
        who = f"{type(self).__name__} {self.name!r}"
        if not isinstance(self.name, str) or not self.name:
            raise ValueError(f"{who}: name: expected a text, found {self.name!r}")
        for field_name in ("shape_in", "shape_out"):
            shape = getattr(self, field_name)
            if not isinstance(shape, tuple) or not shape or not all(isinstance(n, int) and n > 0 for n in shape):
                raise ValueError(f"{who}: {field_name}: expected a tuple of sizes, as (64,), found {shape!r}")
        if not isinstance(self.reads, (Tap, str, type(None))):
            raise ValueError(f"{who}: reads: expected a Tap or the name of a stem or site, found {self.reads!r}")

    def sizes(self, shape: Sequence[int], expected: tuple[int, ...]) -> tuple[int, ...]:
        """Return the sizes of the feature dimensions in a tensor of this shape, for comparison with ``expected``."""
        return tuple(shape[-len(expected) :] if self.axis == -1 else shape[self.axis :][:1])

    @property
    def width_in(self) -> int:
        return prod(self.shape_in)

    @property
    def width_out(self) -> int:
        return prod(self.shape_out)


@dataclass(frozen=True)
class Stem(_Features):
    """A part that several branches share. It is added nowhere and has no gamma.

    With ``reads`` it is computed once in a forward, for all that name it. Without (None) only its weights are shared:
    every site that goes ``through`` it applies it to what the site reads.
    """

    name: str
    reads: Tap | str | None
    shape_in: tuple[int, ...]
    shape_out: tuple[int, ...]
    bounded: bool = True
    """False leaves it out of spectral normalisation. Right where BatchNorm follows, which takes out the scale."""


@dataclass(frozen=True)
class Site(_Features):
    """One place of the model where ``gamma * branch`` is added.

    ``shape_in`` and ``shape_out`` are the trailing dimensions that make one feature vector: (d,) for plain features,
    (3, channels) where vector channels belong together.
    """

    name: str
    """Unique in the model and stable over upstream's versions: users and checkpoints know the site by it."""
    module: str = ""
    """Dotted path of the submodule whose output the branch is added to. By default the site's name."""
    shape_in: tuple[int, ...] = ()
    shape_out: tuple[int, ...] = ()
    reads: Tap | str = field(default_factory=Tap)
    """What the branch reads. By default the first argument of ``module``; a name is an earlier stem or site."""
    output: int | str | None = None
    """Which of the submodule's outputs: an index of a tuple, a key of a dict, None for a single tensor."""
    through: str | None = None
    """A stem without ``reads`` that is applied first; ``shape_in`` is what comes out of it."""
    acts: tuple[Action, Action] | None = None
    """How the group acts on what the branch reads and on what it is added to, where that is known: linear actions on
    the trailing dimensions ``shape_in`` and ``shape_out``. Only mode "scheduled" asks for it."""
    axis: int = -1
    """Dimension of the features in what the branch reads and in the output: 1 for images [batch, channels, height,
    width]. ``shape_in`` and ``shape_out`` then have one size each. By default features are the trailing dimensions."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.module == "":
            object.__setattr__(self, "module", self.name)
        who = f"Site {self.name!r}"
        if not isinstance(self.module, str):
            raise ValueError(f"{who}: module: expected the dotted path of a submodule, found {self.module!r}")
        if self.reads is None:
            raise ValueError(f"{who}: reads: expected a Tap or the name of a stem or site, found None")
        if type(self.output) not in (int, str, type(None)):
            raise ValueError(f"{who}: output: expected an index, a key or None, found {self.output!r}")
        if not isinstance(self.through, (str, type(None))):
            raise ValueError(f"{who}: through: expected the name of a stem or None, found {self.through!r}")
        if self.acts is not None and (not isinstance(self.acts, tuple) or len(self.acts) != 2):
            raise ValueError(
                f"{who}: acts: expected two actions, of what is read and of the output, found {self.acts!r}"
            )
        if type(self.axis) is not int:
            raise ValueError(f"{who}: axis: expected the number of a dimension, found {self.axis!r}")
        alone = isinstance(self.reads, Tap) and self.through is None and len(self.shape_in) == len(self.shape_out) == 1
        if self.axis != -1 and not alone:
            raise ValueError(
                f"{who}: axis {self.axis}: expected one size in shape_in and in shape_out, reads a Tap and no through, "
                f"found {self.shape_in}, {self.shape_out}, {self.reads!r} and {self.through!r}"
            )


Node = Site | Stem


@runtime_checkable
class AddsItself(Protocol):
    """A branch that adds itself to upstream's output, where that is cheaper than making its value first.

    Its site reads a `Tap` that names a module. The branch checks what it reads itself. Such a branch may leave the
    output in another order in memory; what the tapped module returns then goes through ``restore``.
    """

    def prepare(self, read: Tensor) -> Any:
        """What was read, as the branch wants it. Made once for all sites that read the same tensor."""

    def add_to(self, output: Tensor, gamma: Tensor, prepared: Any) -> Tensor:
        """``output + gamma * branch``. The output may be written to."""

    def restore(self, output: Tensor) -> Tensor:
        """The output of the tapped module, in the order in memory that upstream has it in."""
