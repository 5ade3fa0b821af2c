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

    from .engine.attaching import attach, equivariance_error, project, use_branches
    from .engine.checkpoints import export
    from .settings.config import Config
    from .contract.data import Checkout, Example, Shim, Site, StandIn, Stem, Tap, Upstream
    from .symmetry.measuring import Call, EquivarianceError
    from .errors import AceError, AceWarning
    from .contract.hookspecs import hookimpl
    from .patch.constructors import patched
    from .engine.status import SiteStatus, Status, status
    from .report.trace import read_trace

__version__ = "0.1.0"

_HOME = {
    "attach": "engine.attaching",
    "project": "engine.attaching",
    "status": "engine.status",
    "use_branches": "engine.attaching",
    "equivariance_error": "engine.attaching",
    "Status": "engine.status",
    "SiteStatus": "engine.status",
    "export": "engine.checkpoints",
    "patched": "patch.constructors",
    "Config": "settings.config",
    "Upstream": "contract.data",
    "Checkout": "contract.data",
    "StandIn": "contract.data",
    "Site": "contract.data",
    "Stem": "contract.data",
    "Tap": "contract.data",
    "Shim": "contract.data",
    "Example": "contract.data",
    "Call": "symmetry.measuring",
    "EquivarianceError": "symmetry.measuring",
    "AceError": "errors",
    "AceWarning": "errors",
    "hookimpl": "contract.hookspecs",
    "read_trace": "report.trace",
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
