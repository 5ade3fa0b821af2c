"""Making a checkout importable in this process, for doctor, the battery and notebooks."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path

from ..checkout.layout import fits, layout
from ..errors import AdapterError, CheckoutError
from ..plugins.plugin import Plugin


def make_importable(plugin: Plugin, checkout: Path | None = None) -> Path | None:
    """Put the adapter's upstream on ``sys.path``: the checkout given, or one that can be found.

    Without one given: ``ACE_UPSTREAM_<ADAPTER>``, a checkout that is importable already, the current folder and
    those above it. An upstream that is installed needs nothing.
    """
    assert plugin.upstream is not None
    wanted = plugin.upstream.checkout
    if wanted is None:
        if checkout is not None:
            raise AdapterError(f"adapter {plugin.name!r} patches an installed package: expected no checkout")
        return None
    variable = f"ACE_UPSTREAM_{plugin.name.upper()}"
    given = checkout or (Path(os.environ[variable]) if os.environ.get(variable) else None)
    if given is not None:
        found = layout(given, wanted)
        if not found.fits:
            raise CheckoutError(f"{given} has not the shape of a checkout of {wanted.repository}", found.differences)
        root = given
    else:
        here = [Path(path or ".") for path in (*sys.path, ".")]
        near = next((p for p in (*here, *Path.cwd().parents) if fits(p, wanted)), None)
        if near is None:
            raise AdapterError(
                f"adapter {plugin.name!r} patches a checkout of {wanted.repository}: expected its folder, found none; "
                f"run it there, give its path, or set {variable}"
            )
        root = near
    path = str(root.resolve())
    if path not in map(os.path.realpath, sys.path):
        sys.path.insert(0, path)
    for file in plugin.upstream.files:
        module = file.removesuffix(".py").replace("/", ".")
        origin = getattr(find_spec(module), "origin", None)
        if os.path.realpath(origin or "") != os.path.join(path, *file.split("/")):
            raise AdapterError(
                f"module {module!r} is {origin}, expected the one in {path}: another package of that name comes first; "
                "use a process of its own"
            )
    return root
