"""Shim for ``nequip-package``, so that it can package a model with its branches.

A package refers to the classes of ace-plugins and does not contain them, so ace-plugins must be installed where the
package is loaded. A model with branches has no variant for ``torch.compile``, so it needs its own packaging mode:
``nequip-package build --mode ace``.
"""

from __future__ import annotations

import sys

from ace_plugins.adapter import Shim

MODE = "ace"


def _is_packaging() -> bool:
    """Return whether this process runs nequip-package."""
    return "nequip.scripts.package" in sys.modules


def _register() -> None:
    from nequip.scripts._package_utils import (
        register_libraries_as_external_for_packaging,
        register_packaging_mode,
    )

    register_libraries_as_external_for_packaging(extern_modules=("ace_plugins", "ace_nequip"))
    register_packaging_mode(MODE, lambda: ["eager"])


SHIMS = (Shim("nequip-package", "packages of models with branches refer to ace-plugins", _is_packaging, _register),)
