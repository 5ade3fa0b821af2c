"""What an adapter patches, the repairs it brings, and its example. Data only."""

from __future__ import annotations

import argparse
import os
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import ModuleType

    from torch import nn


def _expect(what: object, field_name: str, fits: bool, expected: str) -> None:
    """A field that an adapter filled in wrongly is told where it is written, not where somebody stumbles over it."""
    if not fits:
        found = getattr(what, field_name)
        raise ValueError(f"{type(what).__name__}: {field_name}: expected {expected}, found {found!r}")


def _are_texts(values: Iterable[object]) -> bool:
    return all(isinstance(value, str) for value in values)


def _are_files(paths: object) -> bool:
    """Files of a clone: texts that name no place outside it."""
    if not isinstance(paths, tuple):
        return False
    return all(isinstance(p, str) and p and not p.startswith("/") and ".." not in p.split("/") for p in paths)


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
        _expect(self, "repository", isinstance(self.repository, str), "a text, as 'me/net'")
        _expect(self, "scripts", _are_files(self.scripts), "a tuple of files in the clone, as ('main.py',)")
        shape = isinstance(self.shape, Mapping) and _are_files(tuple(self.shape)) and _are_texts(self.shape.values())
        _expect(self, "shape", shape, "stubs by file in the clone, as {'net.py': 'class Net(Module): ...'}")
        _expect(self, "commits", isinstance(self.commits, tuple) and _are_texts(self.commits), "a tuple of texts")
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
        _expect(self, "title", isinstance(self.title, str), "a text, as 'MyNet'")
        _expect(
            self, "evaluating", isinstance(self.evaluating, Mapping), "arguments and values, as {'training': False}"
        )
        _expect(self, "checkout", isinstance(self.checkout, (Checkout, type(None))), "a Checkout or None")
        _expect(
            self, "recognises", self.recognises is None or callable(self.recognises), "a function of a model or None"
        )
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
    first: bool = False
    """Upstream cannot be imported without it: it is applied before that, and so imports nothing of upstream itself."""

    def __post_init__(self) -> None:
        _expect(self, "name", isinstance(self.name, str), "a text")
        _expect(self, "reason", isinstance(self.reason, str), "a text")
        _expect(self, "first", isinstance(self.first, bool), "True or False")
        _expect(self, "needed", callable(self.needed), "a function that says whether the thing is missing")
        _expect(self, "apply", callable(self.apply), "a function that supplies it")
        _expect(self, "device", isinstance(self.device, (str, type(None))), "a device or None")


@dataclass(frozen=True)
class StandIn:
    """A shim for a whole module that is not installed. Only upstream's own files get to import it."""

    name: str
    """The module: "torch_scatter"."""
    reason: str
    make: Callable[[], ModuleType]
    """Called when upstream first imports it."""

    def __post_init__(self) -> None:
        _expect(self, "name", isinstance(self.name, str), "the name of a module")
        _expect(self, "reason", isinstance(self.reason, str), "a text")
        _expect(self, "make", callable(self.make), "a function that makes the module")


AnyShim = Shim | StandIn


@dataclass(frozen=True)
class Example:
    """A small model and the arguments of one forward, made without data."""

    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    single: bool = False
    """Upstream has constants in single precision, so that its symmetry is not better than that."""

    def __post_init__(self) -> None:
        # Without torch, which this module does not import: what is called and walked as a module of torch is.
        module = callable(getattr(self.model, "named_modules", None)) and not isinstance(self.model, type)
        _expect(self, "model", module, "a torch.nn.Module")
        _expect(self, "args", isinstance(self.args, tuple), "a tuple of the forward's positional arguments, as (x,)")
        named = isinstance(self.kwargs, Mapping) and _are_texts(self.kwargs)
        _expect(self, "kwargs", named, "the forward's keyword arguments by name, as {'x': x}")


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

    def __post_init__(self) -> None:
        for name in ("name", "pattern", "curve"):
            _expect(self, name, isinstance(getattr(self, name), str), "a text")


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

    def __post_init__(self) -> None:
        _expect(self, "epochs", self.epochs is None or type(self.epochs) is int, "a whole number or None")
        _expect(self, "source", isinstance(self.source, str), "a text")
        metrics = isinstance(self.metrics, tuple) and all(isinstance(each, Metric) for each in self.metrics)
        _expect(self, "metrics", metrics, "a tuple of Metric")
        _expect(self, "seed", isinstance(self.seed, str), "an option, as '--seed'")

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
