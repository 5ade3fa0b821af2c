"""Data that adapters return: the upstream they patch, its scripts, compatibility shims and an example."""

from __future__ import annotations

import argparse
import os
import textwrap
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, get_args

if TYPE_CHECKING:
    from types import ModuleType

    from torch import nn

NUMBER = r"([-+]?(?:(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|nan|inf))"
"""Regular expression that replaces ``{number}`` in the patterns of a `Metric`: one group that matches a number."""


def check_field(owner: Any, field_name: str, valid: bool, expected: str) -> None:
    """Raise a ValueError that names the object and the field, unless the value is valid."""
    if not valid:
        who = f"{type(owner).__name__} {owner.name!r}" if hasattr(owner, "name") else type(owner).__name__
        raise ValueError(f"{who}: {field_name}: expected {expected}, found {getattr(owner, field_name)!r}")


def check_types(owner: Any, **types: Any) -> None:
    """Raise a ValueError unless every named field is an instance of a type or union of types."""
    for field_name, kind in types.items():
        names = (each.__name__.removesuffix("Type") for each in get_args(kind) or [kind])
        check_field(owner, field_name, isinstance(getattr(owner, field_name), kind), " or ".join(names))


def is_object_path(text: object) -> bool:
    """Return whether a text has the form "module:name"."""
    module, colon, name = str(text).partition(":")
    return bool(colon) and all(map(str.isidentifier, [*module.split("."), *name.split(".")]))


def _are_files(paths: Collection[str]) -> bool:
    """Return whether there are paths, and all of them are inside the clone."""
    return bool(paths) and all(path and not path.startswith("/") and ".." not in path.split("/") for path in paths)


@dataclass(frozen=True)
class Checkout:
    """An upstream that users clone instead of installing it. Paths are relative to the clone and use "/"."""

    repository: str
    """Display name, for example "RobDHess/Steerable-E3-GNN"."""
    scripts: tuple[str, ...]
    """Scripts that users run. ``ace-patch NAME`` adds the line that imports ace-plugins to these files."""
    shape: Mapping[str, str]
    """Mapping from a file to its expected classes and signatures, as a stub: {"net.py": "class Net(Module): ..."}."""
    commits: tuple[str, ...] = ()
    """Commits of the repository that the adapter was tested with."""

    def __post_init__(self) -> None:
        scripts = isinstance(self.scripts, tuple) and _are_files(self.scripts)
        check_field(self, "scripts", scripts, "files in the clone, as ('main.py',)")
        check_field(self, "shape", _are_files(self.shape), "stubs by file, as {'net.py': 'class Net(Module): ...'}")
        for stub in self.shape.values():
            compile(textwrap.dedent(stub), "shape", "exec")


@dataclass(frozen=True)
class Upstream:
    """The library or repository that an adapter patches: ``Upstream("MyNet", models=("mynet.model:MyNet",))``.

    The adapter's metadata lists the supported versions, in the extra ``upstream``.
    """

    title: str
    """Display name, for example "SchNet (PyTorch Geometric)"."""
    models: tuple[str, ...] = ()
    """Model classes as "module:Class". The module may define the class, or only export it."""
    checkout: Checkout | None = None
    """Layout of the clone, if users clone this upstream. In ``models``, write the path of a class's file with dots:
    "models.net:Net" for models/net.py. Classes are matched by file, not by the name under which it is imported."""
    recognises: Callable[[nn.Module], bool] | None = None
    """Returns whether a model belongs to this upstream. Called only if no adapter lists the model's class."""
    evaluating: Mapping[str, Any] = field(default_factory=dict)
    """Mapping from forward arguments to the values they have in evaluation, such as {"training": False}. For upstreams
    that do not call ``model.eval()``. All must match; an argument that is not passed has its default value."""

    def __post_init__(self) -> None:
        check_types(self, title=str, checkout=Checkout | None)
        classes = isinstance(self.models, tuple | list) and all(map(is_object_path, self.models))
        named = classes and bool(self.models or self.recognises)
        check_field(self, "models", named, "a tuple of 'module:Class', as ('mynet.model:MyNet',)")

    @property
    def files(self) -> tuple[str, ...]:
        """Files of a checkout that define the model classes; empty for an installed package."""
        return () if self.checkout is None else tuple(dict.fromkeys(map(file_of, self.models)))


@dataclass(frozen=True)
class Shim:
    """A compatibility fix that lets an upstream run with current versions of its dependencies."""

    name: str
    """Name of the missing function, class or value, for example "np.Inf"."""
    reason: str
    """Why it is missing, for reports."""
    needed: Callable[[], bool]
    """Returns whether the fix is needed in this environment."""
    apply: Callable[[], None]
    """Applies the fix to this process."""
    device: str | None = None
    """Value of the setting ``device`` with which this fix is applied; None to apply it with any value."""
    first: bool = False
    """True to apply the fix before upstream is imported. Such a fix must not import upstream itself."""


@dataclass(frozen=True)
class StandIn:
    """A stub for a module that is not installed. Only upstream's own files can import it."""

    name: str
    """Name of the module, for example "torch_scatter"."""
    reason: str
    """Why the stub is enough, for reports."""
    make: Callable[[], ModuleType]
    """Returns the stub. Called when upstream first imports the module."""


AnyShim = Shim | StandIn


@dataclass(frozen=True)
class Example:
    """A small model and the arguments of one forward pass, made without data."""

    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    single: bool = False
    """True if upstream stores constants in float32, so that a float64 model has errors of float32 size."""

    def __post_init__(self) -> None:
        # A module is recognised by one of its methods, because this file must not import torch.
        module = callable(getattr(self.model, "named_modules", None)) and not isinstance(self.model, type)
        check_field(self, "model", module, "a torch.nn.Module")


def file_of(path: str) -> str:
    """Return the path, inside a checkout, of the file that defines a class: "models/net.py" for "models.net:Net"."""
    return f"{path.partition(':')[0].replace('.', '/')}.py"


def class_path(cls: type) -> str:
    """Return the class as "module:Class", the form in which adapters name model classes."""
    return f"{cls.__module__}:{cls.__qualname__}"


@dataclass(frozen=True)
class Metric:
    """A result that a script prints, and the regular expressions that find it.

    Each pattern has one group, which matches the number. ``{number}`` in a pattern stands for such a group:
    ``Metric("test", r"Best test loss: {number}", r"epoch \\d+ test loss: {number}")``.
    """

    name: str
    pattern: str
    """Regular expression that finds the result. The last match in the script's output counts."""
    curve: str = ""
    """Regular expression that finds the value of every evaluation. Empty if ``pattern`` already does this."""
    higher: bool = False
    """True if a higher value is better."""

    def __post_init__(self) -> None:
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
    """Option that sets the script's random seed, for example "--seed"; empty if the script has no such option."""

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
        """Return facts about a script, with the epochs from an ``option`` such as "--epochs" on its command line.

        ``argv`` is the command line. ``scripts`` are the files of the scripts that have this option. They print
        ``metrics``, and ``seed`` is their option for the random seed. ``default`` is the number of epochs without
        ``option``. Return None if the command line runs another script, or if the option's value cannot be parsed.
        """
        name = os.path.basename(argv[0]) if argv else ""
        if name not in {os.path.basename(script) for script in scripts}:
            return None
        parser = argparse.ArgumentParser(add_help=False, exit_on_error=False)
        parser.add_argument(option, dest="epochs", type=int, default=None)
        try:
            given, _ = parser.parse_known_args(list(argv[1:]))
        except argparse.ArgumentError:
            return None  # the script itself reports the error
        source = f"{name} {option}" if given.epochs is not None else f"{name}'s default"
        return cls(default if given.epochs is None else given.epochs, source, metrics, seed)
