"""Telling observers what happens, each on its own: a logger that fails must not cost anyone a training run."""

from __future__ import annotations

import warnings
from typing import Any

from ..errors import AceWarning
from .registry import registry


def tell(hook: str, **arguments: Any) -> None:
    """Call an observer hook of every plugin that has it; what one raises becomes a warning with its name."""
    for impl in getattr(registry().manager.hook, hook).get_hookimpls():
        try:
            impl.function(*(arguments[name] for name in impl.argnames))
        except Exception as error:
            warnings.warn(
                f"observer {impl.plugin_name!r} failed in {hook}: {type(error).__name__}: {error}; training goes on",
                AceWarning,
                stacklevel=2,
            )
