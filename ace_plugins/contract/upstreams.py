"""What an adapter patches, the repairs it brings, and its example. Data only."""

from __future__ import annotations

import argparse
import os
import textwrap
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import ModuleType

    from torch import nn


@dataclass(frozen=True)
class Checkout:
    """An upstream that people clone instead of installing. Files are named from the clone's root, with "/"."""

    repository: str
    """For people: "RobDHess/Steerable-E3-GNN"."""
    scripts: tuple[str, ...]
    """What people run. These files get the marked line."""
    shape: Mapping[str, str]
    """Per file the classes and signatures the adapter counts on, as a stub: "class Net(Module): ..."."""
    commits: tuple[str, ...] = ()
    """Commits the adapter was tried on."""

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

    Version ranges are not here. They stand in the adapter's metadata, as the extra ``upstream``, so that the host can
    check them before it imports the adapter.
    """

    title: str
    """For people: "SchNet (PyTorch Geometric)"."""
    models: tuple[str, ...] = ()
    """Model classes as "module:Class", where they are defined or where upstream offers them."""
    checkout: Checkout | None = None
    """Set where the upstream is cloned. Then "module" is the file's path in the clone, with dots, and classes are
    matched by that file, whatever name it is imported under."""
    recognises: Callable[[nn.Module], bool] | None = None
    """For an adapter of many models: whether this one is among them. Asked after no adapter claims its class."""
    evaluating: Mapping[str, Any] = field(default_factory=dict)
    """For an upstream that does not call ``model.eval()``: arguments of the forward and the values, given or by
    default, that together say that nothing is trained, as {"training": False}."""

    def __post_init__(self) -> None:
        if not isinstance(self.models, (tuple, list)) or not (self.models or self.recognises):
            raise ValueError(f"models {self.models!r}: expected a tuple of 'module:Class', as ('mynet.model:MyNet',)")
        for path in self.models:
            module, colon, name = str(path).partition(":")
            if not (colon and all(map(str.isidentifier, [*module.split("."), *name.split(".")]))):
                raise ValueError(f"models: expected 'module:Class', as 'mynet.model:MyNet', found {path!r}")

    @property
    def files(self) -> tuple[str, ...]:
        """Where the model classes of a checkout are defined; nothing for a package."""
        return () if self.checkout is None else tuple(dict.fromkeys(map(file_of, self.models)))


@dataclass(frozen=True)
class Shim:
    """A repair that lets an upstream run on today's stack, applied only where the thing is missing."""

    name: str
    reason: str
    needed: Callable[[], bool]
    apply: Callable[[], None]
    device: str | None = None
    """Set where the repair is only for people who ask for this device."""


@dataclass(frozen=True)
class StandIn:
    """A shim for a whole module that is not installed. Only upstream's own files get to import it."""

    name: str
    """The module: "torch_scatter"."""
    reason: str
    make: Callable[[], ModuleType]
    """Called when upstream first imports it."""


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


@dataclass(frozen=True)
class Metric:
    """How a script prints one of its results. Patterns are regular expressions with one group, the number."""

    name: str
    """For people: "test"."""
    pattern: str
    """Its last match in what the script has printed is the result."""
    curve: str = ""
    """Matches once for every evaluation, with the value of that one; empty: ``pattern`` does."""
    higher: bool = False
    """Higher is better."""


@dataclass(frozen=True)
class Script:
    """What the host should know of a script's own command line."""

    epochs: int | None = None
    """How many it will train."""
    source: str = "the script's command line"
    """Where that is said, for people."""
    metrics: tuple[Metric, ...] = ()
    """What it prints of its results; the one that counts first."""
    seed: str = ""
    """The option that sets its seed, where it has one that counts: "--seed"."""

    @classmethod
    def with_option(
        cls,
        argv: Sequence[str],
        scripts: Collection[str],
        option: str,
        default: int,
        *,
        metrics: tuple[Metric, ...] = (),
        seed: str = "",
    ) -> Script | None:
        """One whose epochs are an option of its own; None if ``argv`` is of none of these scripts."""
        name = os.path.basename(argv[0]) if argv else ""
        if name not in {os.path.basename(script) for script in scripts}:
            return None
        parser = argparse.ArgumentParser(add_help=False, exit_on_error=False)
        parser.add_argument(option, dest="epochs", type=int, default=None)
        try:
            given, _ = parser.parse_known_args(list(argv[1:]))
        except argparse.ArgumentError:
            return None  # the script's own to complain about
        source = f"{name} {option}" if given.epochs is not None else f"{name}'s default"
        return cls(default if given.epochs is None else given.epochs, source, metrics, seed)
