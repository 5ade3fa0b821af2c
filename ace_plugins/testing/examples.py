"""Making a checkout importable in this process, for doctor, the battery and notebooks.

An adapter's own example, built and attached, or a model with a batch for it, for doctor and audit.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from ..checkout.layout import fits, layout
from ..contract.sites import Site
from ..contract.upstreams import Example, class_path
from ..engine.state import find
from ..errors import AdapterError, CheckoutError
from ..patch.constructors import attach
from ..patch.shims import REPAIRS
from ..plugins.plugin import Plugin
from ..plugins.registry import registry
from ..symmetry.measure import Call


def make_importable(plugin: Plugin, checkout: Path | None = None) -> Path | None:
    """Put the adapter's upstream on ``sys.path``: the checkout given, or one that can be found.

    Without one given: ``ACE_UPSTREAM_<ADAPTER>``, a checkout that is importable already, the current folder and
    those above it. An upstream that is installed needs nothing.
    """
    assert plugin.upstream is not None
    wanted = plugin.upstream.checkout
    if wanted is None:
        if checkout is not None:
            raise AdapterError(f"adapter {plugin.name!r} patches an installed package: expected no checkout")
        return None
    variable = f"ACE_UPSTREAM_{plugin.name.upper()}"
    given = checkout or (Path(os.environ[variable]) if os.environ.get(variable) else None)
    if given is not None:
        found = layout(given, wanted)
        if not found.fits:
            raise CheckoutError(f"{given} has not the shape of a checkout of {wanted.repository}", found.differences)
        root = given
    else:
        here = [Path(path or ".") for path in (*sys.path, ".")]
        near = next((p for p in (*here, *Path.cwd().parents) if fits(p, wanted)), None)
        if near is None:
            raise AdapterError(
                f"adapter {plugin.name!r} patches a checkout of {wanted.repository}: expected its folder, found none; "
                f"run it there, give its path, or set {variable}"
            )
        root = near
    path = str(root.resolve())
    if path not in map(os.path.realpath, sys.path):
        sys.path.insert(0, path)
    for file in plugin.upstream.files:
        module = file.removesuffix(".py").replace("/", ".")
        origin = getattr(find_spec(module), "origin", None)
        if os.path.realpath(origin or "") != os.path.join(path, *file.split("/")):
            raise AdapterError(
                f"module {module!r} is {origin}, expected the one in {path}: another package of that name comes first; "
                "use a process of its own"
            )
    return root


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
