"""Matches models with upstreams: classes by name, those of a checkout by file, without importing anything."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from ..contract.upstreams import Upstream, file_of

if TYPE_CHECKING:
    from types import ModuleType


def claims(upstream: Upstream, cls: type) -> bool:
    """Return whether this class or a base class is one of the upstream's model classes."""
    return any(_matches(upstream, base, path) for base in cls.__mro__ for path in upstream.models)


def _matches(upstream: Upstream, cls: type, path: str) -> bool:
    module, _, name = path.partition(":")
    if upstream.checkout is None and class_in(sys.modules.get(module), path) is cls:
        return True  # exported there, wherever it is defined
    return cls.__qualname__ == name and holds(upstream, sys.modules.get(cls.__module__), path)


def class_in(module: ModuleType | None, path: str) -> type | None:
    """Return the class "module:Class" in this module; None if it has none."""
    found: object = module
    for part in path.partition(":")[2].split("."):
        found = getattr(found, part, None)
    return found if isinstance(found, type) else None


def holds(upstream: Upstream, module: ModuleType | None, path: str) -> bool:
    """Return whether this is the module of the class "module:Class" of this upstream."""
    if upstream.checkout is None:
        return module is not None and module.__name__ == path.partition(":")[0]
    file = getattr(getattr(module, "__spec__", None), "origin", None)
    # Other projects have a models/net.py too, so the upstream's other files must be in the same folder.
    return is_file(file, file_of(path)) and belongs(file or "", upstream.files)


def is_file(path: str | None, relative: str) -> bool:
    """Return whether a module's path ends with this relative path ("models/net.py")."""
    return bool(path) and f"/{path}".replace(os.sep, "/").endswith(f"/{relative}")


def belongs(file: str, upstream: tuple[str, ...]) -> bool:
    """Return whether a file is part of an upstream's clone.

    Args:
        file: Path of the file.
        upstream: Relative paths of files that identify the clone, such as `Upstream.files`.

    Returns:
        True if the file is in, or below, a folder that has all of the upstream's files.
    """
    if not file or not upstream:
        return False
    # Both as given and resolved: either may be a link into the checkout, or out of it.
    return any(find_root(os.path.dirname(path(file)), upstream) for path in (os.path.abspath, os.path.realpath))


def find_root(folder: str, upstream: tuple[str, ...]) -> str | None:
    """Return this folder, or the nearest one above it, that has all files of an upstream; None if there is none."""
    last = ""
    while folder != last:
        if os.path.basename(folder) in ("site-packages", "dist-packages"):
            return None  # a library in an environment inside the checkout
        if all(os.path.isfile(os.path.join(folder, each)) for each in upstream):
            return folder
        folder, last = os.path.dirname(folder), folder
    return None
