"""Compatibility shims of upstreams: each is applied once, and only if it is needed."""

from __future__ import annotations

from importlib.util import find_spec

from ..contract.upstreams import AnyShim, Shim, StandIn
from ..errors import AdapterError
from ..plugins.plugin import Plugin, one_line
from ..plugins.registry import registry
from .stand_ins import STAND_INS


class Repairs:
    """The shims that were applied in this process."""

    def __init__(self) -> None:
        self.applied: set[tuple[str, str]] = set()
        """Names of adapter and shim."""

    def apply(self, plugin: Plugin, device: str, *, importing: bool = False) -> None:
        """Apply the shims that this upstream needs; with ``importing`` only those it needs to be imported."""
        for shim in plugin.shims:
            if isinstance(shim, StandIn) or self.is_active(plugin, shim) or shim.device not in (None, device):
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
        """Apply the shims that make upstreams importable. Loading a pickled model imports its upstream."""
        for plugin in registry().adapters:
            self.apply(plugin, "auto", importing=True)

    def is_active(self, plugin: Plugin, shim: AnyShim) -> bool:
        """Return whether a shim was applied, or a stub imported, in this process."""
        return shim.name in STAND_INS.active if isinstance(shim, StandIn) else (plugin.name, shim.name) in self.applied

    def active(self, plugin: Plugin) -> list[AnyShim]:
        """Return the active shims of an adapter."""
        return [shim for shim in plugin.shims if self.is_active(plugin, shim)]

    def offer_stand_ins(self, plugin: Plugin) -> None:
        """Make an adapter's stubs importable from its upstream's files."""
        for shim in plugin.shims:
            if isinstance(shim, StandIn):
                STAND_INS.offer(shim, plugin.patches.files)

    def withdraw_stand_ins(self, plugin: Plugin) -> None:
        """Make an adapter's stubs unavailable for new imports."""
        for shim in plugin.shims:
            if isinstance(shim, StandIn):
                STAND_INS.withdraw(shim)


def has_effect(plugin: Plugin, shim: AnyShim) -> bool:
    """Return whether a shim is active, or a stub will be once upstream imports the module."""
    if isinstance(shim, Shim):
        return REPAIRS.is_active(plugin, shim)
    try:
        return find_spec(shim.name) is None
    except ModuleNotFoundError:  # its parent package is not installed
        return True


REPAIRS = Repairs()
