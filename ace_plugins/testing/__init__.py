"""What adapters are judged by: `parametrize_with_checks` for pytest, `check_adapter` for anything else.

Names are loaded on first use: pytest loads its plugin from here wherever ace-plugins is installed.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .checks import CHECKS, AdapterCheckError, Failure, Judgement, check_adapter, judge, name_of
    from .kit import CheckError, Kit, NotApplicable
    from .pytest_plugin import AdapterCheck, parametrize_with_checks

_HOMES = {
    "checks": "CHECKS name_of",
    "judging": "AdapterCheckError Failure Judgement check_adapter judge",
    "kit": "CheckError Kit NotApplicable",
    "pytest_plugin": "AdapterCheck parametrize_with_checks",
}
_HOME = {name: home for home, names in _HOMES.items() for name in names.split()}

__all__ = [
    "CHECKS",
    "AdapterCheck",
    "AdapterCheckError",
    "CheckError",
    "Failure",
    "Judgement",
    "Kit",
    "NotApplicable",
    "check_adapter",
    "judge",
    "name_of",
    "parametrize_with_checks",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value
