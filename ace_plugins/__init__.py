"""Adaptive Constrained Equivariance for the models you already use.

    from ace_plugins import attach
    model = attach(SchNet(...))        # then build the optimizer and train as always

This module is the public surface. Users and adapters import from here (and from ``ace_plugins.testing``) and from
nowhere behind it. Names are loaded on first use, so that ``ace-patch --help`` and scripts do not wait for torch.
"""

from __future__ import annotations

import importlib

TYPE_CHECKING = False  # as typing has it, without waiting for typing: scripts wait for this module
if TYPE_CHECKING:
    from typing import Any

    from .actions import Action, Grid, GroupAction, Invariant, Irreps, Positions, PseudoVectors, Tensors, Vectors
    from .contract.hookspecs import hookimpl
    from .contract.sites import AddsItself, Node, Site, Stem, Tap
    from .contract.upstreams import AnyShim, Checkout, Example, Metric, Script, Shim, StandIn, Upstream
    from .engine.attaching import project
    from .engine.audit import Audit, audit
    from .engine.bounded import Bounded
    from .engine.bounds import Bounds, bounds
    from .engine.branches import Norm, linear, mlp, norm_linear
    from .engine.checkpoints import export, numpy_numbers
    from .engine.convolution import Convolution
    from .engine.measuring import averaged, equivariance_error, use_branches
    from .errors import AceError, AceWarning, AdapterError, ConfigError, one_of
    from .files import publish
    from .patch.constructors import attach, patched
    from .patch.imports import whenever_imported
    from .pictures import check_picture
    from .plugins.claims import belongs
    from .report.status import SiteStatus, Status, status
    from .report.trace import read_trace
    from .settings.config import Config
    from .symmetry.finite import Cyclic, Dihedral
    from .symmetry.graphs import Graphs
    from .symmetry.groups import E2, E3, O2, O3, SE2, SE3, SO2, SO3, Element, Group, Rigid
    from .symmetry.measuring import Call, EquivarianceError
    from .telling import progress, say

__version__ = "0.1.0"

_HOMES = {
    # Train with ACE.
    "patch.constructors": "attach patched",
    "engine.attaching": "project",
    "engine.audit": "Audit audit",
    "engine.bounds": "Bounds bounds",
    "engine.measuring": "averaged equivariance_error use_branches",
    "report.status": "SiteStatus Status status",
    "engine.checkpoints": "export numpy_numbers",
    "report.trace": "read_trace",
    "settings.config": "Config",
    "symmetry.measuring": "Call EquivarianceError",
    "errors": "AceError AceWarning AdapterError ConfigError one_of",
    # Write an adapter.
    "contract.hookspecs": "hookimpl",
    "contract.sites": "AddsItself Node Site Stem Tap",
    "contract.upstreams": "AnyShim Checkout Example Metric Script Shim StandIn Upstream",
    "symmetry.actions": "Action Grid GroupAction Invariant Irreps Positions PseudoVectors Tensors Vectors",
    "symmetry.finite": "Cyclic Dihedral",
    "symmetry.graphs": "Graphs",
    "symmetry.groups": "E2 E3 Element Group O2 O3 Rigid SE2 SE3 SO2 SO3",
    "engine.branches": "Norm linear mlp norm_linear",
    "engine.bounded": "Bounded",
    "engine.convolution": "Convolution",
    # Repair an upstream, make data for it.
    "patch.imports": "whenever_imported",
    "plugins.claims": "belongs",
    "telling": "progress say",
    "files": "publish",
    "pictures": "check_picture",
}
_HOME = {name: home for home, names in _HOMES.items() for name in names.split()}

# fmt: off
__all__ = [
    "E2", "E3", "O2", "O3", "SE2", "SE3", "SO2", "SO3", "AceError", "AceWarning", "Action", "AdapterError",
    "AddsItself", "AnyShim", "Audit", "Bounded", "Bounds", "Call", "Checkout", "Config", "ConfigError",
    "Convolution", "Cyclic", "Dihedral", "Element", "EquivarianceError", "Example", "Graphs", "Grid", "Group",
    "GroupAction", "Invariant", "Irreps", "Metric", "Node", "Norm", "Positions", "PseudoVectors", "Rigid", "Script",
    "Shim", "Site", "SiteStatus", "StandIn", "Status", "Stem", "Tap", "Tensors", "Upstream", "Vectors", "attach",
    "audit", "averaged", "belongs", "bounds", "check_picture", "equivariance_error", "export", "hookimpl", "linear",
    "mlp", "norm_linear", "numpy_numbers", "one_of", "patched", "progress", "project", "publish", "read_trace", "say",
    "status", "use_branches", "whenever_imported",
]
# fmt: on


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
