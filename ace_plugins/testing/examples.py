"""An adapter's own example, built and attached, or a model with a batch for it, for doctor and audit."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..checkout.layout import layout
from ..contract.sites import Site
from ..contract.upstreams import Example, class_path
from ..engine.state import find
from ..errors import AdapterError
from ..patch.constructors import attach
from ..patch.shims import REPAIRS
from ..plugins.plugin import Plugin
from ..plugins.registry import registry
from ..symmetry.measuring import Call
from .importable import make_importable


@dataclass(frozen=True)
class Attached:
    """The example of an adapter, attached, or a model as it was given."""

    plugin: Plugin
    root: Path | None
    """The checkout, if upstream is cloned."""
    example: Example
    model: Any

    @property
    def batch(self) -> Call:
        return Call(self.example.args, self.example.kwargs)

    @property
    def sites(self) -> list[Site]:
        """Where ACE is on the model, or where it would go."""
        ace = find(self.model)
        nodes = self.plugin.call("ace_layers", model=self.model) if ace is None else ace.sites
        return [node for node in nodes if isinstance(node, Site)]

    @property
    def upstream(self) -> str:
        """What was patched, and at which commit."""
        checkout = self.plugin.patches.checkout
        if self.root is None or checkout is None:
            return self.plugin.patches.title
        return f"{self.plugin.patches.title} {layout(self.root, checkout)}"


def attached_example(name: str, seed: int = 0, *, checkout: Path | None = None) -> Attached:
    """The same model, branches and batch for the same seed."""
    plugin, root = _ready(name, checkout)
    example = plugin.example(seed)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # the same branches, and so the same numbers, each time
        model = attach(example.model, plugin.name, trace=False, tell=False)
    return Attached(plugin, root, example, model)


def given_example(name: str, model: Any, seed: int = 0, *, checkout: Path | None = None) -> Attached:
    """A model as it is, and a batch that its adapter makes for it."""
    plugin, root = _ready(name, checkout)
    if registry().claiming(model).name != plugin.name:
        raise AdapterError(
            f"{class_path(type(model))} is no model of adapter {plugin.name!r}: expected one that it claims"
        )
    return Attached(plugin, root, plugin.example(seed, model), model)


def _ready(name: str, checkout: Path | None) -> tuple[Plugin, Path | None]:
    """The adapter, with its upstream importable and repaired."""
    plugin = registry().adapter(name)
    root = make_importable(plugin, checkout)
    REPAIRS.offer_stand_ins(plugin)
    REPAIRS.apply(plugin, "cpu")  # where the example is
    return plugin, root
