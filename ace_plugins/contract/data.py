"""The words host and adapters share: what a site is, where its branch reads, what an upstream is.

A branch reads one tensor and writes one tensor. What it reads is a `Tap` (an argument that upstream's own
forward passes somewhere) or the name of a `Stem` or `Site` whose output it takes. That covers a branch on
one submodule's first input (SEGNN), a chain fed from the model's own input (SchNet, EGNO), several outputs
of one layer and one map that all layers share (EGNO), and several maps inside one layer sharing an input
(VN-DGCNN).
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from math import prod
from typing import TYPE_CHECKING, Any

from ..patch.imports import is_file
from ..patch.stand_ins import belongs

if TYPE_CHECKING:
    from types import ModuleType

    from torch import nn


@dataclass(frozen=True)
class Checkout:
    """An upstream that people clone instead of installing: what its files look like and which of them people run.

    Files are named relative to the checkout's root, with "/".
    """

    repository: str
    """For people: "RobDHess/Steerable-E3-GNN"."""
    scripts: tuple[str, ...]
    """What people run. These files get the marked line."""
    shape: Mapping[str, str]
    """Per file the classes and signatures the adapter counts on, written as a stub: "class Net(Module): ..."."""
    commits: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Commits the adapter was tried on: per commit, the git blob ids of the files above."""

    def __post_init__(self) -> None:
        if not self.scripts or not self.shape:
            raise ValueError(
                "a checkout has scripts and a shape, as Checkout('me/net', ('main.py',), {'net.py': '...'})"
            )
        for stub in self.shape.values():
            compile(textwrap.dedent(stub), "shape", "exec")


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
    checkout: Checkout | None = None
    """Set where the upstream is cloned: then "module" is the file's path in the checkout, with dots, and classes
    are matched by that file, whatever name it is imported under."""

    def __post_init__(self) -> None:
        named = (tuple, list)
        if not isinstance(self.models, named) or not self.models:
            raise ValueError(f"models {self.models!r}: expected a tuple of 'module:Class', as ('mynet.model:MyNet',)")
        for path in self.models:
            module, colon, name = str(path).partition(":")
            if not (colon and all(map(str.isidentifier, [*module.split("."), *name.split(".")]))):
                raise ValueError(f"models: expected 'module:Class', as 'mynet.model:MyNet', found {path!r}")

    @property
    def files(self) -> tuple[str, ...]:
        """Where the model classes of a checkout are defined, relative to its root; nothing for a package."""
        return () if self.checkout is None else tuple(dict.fromkeys(map(file_of, self.models)))

    def claims(self, cls: type) -> bool:
        """Whether this class, or one it is derived from, is among the model classes."""
        return any(self._is(base, path) for base in cls.__mro__ for path in self.models)

    def holds(self, module: ModuleType | None, path: str) -> bool:
        """Whether this module is where the class "module:Class" of this upstream is defined."""
        if self.checkout is None:
            return module is not None and module.__name__ == path.partition(":")[0]
        file = getattr(getattr(module, "__spec__", None), "origin", None)
        # Other projects have a models/net.py too: in the same folder must be the rest of this one's.
        return is_file(file, file_of(path)) and belongs(file or "", self.files)

    def _is(self, cls: type, path: str) -> bool:
        return cls.__qualname__ == path.partition(":")[2] and self.holds(sys.modules.get(cls.__module__), path)


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
    """A part that several branches share: added nowhere, without a gamma.

    Where it reads something itself it is computed once in a forward. Without that (None) what is shared is the
    map: every site that goes ``through`` it has it applied to what the site reads.
    """

    name: str
    reads: Tap | str | None
    shape_in: tuple[int, ...]
    shape_out: tuple[int, ...]
    bounded: bool = True
    """False leaves it out of spectral normalisation: where what reads it takes out its scale, as BatchNorm does."""


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
    layer: str | None = None
    """The submodule around ``module``, where the branch leaves outputs in another order in memory than upstream has
    them: what that submodule gives goes through ``restore(output)`` of the branch."""
    axis: int | None = None
    """Where the dimensions that make one feature vector begin in what the branch reads; None: they are the last."""
    through: str | None = None
    """A stem that reads nothing itself, applied to what this site reads before the branch gets it; ``shape_in`` is
    what comes out of it."""


Node = Site | Stem


@dataclass(frozen=True)
class Shim:
    """A repair that lets an upstream run on today's stack, applied only where the thing is missing."""

    name: str
    reason: str
    needed: Callable[[], bool]
    apply: Callable[[], None]
    device: str | None = None
    """Set where it is for people who ask for this device, and for nobody else."""


@dataclass(frozen=True)
class StandIn:
    """A shim for a whole module that is not installed. Only upstream's own files get to import it."""

    name: str
    """The module: "torch_scatter"."""
    reason: str
    make: Callable[[], ModuleType]
    """Called when upstream first imports it."""

    def needed(self) -> bool:
        try:
            return find_spec(self.name) is None
        except ModuleNotFoundError:  # the package it would be in
            return True


AnyShim = Shim | StandIn


@dataclass(frozen=True)
class Example:
    """A small model and the arguments of one forward, made without data."""

    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


def file_of(path: str) -> str:
    """Where the class "models.net:Net" of a checkout is defined: "models/net.py"."""
    return f"{path.partition(':')[0].replace('.', '/')}.py"


def class_path(cls: type) -> str:
    """ "module:Class", the form in which adapters name model classes."""
    return f"{cls.__module__}:{cls.__qualname__}"
