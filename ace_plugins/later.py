"""Imports that wait until they are needed."""

from __future__ import annotations

import importlib

TYPE_CHECKING = False  # as typing has it, without waiting for typing: scripts wait for this module
if TYPE_CHECKING:
    from types import ModuleType


def later(module: str) -> ModuleType:
    """Import a module of ours now, by its full name, as in ``later("ace_plugins.run.process")``.

    For modules that need torch, or load all plugins, in places that most processes pass without needing them: torch
    takes seconds to import. Everything else is imported at the top of the file.
    """
    return importlib.import_module(module)
