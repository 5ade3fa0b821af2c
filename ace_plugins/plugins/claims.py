"""Whose model is this? Classes are matched by name, and those of a checkout by file, so nothing is imported."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from ..contract.upstreams import Upstream, file_of

if TYPE_CHECKING:
    from types import ModuleType


def claims(upstream: Upstream, cls: type) -> bool:
    """Whether this class, or one it is derived from, is among the upstream's model classes."""
    return any(_is(upstream, base, path) for base in cls.__mro__ for path in upstream.models)


def _is(upstream: Upstream, cls: type, path: str) -> bool:
    module, _, name = path.partition(":")
    if upstream.checkout is None and class_in(sys.modules.get(module), path) is cls:
        return True  # where upstream offers it, wherever it is defined
    return cls.__qualname__ == name and holds(upstream, sys.modules.get(cls.__module__), path)


def class_in(module: ModuleType | None, path: str) -> type | None:
    """The class "module:Class" in this module, if it is there."""
    found: object = module
    for part in path.partition(":")[2].split("."):
        found = getattr(found, part, None)
    return found if isinstance(found, type) else None


def holds(upstream: Upstream, module: ModuleType | None, path: str) -> bool:
    """Whether this module is the one that the class "module:Class" of this upstream is in."""
    if upstream.checkout is None:
        return module is not None and module.__name__ == path.partition(":")[0]
    file = getattr(getattr(module, "__spec__", None), "origin", None)
    # Other projects have a models/net.py too: in the same folder must be the rest of this one's.
    return is_file(file, file_of(path)) and belongs(file or "", upstream.files)


def is_file(path: str | None, relative: str) -> bool:
    """Whether a module's file is the one of that name ("models/net.py") in some folder."""
    return bool(path) and f"/{path}".replace(os.sep, "/").endswith(f"/{relative}")


def belongs(file: str, upstream: tuple[str, ...]) -> bool:
    """Whether a file is part of an upstream: it is in, or below, a folder that holds all of upstream's own files."""
    if not file or not upstream:
        return False
    # As it was found and as it is: either may be a link into the checkout, or out of it.
    return any(holding(os.path.dirname(path(file)), upstream) for path in (os.path.abspath, os.path.realpath))


def holding(folder: str, upstream: tuple[str, ...]) -> str | None:
    """The folder, this one or one above it, that holds all files of an upstream."""
    last = ""
    while folder != last:
        if os.path.basename(folder) in ("site-packages", "dist-packages"):
            return None  # a library, in an environment that somebody made inside the checkout
        if all(os.path.isfile(os.path.join(folder, each)) for each in upstream):
            return folder
        folder, last = os.path.dirname(folder), folder
    return None
