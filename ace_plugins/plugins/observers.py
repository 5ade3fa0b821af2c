"""Telling observers what happens, each on its own: a logger that fails must not cost anyone a training run."""

from __future__ import annotations

import os
import warnings
from typing import Any

import torch

from ..errors import AceWarning
from .registry import registry


def tell(hook: str, **arguments: Any) -> None:
    """Call an observer hook of every plugin that has it; what one raises becomes a warning with its name."""
    from ..report.trace import TRACE  # the trace is an observer like any other, and imports this module's neighbours

    manager = registry().manager
    if not manager.is_registered(TRACE):
        manager.register(TRACE, name="ace_plugins.trace")
    for impl in getattr(manager.hook, hook).get_hookimpls():
        try:
            impl.function(*(arguments[name] for name in impl.argnames))
        except Exception as error:
            warnings.warn(
                f"observer {impl.plugin_name!r} failed in {hook}: {type(error).__name__}: {error}; training goes on",
                AceWarning,
                stacklevel=2,
            )


_last_rank: int | None = None


def rank() -> int:
    """Of this process among those that train one model; 0 where it trains alone."""
    global _last_rank
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        _last_rank = distributed.get_rank()
    if _last_rank is not None:
        return _last_rank  # also after the script has ended its process group
    return int(os.environ.get("RANK", "0") or 0)
