"""Determines whether a model class belongs to an upstream: by module and name, or in a checkout by file and name."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType

from ..contract.upstreams import Upstream, file_of


def claims(upstream: Upstream, cls: type) -> bool:
    """Return whether this class or one of its base classes is a model class of the upstream."""
    return any(_matches(upstream, base, path) for base in cls.__mro__ for path in upstream.models)


def _matches(upstream: Upstream, cls: type, path: str) -> bool:
    module, _, name = path.partition(":")
    if upstream.checkout is None and class_in(sys.modules.get(module), path) is cls:
        return True  # the named module exports this class, wherever it is defined
    return cls.__qualname__ == name and is_module_of(upstream, sys.modules.get(cls.__module__), path)


def class_in(module: ModuleType | None, path: str) -> type | None:
    """Look up the class of a path "module:Class" in this module. Return None if the module has no such class."""
    found: object = module
    for part in path.partition(":")[2].split("."):
        found = getattr(found, part, None)
    return found if isinstance(found, type) else None


def is_module_of(upstream: Upstream, module: ModuleType | None, path: str) -> bool:
    """Return whether a module is the one in ``path``, a model path "module:Class" of the upstream."""
    if upstream.checkout is None:
        return module is not None and module.__name__ == path.partition(":")[0]
    file = getattr(getattr(module, "__spec__", None), "origin", None)
    # Other projects may have a models/net.py as well, so the upstream's other files must be in the same clone.
    return is_file(file, file_of(path)) and belongs(file or "", upstream.files)


def is_file(path: str | None, relative: str) -> bool:
    """Return whether the path of a module's file ends with this relative path, such as "models/net.py"."""
    return bool(path) and f"/{path}".replace(os.sep, "/").endswith(f"/{relative}")


def belongs(file: str, upstream: tuple[str, ...]) -> bool:
    """Return whether a file is part of an upstream's clone.

    Args:
        file: Path of the file.
        upstream: Relative paths of files that identify the clone, such as `Upstream.files`.

    Returns:
        True if the file is in, or below, a folder that has all of the upstream's files.
    """
    # Try the path as given and with links resolved: the file may be a link into the checkout, or out of it.
    paths = (os.path.abspath(file), os.path.realpath(file)) if file and upstream else ()
    return any(find_root(os.path.dirname(path), upstream) for path in paths)


def find_root(folder: str, upstream: tuple[str, ...]) -> str | None:
    """Return this folder, or the nearest one above it, that has all files of an upstream; None if there is none."""
    for root in (Path(folder), *Path(folder).parents):
        if root.name in ("site-packages", "dist-packages"):
            return None  # a library in an environment inside the checkout
        if all((root / file).is_file() for file in upstream):
            return str(root)
    return None
