"""Finds the checkout of an adapter's upstream and makes it importable."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path

from ..checkout.layout import fits, read_layout
from ..contract.upstreams import Checkout
from ..errors import AdapterError, CheckoutError
from ..plugins.plugin import Plugin


def make_importable(plugin: Plugin, checkout: Path | None = None) -> Path | None:
    """Put the adapter's checkout on ``sys.path`` and return its folder; None for an installed upstream.

    Without ``checkout`` the folder is the value of the environment variable ``ACE_UPSTREAM_<ADAPTER>``. Without that
    variable it is the first folder with the right layout among ``sys.path``, the current folder and its parents.
    """
    expected = plugin.patches.checkout
    if expected is None:
        if checkout is not None:
            raise AdapterError(f"adapter {plugin.name!r} patches an installed package: expected no checkout")
        return None
    root = _find_checkout(plugin, expected, checkout)
    path = os.path.realpath(root)
    if path not in map(os.path.realpath, sys.path):
        sys.path.insert(0, path)
    for file in plugin.patches.files:
        module = file.removesuffix(".py").replace("/", ".")
        origin = getattr(find_spec(module), "origin", None)
        if os.path.realpath(origin or "") != os.path.join(path, *file.split("/")):
            raise AdapterError(
                f"module {module!r} is {origin}, expected the one in {path}: another package of the same name was "
                "imported first; start a new process"
            )
    return root


def _find_checkout(plugin: Plugin, expected: Checkout, given: Path | None) -> Path:
    variable = f"ACE_UPSTREAM_{plugin.name.upper()}"
    given = given or (Path(os.environ[variable]) if os.environ.get(variable) else None)
    if given is not None:
        found = read_layout(given, expected)
        if not found.fits:
            raise CheckoutError(f"{given} does not look like a checkout of {expected.repository}", found.differences)
        return given
    for folder in (*(Path(path or ".") for path in sys.path), Path.cwd(), *Path.cwd().parents):
        if fits(folder, expected):
            return folder
    raise AdapterError(
        f"adapter {plugin.name!r} patches a checkout of {expected.repository}: expected its folder, found none; "
        f"run the command there, give its path, or set {variable}"
    )
