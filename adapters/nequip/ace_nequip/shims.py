"""What ``nequip-package`` needs to know to package a model with its branches.

The branches are classes of ace-plugins, which a package refers to and does not contain: whoever loads it has
ace-plugins installed. And of such a model there is no variant for ``torch.compile``, so it has a packaging mode of its
own, ``nequip-package build --mode ace``.
"""

from __future__ import annotations

import sys

from ace_plugins.adapter import Shim

MODE = "ace"


def _packaging() -> bool:
    """Whether this process is one of nequip-package."""
    return "nequip.scripts.package" in sys.modules


def _register() -> None:
    from nequip.scripts._package_utils import (
        register_libraries_as_external_for_packaging,
        register_packaging_mode,
    )

    register_libraries_as_external_for_packaging(extern_modules=("ace_plugins", "ace_nequip"))
    register_packaging_mode(MODE, lambda: ["eager"])


SHIMS = (Shim("nequip-package", "a package refers to ace-plugins for the branches", _packaging, _register),)
