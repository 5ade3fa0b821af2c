"""An adapter's own example, built and attached, for those who look at adapters: doctor and audit."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..checkout.layout import layout
from ..contract.upstreams import Example
from ..patch.constructors import attach
from ..patch.shims import REPAIRS
from ..plugins.plugin import Plugin
from ..plugins.registry import registry
from ..symmetry.measuring import Call
from .importable import make_importable


@dataclass(frozen=True)
class Attached:
    """The example of an adapter, attached."""

    plugin: Plugin
    root: Path | None
    """The checkout, if upstream is cloned."""
    example: Example
    model: Any

    @property
    def batch(self) -> Call:
        return Call(self.example.args, self.example.kwargs)

    @property
    def upstream(self) -> str:
        """What was patched, and at which commit."""
        checkout = self.plugin.patches.checkout
        if self.root is None or checkout is None:
            return self.plugin.patches.title
        return f"{self.plugin.patches.title} {layout(self.root, checkout)}"


def attached_example(name: str, seed: int = 0, *, checkout: Path | None = None) -> Attached:
    """The same model, branches and batch for the same seed."""
    plugin = registry().adapter(name)
    root = make_importable(plugin, checkout)
    REPAIRS.offer_stand_ins(plugin)
    REPAIRS.apply(plugin, "cpu")  # where the example is
    example = plugin.example(seed)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # the same branches, and so the same numbers, each time
        model = attach(example.model, plugin.name, trace=False, tell=False)
    return Attached(plugin, root, example, model)
