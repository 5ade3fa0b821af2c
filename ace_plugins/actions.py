"""Deprecated module: groups and actions are now in `ace_plugins.adapter`."""

from __future__ import annotations

import warnings

from . import adapter


def __getattr__(name: str) -> object:
    if name.startswith("_") or name not in adapter.__all__:
        raise AttributeError(f"module 'ace_plugins.actions' has no attribute {name!r}")
    warnings.warn("ace_plugins.actions has moved; import from ace_plugins.adapter", DeprecationWarning, stacklevel=2)
    return getattr(adapter, name)
