"""The words host and adapters share: what a site is, where its branch reads, what an upstream is.

A branch reads one tensor and writes one tensor. What it reads is a `Tap` (an argument that upstream's own
forward passes somewhere) or the name of a `Stem` or `Site` whose output it takes. That covers a branch on
one submodule's first input (SEGNN), a chain fed from the model's own input (SchNet, EGNO), several outputs
of one layer (EGNO) and several maps inside one layer sharing an input (VN-DGCNN).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Upstream:
    """What an adapter patches.

    Version ranges are not here: they stand in the adapter's own metadata, as the extra ``upstream``, so that
    the host can check them before it imports the adapter.
    """

    title: str
    """For people: "SchNet (PyTorch Geometric)"."""
    models: tuple[str, ...]
    """Model classes as "module:Class". Matched by name along the class's bases, so nothing is imported."""

    def __post_init__(self) -> None:
        named = (tuple, list)
        if not isinstance(self.models, named) or not self.models:
            raise ValueError(f"models {self.models!r}: expected a tuple of 'module:Class', as ('mynet.model:MyNet',)")
        for path in self.models:
            module, colon, name = str(path).partition(":")
            if not (colon and all(map(str.isidentifier, [*module.split("."), *name.split(".")]))):
                raise ValueError(f"models: expected 'module:Class', as 'mynet.model:MyNet', found {path!r}")


@dataclass(frozen=True)
class Tap:
    """An argument of a submodule's forward: by position or by name, with dots into attributes."""

    argument: int | str = 0
    module: str | None = None
    """Dotted path of the submodule; "" is the model itself; None is the module of the site that reads."""


class _Features:
    """A feature vector is one or several trailing dimensions; its width is their product."""

    shape_in: tuple[int, ...]
    shape_out: tuple[int, ...]

    @property
    def width_in(self) -> int:
        return prod(self.shape_in)

    @property
    def width_out(self) -> int:
        return prod(self.shape_out)


@dataclass(frozen=True)
class Stem(_Features):
    """A part that several branches share: computed once in a forward, added nowhere, without a gamma."""

    name: str
    reads: Tap | str
    shape_in: tuple[int, ...]
    shape_out: tuple[int, ...]


@dataclass(frozen=True)
class Site(_Features):
    """One place of the model where ``gamma * branch`` is added.

    ``shape_in`` and ``shape_out`` are the trailing dimensions that make one feature vector: (d,) for plain
    features, (3, channels) where vector channels belong together.
    """

    name: str
    """Unique in the model, stable over upstream versions: users and checkpoints know the site by it."""
    module: str
    """Dotted path of the submodule whose output the branch is added to."""
    shape_in: tuple[int, ...]
    shape_out: tuple[int, ...]
    reads: Tap | str = field(default_factory=Tap)
    """Where the branch reads: by default the first argument of ``module``; a name is a stem or a site."""
    output: int | str | None = None
    """Which of the submodule's outputs: an index of a tuple, a key of a dict, None for a single tensor."""


Node = Site | Stem


@dataclass(frozen=True)
class Shim:
    """A repair that lets an upstream run on today's stack, applied only where the thing is missing."""

    name: str
    reason: str
    needed: Callable[[], bool]
    apply: Callable[[], None]


@dataclass(frozen=True)
class Example:
    """A small model and the arguments of one forward, made without data."""

    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


def class_path(cls: type) -> str:
    """ "module:Class", the form in which adapters name model classes."""
    return f"{cls.__module__}:{cls.__qualname__}"
