"""Repairs of an upstream on today's stack: each applied once, and only where the thing is missing."""

from __future__ import annotations

from importlib.util import find_spec

from ..contract.upstreams import AnyShim, Shim, StandIn
from ..errors import AdapterError
from ..plugins.plugin import Plugin, one_line
from ..plugins.registry import registry
from .stand_ins import STAND_INS


class Repairs:
    """What was repaired in this process."""

    def __init__(self) -> None:
        self.applied: set[tuple[str, str]] = set()
        """Adapter and shim."""

    def apply(self, plugin: Plugin, device: str, *, importing: bool = False) -> None:
        """Apply what this upstream needs and has not got yet; ``importing``, what it needs to be imported at all."""
        for shim in plugin.shims:
            if isinstance(shim, StandIn) or self.acts(plugin, shim) or shim.device not in (None, device):
                continue
            if importing and not shim.first:
                continue
            try:
                if shim.needed():
                    shim.apply()
                    self.applied.add((plugin.name, shim.name))
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                raise AdapterError(
                    f"adapter {plugin.name!r}: shim {shim.name!r} ({shim.reason}) failed: {one_line(error)}"
                ) from error

    def make_importable(self) -> None:
        """What any upstream needs to be imported, before a model that was saved whole is read: that imports its own."""
        for plugin in registry().adapters:
            self.apply(plugin, "auto", importing=True)

    def acts(self, plugin: Plugin, shim: AnyShim) -> bool:
        """Whether it does something in this process now."""
        return shim.name in STAND_INS.active if isinstance(shim, StandIn) else (plugin.name, shim.name) in self.applied

    def active(self, plugin: Plugin) -> list[AnyShim]:
        return [shim for shim in plugin.shims if self.acts(plugin, shim)]

    def offer_stand_ins(self, plugin: Plugin) -> None:
        """Before upstream is imported: what is not installed is there when upstream asks for it."""
        for shim in plugin.shims:
            if isinstance(shim, StandIn):
                STAND_INS.offer(shim, plugin.patches.files)

    def withdraw_stand_ins(self, plugin: Plugin) -> None:
        for shim in plugin.shims:
            if isinstance(shim, StandIn):
                STAND_INS.withdraw(shim)


def would_act(plugin: Plugin, shim: AnyShim) -> bool:
    """Whether it does something, or will once upstream asks for the module it stands in for."""
    if isinstance(shim, Shim):
        return REPAIRS.acts(plugin, shim)
    try:
        return find_spec(shim.name) is None
    except ModuleNotFoundError:  # the package it would be in
        return True


REPAIRS = Repairs()
