"""Data that adapters return: the upstream they patch, its scripts, compatibility shims and an example."""

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

NUMBER = r"([-+]?(?:(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|nan|inf))"
"""Replaces ``{number}`` in the patterns of a `Metric`: a number as Python prints it, as the pattern's one group."""


def _check(owner: object, field_name: str, valid: bool, expected: str) -> None:
    """Raise a ValueError that names a field the adapter's author filled in wrongly."""
    if not valid:
        found = getattr(owner, field_name)
        raise ValueError(f"{type(owner).__name__}: {field_name}: expected {expected}, found {found!r}")


def is_object_path(text: object) -> bool:
    """Return whether a text has the form "module:name" of an entry point."""
    module, colon, name = str(text).partition(":")
    return bool(colon) and all(map(str.isidentifier, [*module.split("."), *name.split(".")]))


def _are_strings(values: Iterable[object]) -> bool:
    return all(isinstance(value, str) for value in values)


def _are_files(paths: object) -> bool:
    """Return whether these are relative paths that stay inside the clone."""
    if not isinstance(paths, tuple):
        return False
    return all(isinstance(p, str) and p and not p.startswith("/") and ".." not in p.split("/") for p in paths)


@dataclass(frozen=True)
class Checkout:
    """An upstream that users clone instead of installing. Paths are relative to the clone's root, with "/"."""

    repository: str
    """Display name of the repository, for example "RobDHess/Steerable-E3-GNN"."""
    scripts: tuple[str, ...]
    """Scripts that users run. ``ace-patch NAME`` adds its import line to these files."""
    shape: Mapping[str, str]
    """Expected classes and signatures per file, as a stub: {"net.py": "class Net(Module): ..."}."""
    commits: tuple[str, ...] = ()
    """Commits the adapter was tested on."""

    def __post_init__(self) -> None:
        if not self.scripts or not self.shape:
            raise ValueError(
                "Checkout: expected scripts and a shape, as Checkout('me/net', ('main.py',), {'net.py': '...'})"
            )
        _check(self, "repository", isinstance(self.repository, str), "a string, as 'me/net'")
        _check(self, "scripts", _are_files(self.scripts), "a tuple of files in the clone, as ('main.py',)")
        shape = isinstance(self.shape, Mapping) and _are_files(tuple(self.shape)) and _are_strings(self.shape.values())
        _check(self, "shape", shape, "stubs by file in the clone, as {'net.py': 'class Net(Module): ...'}")
        _check(self, "commits", isinstance(self.commits, tuple) and _are_strings(self.commits), "a tuple of strings")
        for stub in self.shape.values():
            compile(textwrap.dedent(stub), "shape", "exec")


@dataclass(frozen=True)
class Upstream:
    """The library or repository that an adapter patches.

    Version ranges belong in the adapter's metadata, as the extra ``upstream``: the host checks them before it imports
    the adapter.

        Upstream("MyNet", models=("mynet.model:MyNet",))
    """

    title: str
    """Display name, for example "SchNet (PyTorch Geometric)"."""
    models: tuple[str, ...] = ()
    """Model classes as "module:Class". The module is the one that defines the class or one that exports it."""
    checkout: Checkout | None = None
    """Layout of the clone, for an upstream that is cloned. The module of a model class is then its file's path with
    dots, and classes are matched by file, whatever name the file is imported under."""
    recognises: Callable[[nn.Module], bool] | None = None
    """Test for models of this upstream, for adapters of many models. Called if no adapter names the model's class."""
    evaluating: Mapping[str, Any] = field(default_factory=dict)
    """Forward arguments and values that mark an evaluation, as {"training": False}. For an upstream that does not call
    ``model.eval()``. All of them must match; defaults count."""

    def __post_init__(self) -> None:
        _check(self, "title", isinstance(self.title, str), "a string, as 'MyNet'")
        mapping = isinstance(self.evaluating, Mapping)
        _check(self, "evaluating", mapping, "arguments and values, as {'training': False}")
        _check(self, "checkout", isinstance(self.checkout, (Checkout, type(None))), "a Checkout or None")
        function = self.recognises is None or callable(self.recognises)
        _check(self, "recognises", function, "a function of a model or None")
        classes = isinstance(self.models, (tuple, list)) and bool(self.models or self.recognises)
        _check(self, "models", classes, "a tuple of 'module:Class', as ('mynet.model:MyNet',)")
        for path in self.models:
            if not is_object_path(path):
                raise ValueError(f"Upstream: models: expected 'module:Class', as 'mynet.model:MyNet', found {path!r}")

    @property
    def files(self) -> tuple[str, ...]:
        """Files of a checkout that define the model classes; empty for an installed package."""
        return () if self.checkout is None else tuple(dict.fromkeys(map(file_of, self.models)))


@dataclass(frozen=True)
class Shim:
    """A compatibility fix that lets an upstream run with current versions of its dependencies."""

    name: str
    """Name of what is missing, for example "np.Inf"."""
    reason: str
    """Why it is missing, for reports."""
    needed: Callable[[], bool]
    """Returns whether the fix is needed in this environment."""
    apply: Callable[[], None]
    """Applies the fix to this process."""
    device: str | None = None
    """Value of the setting ``device`` that requests this fix; None if it does not depend on the device."""
    first: bool = False
    """True to apply the fix before upstream is imported. Such a fix must not import upstream itself."""

    def __post_init__(self) -> None:
        _check(self, "name", isinstance(self.name, str), "a string")
        _check(self, "reason", isinstance(self.reason, str), "a string")
        _check(self, "first", isinstance(self.first, bool), "True or False")
        _check(self, "needed", callable(self.needed), "a function that returns whether the fix is needed")
        _check(self, "apply", callable(self.apply), "a function that applies the fix")
        _check(self, "device", isinstance(self.device, (str, type(None))), "a device or None")


@dataclass(frozen=True)
class StandIn:
    """A stub for a module that is not installed. Only upstream's own files can import it."""

    name: str
    """Name of the module, for example "torch_scatter"."""
    reason: str
    """Why the stub is enough, for reports."""
    make: Callable[[], ModuleType]
    """Returns the stub. Called when upstream first imports the module."""

    def __post_init__(self) -> None:
        _check(self, "name", isinstance(self.name, str), "the name of a module")
        _check(self, "reason", isinstance(self.reason, str), "a string")
        _check(self, "make", callable(self.make), "a function that makes the module")


AnyShim = Shim | StandIn


@dataclass(frozen=True)
class Example:
    """A small model and the arguments of one forward pass, made without data."""

    model: nn.Module
    args: tuple[Any, ...] = ()
    """Positional arguments of the forward pass."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the forward pass."""
    single: bool = False
    """True if upstream holds constants in float32, so that its symmetry is only exact to single precision."""

    def __post_init__(self) -> None:
        # Recognised by its methods, because this module must not import torch.
        module = callable(getattr(self.model, "named_modules", None)) and not isinstance(self.model, type)
        _check(self, "model", module, "a torch.nn.Module")
        _check(self, "args", isinstance(self.args, tuple), "a tuple of the forward's positional arguments, as (x,)")
        named = isinstance(self.kwargs, Mapping) and _are_strings(self.kwargs)
        _check(self, "kwargs", named, "the forward's keyword arguments by name, as {'x': x}")


def file_of(path: str) -> str:
    """Return the file of a checkout that defines a class: "models/net.py" for "models.net:Net"."""
    return f"{path.partition(':')[0].replace('.', '/')}.py"


def class_path(cls: type) -> str:
    """Return "module:Class", the form in which adapters name model classes."""
    return f"{cls.__module__}:{cls.__qualname__}"


@dataclass(frozen=True)
class Metric:
    """A result that a script prints, and the regular expressions that find it.

    Each pattern has one group, the number. ``{number}`` in a pattern stands for such a group:

        Metric("test", r"Best test loss: {number}", r"epoch \\d+ test loss: {number}")
    """

    name: str
    """Display name, for example "test"."""
    pattern: str
    """Finds the result. The last match in the script's output counts."""
    curve: str = ""
    """Matches once per evaluation, with the value of that evaluation. Empty if ``pattern`` does."""
    higher: bool = False
    """True if higher is better."""

    def __post_init__(self) -> None:
        for name in ("name", "pattern", "curve"):
            _check(self, name, isinstance(getattr(self, name), str), "a string")
        for name in ("pattern", "curve"):
            object.__setattr__(self, name, getattr(self, name).replace("{number}", NUMBER))


@dataclass(frozen=True)
class Script:
    """Facts about a script of upstream, read from its command line."""

    epochs: int | None = None
    """Number of training epochs; None if unknown."""
    source: str = "the script's command line"
    """Origin of the number of epochs, for reports."""
    metrics: tuple[Metric, ...] = ()
    """Results that the script prints, the most important first."""
    seed: str = ""
    """Option that sets the script's random seed, for example "--seed"; empty if it has none."""

    def __post_init__(self) -> None:
        _check(self, "epochs", self.epochs is None or type(self.epochs) is int, "an integer or None")
        _check(self, "source", isinstance(self.source, str), "a string")
        metrics = isinstance(self.metrics, tuple) and all(isinstance(each, Metric) for each in self.metrics)
        _check(self, "metrics", metrics, "a tuple of Metric")
        _check(self, "seed", isinstance(self.seed, str), "an option, as '--seed'")

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
        """Read the number of epochs from an option of the script.

        Args:
            argv: The command line, script first.
            scripts: Scripts that have this option.
            option: The option, for example "--epochs".
            default: Number of epochs without the option.
            metrics: Results that these scripts print.
            seed: Option that sets their seed.

        Returns:
            The script, or None if the command line runs another script or its option cannot be parsed.
        """
        name = os.path.basename(argv[0]) if argv else ""
        if name not in {os.path.basename(script) for script in scripts}:
            return None
        parser = argparse.ArgumentParser(add_help=False, exit_on_error=False)
        parser.add_argument(option, dest="epochs", type=int, default=None)
        try:
            given, _ = parser.parse_known_args(list(argv[1:]))
        except argparse.ArgumentError:
            return None  # the script reports it
        source = f"{name} {option}" if given.epochs is not None else f"{name}'s default"
        return cls(default if given.epochs is None else given.epochs, source, metrics, seed)
