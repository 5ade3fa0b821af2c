"""Adaptive Constrained Equivariance for the models you already use.

    from ace_plugins import attach
    model = attach(SchNet(...))        # then build the optimizer and train as always

Names are loaded on first use, so that ``ace-patch --help`` does not wait for torch.
"""

from __future__ import annotations

import importlib

TYPE_CHECKING = False  # as typing has it, without waiting for typing: scripts wait for this module
if TYPE_CHECKING:
    from typing import Any

    from .attaching import attach, equivariance_error, project, use_branches
    from .checkpoints import export
    from .config import Config
    from .contract import Checkout, Example, Shim, Site, StandIn, Stem, Tap, Upstream
    from .equivariance import Call, EquivarianceError
    from .errors import AceError, AceWarning
    from .hookspecs import hookimpl
    from .patching import patched
    from .site_status import SiteStatus, Status, status
    from .trace import read_trace

__version__ = "0.1.0"

_HOME = {
    "attach": "attaching",
    "project": "attaching",
    "status": "site_status",
    "use_branches": "attaching",
    "equivariance_error": "attaching",
    "Status": "site_status",
    "SiteStatus": "site_status",
    "export": "checkpoints",
    "patched": "patching",
    "Config": "config",
    "Upstream": "contract",
    "Checkout": "contract",
    "StandIn": "contract",
    "Site": "contract",
    "Stem": "contract",
    "Tap": "contract",
    "Shim": "contract",
    "Example": "contract",
    "Call": "equivariance",
    "EquivarianceError": "equivariance",
    "AceError": "errors",
    "AceWarning": "errors",
    "hookimpl": "hookspecs",
    "read_trace": "trace",
}

__all__ = [
    "AceError",
    "AceWarning",
    "Call",
    "Checkout",
    "Config",
    "EquivarianceError",
    "Example",
    "Shim",
    "Site",
    "SiteStatus",
    "StandIn",
    "Status",
    "Stem",
    "Tap",
    "Upstream",
    "attach",
    "equivariance_error",
    "export",
    "hookimpl",
    "patched",
    "project",
    "read_trace",
    "status",
    "use_branches",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
