"""Repairs of an upstream on today's stack: each applied once, and only where the thing is missing."""

from __future__ import annotations

from .contract import Shim
from .errors import AdapterError
from .plugins import Plugin

_applied: set[tuple[str, str]] = set()


def shims(plugin: Plugin) -> list[Shim]:
    return list(plugin.call("ace_shims") or ()) if plugin.has("ace_shims") else []


def applied(plugin: Plugin, shim: Shim) -> bool:
    return (plugin.name, shim.name) in _applied


def apply_shims(plugin: Plugin) -> list[Shim]:
    """Apply what this upstream needs and has not got yet. Returns what was applied now."""
    done: list[Shim] = []
    for shim in shims(plugin):
        if applied(plugin, shim):
            continue
        try:
            if shim.needed():
                shim.apply()
                _applied.add((plugin.name, shim.name))
                done.append(shim)
        except Exception as error:
            raise AdapterError(
                f"adapter {plugin.name!r}: shim {shim.name!r} ({shim.reason}) failed: {type(error).__name__}: {error}"
            ) from error
    return done
