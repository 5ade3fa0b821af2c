"""Repairs of an upstream on today's stack: each applied once, and only where the thing is missing."""

from __future__ import annotations

from ..settings.config import Config
from ..contract.data import AnyShim, Shim, StandIn
from ..errors import AdapterError, ConfigError
from ..plugins.registry import Plugin
from .stand_ins import STAND_INS

_applied: set[tuple[str, str]] = set()


def shims(plugin: Plugin) -> list[AnyShim]:
    return list(plugin.call("ace_shims") or ()) if plugin.has("ace_shims") else []


def applied(plugin: Plugin, shim: AnyShim) -> bool:
    """Whether it does something in this process now."""
    return shim.name in STAND_INS.active if isinstance(shim, StandIn) else (plugin.name, shim.name) in _applied


def active(plugin: Plugin) -> list[AnyShim]:
    return [shim for shim in shims(plugin) if applied(plugin, shim)]


def offer_stand_ins(plugin: Plugin) -> None:
    """Before upstream is imported: what is not installed is there when upstream asks for it."""
    assert plugin.upstream is not None
    for shim in shims(plugin):
        if isinstance(shim, StandIn):
            STAND_INS.offer(shim, plugin.upstream.files)


def withdraw_stand_ins(plugin: Plugin) -> None:
    for shim in shims(plugin):
        if isinstance(shim, StandIn):
            STAND_INS.withdraw(shim)


def check_device(plugin: Plugin, config: Config) -> None:
    """Whether this adapter can make its upstream run there, which few have to."""
    known = {shim.device for shim in shims(plugin) if isinstance(shim, Shim)}
    if config.device != "auto" and config.device not in known:
        assert plugin.upstream is not None
        raise ConfigError(
            problems=[
                (
                    "device",
                    f"device {config.device!r}: adapter {plugin.name!r} redirects no CUDA calls, as "
                    f"{plugin.upstream.title} lets its user choose; expected auto, and the script's own option",
                )
            ]
        )


def apply_shims(plugin: Plugin, device: str) -> list[Shim]:
    """Apply what this upstream needs and has not got yet. Returns what was applied now."""
    done: list[Shim] = []
    for shim in shims(plugin):
        if isinstance(shim, StandIn) or applied(plugin, shim) or shim.device not in (None, device):
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
