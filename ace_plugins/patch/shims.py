"""Applies the compatibility shims of upstreams, each at most once and only if it is needed."""

from __future__ import annotations

from importlib.util import find_spec

from ..contract.upstreams import AnyShim, Shim, StandIn
from ..errors import AdapterError
from ..plugins.plugin import Plugin, one_line
from ..plugins.registry import registry
from .imports import STAND_INS


class Repairs:
    """The shims that were applied in this process."""

    def __init__(self) -> None:
        self.applied: set[tuple[str, str]] = set()  # pairs of an adapter's name and the name of its applied shim

    def apply(self, plugin: Plugin, device: str, *, importing: bool = False) -> None:
        """Apply the shims that an upstream needs; if ``importing``, only those without which it cannot be imported."""
        shims = [shim for shim in plugin.shims if isinstance(shim, Shim) and shim.device in (None, device)]
        for shim in sorted(shims, key=lambda shim: not shim.first):
            try:
                if (shim.first or not importing) and not self.is_active(plugin, shim) and shim.needed():
                    shim.apply()
                    self.applied.add((plugin.name, shim.name))
            except Exception as error:
                what = f"shim {shim.name!r} ({shim.reason})"
                raise AdapterError(f"adapter {plugin.name!r}: {what} failed: {one_line(error)}") from error

    def make_importable(self) -> None:
        """Apply the shims that make upstreams importable, because loading a pickled model imports its upstream."""
        for plugin in registry().adapters:
            self.apply(plugin, "auto", importing=True)

    def is_active(self, plugin: Plugin, shim: AnyShim) -> bool:
        """Return whether this process has applied a shim or, if it is a stub of a module, has imported it."""
        return shim.name in STAND_INS.active if isinstance(shim, StandIn) else (plugin.name, shim.name) in self.applied

    def active(self, plugin: Plugin) -> list[AnyShim]:
        return [shim for shim in plugin.shims if self.is_active(plugin, shim)]

    def offer_stand_ins(self, plugin: Plugin) -> None:
        """Let the files of an adapter's upstream import the adapter's stubs of missing modules."""
        if stand_ins := [shim for shim in plugin.shims if isinstance(shim, StandIn)]:
            STAND_INS.offer(stand_ins, plugin.patches.files)


def has_effect(plugin: Plugin, shim: AnyShim) -> bool:
    """Return whether a shim is active. A stub also counts if it will be used once upstream imports its module."""
    if isinstance(shim, StandIn):
        return find_spec(shim.name.partition(".")[0]) is None
    return REPAIRS.is_active(plugin, shim)


REPAIRS = Repairs()
