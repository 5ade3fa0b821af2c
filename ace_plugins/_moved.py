"""Names that could be imported from `ace_plugins` in version 0.1.0 and have moved since."""

from __future__ import annotations

import importlib
import warnings

HOMES = {
    "Audit": "testing.audit",
    "Bounds": "testing.bounds",
    "EquivarianceError": "symmetry.measure",
    "SiteStatus": "report.status",
    "Status": "report.status",
}
"""Mapping from a moved name to its new module in this package. All other moved names are in `ace_plugins.adapter`."""


def find_moved(name: str, former: str = "ace_plugins") -> object:
    """Return an object that has moved out of a module.

    Args:
        name: The name that was requested.
        former: The module from which it was requested.

    Returns:
        The object. A DeprecationWarning names its new module.

    Raises:
        AttributeError: If the name is not one that has moved.
    """
    home = f"ace_plugins.{HOMES.get(name, 'adapter')}"
    if not name.startswith("_"):
        module = importlib.import_module(home)
        if name in HOMES or name in module.__all__:
            warnings.warn(f"{former}.{name} has moved; import it from {home}", DeprecationWarning, stacklevel=3)
            return getattr(module, name)
    raise AttributeError(f"module {former!r} has no attribute {name!r}")
