"""Builds adapters' examples for doctor, audit and the test kit, with upstream importable and its shims applied."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from ..checkout.layout import fits, read_layout
from ..contract.sites import Site
from ..contract.upstreams import Checkout, Example, class_path
from ..engine.state import find
from ..errors import AdapterError, CheckoutError
from ..patch.constructors import attach
from ..patch.shims import REPAIRS
from ..plugins.plugin import Plugin
from ..plugins.registry import registry
from ..symmetry.measure import Call


def make_importable(plugin: Plugin, checkout: Path | None = None) -> Path | None:
    """Put the adapter's checkout on ``sys.path`` and return its folder; None for an installed upstream.

    Without ``checkout`` the folder is the value of the environment variable ``ACE_UPSTREAM_<ADAPTER>``. Without that
    variable it is the first folder with the right layout among ``sys.path``, the current folder and its parents.
    """
    expected = plugin.patches.checkout
    if expected is None:
        if checkout is not None:
            raise AdapterError(f"adapter {plugin.name!r} patches an installed package: expected no checkout")
        return None
    root = _find_checkout(plugin, expected, checkout)
    path = os.path.realpath(root)
    if path not in map(os.path.realpath, sys.path):
        sys.path.insert(0, path)
    for file in plugin.patches.files:
        module = file.removesuffix(".py").replace("/", ".")
        origin = getattr(find_spec(module), "origin", None)
        if os.path.realpath(origin or "") != os.path.join(path, *file.split("/")):
            raise AdapterError(
                f"module {module!r} is {origin}, expected the one in {path}: another package of the same name was "
                "imported first; start a new process"
            )
    return root


def _find_checkout(plugin: Plugin, expected: Checkout, given: Path | None) -> Path:
    variable = f"ACE_UPSTREAM_{plugin.name.upper()}"
    given = given or (Path(os.environ[variable]) if os.environ.get(variable) else None)
    if given is not None:
        found = read_layout(given, expected)
        if not found.fits:
            raise CheckoutError(f"{given} does not look like a checkout of {expected.repository}", found.differences)
        return given
    for folder in (*(Path(path or ".") for path in sys.path), Path.cwd(), *Path.cwd().parents):
        if fits(folder, expected):
            return folder
    raise AdapterError(
        f"adapter {plugin.name!r} patches a checkout of {expected.repository}: expected its folder, found none; "
        f"run the command there, give its path, or set {variable}"
    )


def prepare(name: str, checkout: Path | None) -> tuple[Plugin, Path | None]:
    """Make an adapter's upstream importable, apply its shims, and return the adapter and the folder of its checkout."""
    plugin = registry().adapter(name)
    root = make_importable(plugin, checkout)
    REPAIRS.offer_stand_ins(plugin)
    REPAIRS.apply(plugin, "cpu")  # examples are built on the CPU
    return plugin, root


@dataclass(frozen=True)
class Built:
    """A model that an adapter claims, and a batch for it."""

    plugin: Plugin
    root: Path | None
    """Folder of the checkout; None for an installed upstream."""
    example: Example
    model: Any

    @property
    def batch(self) -> Call:
        """Arguments of one forward pass."""
        return Call(self.example.args, self.example.kwargs)

    @property
    def sites(self) -> list[Site]:
        """Sites of an attached model; for a plain model, the sites that `attach` would use."""
        ace = find(self.model)
        nodes = self.plugin.call("ace_layers", model=self.model) if ace is None else ace.sites
        return [node for node in nodes if isinstance(node, Site)]

    @property
    def upstream(self) -> str:
        """Upstream's title, with the commit of a checkout."""
        upstream = self.plugin.patches
        if self.root is None or upstream.checkout is None:
            return upstream.title
        return f"{upstream.title} {read_layout(self.root, upstream.checkout)}"


def attach_example(name: str, seed: int = 0, *, checkout: Path | None = None) -> Built:
    """Build the adapter's example and attach ACE to it. The seed determines the model, the branches and the batch."""
    plugin, root = prepare(name, checkout)
    example = plugin.example(seed)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = attach(example.model, plugin.name, trace=False, tell=False)
    return Built(plugin, root, example, model)


def build_for_model(name: str, model: Any, seed: int = 0, *, checkout: Path | None = None) -> Built:
    """Return the given model, unchanged, together with a batch that the adapter makes for it."""
    plugin, root = prepare(name, checkout)
    if registry().find_adapter(model).name != plugin.name:
        raise AdapterError(f"adapter {plugin.name!r} does not claim {class_path(type(model))}: choose another adapter")
    return Built(plugin, root, plugin.example(seed, model), model)
