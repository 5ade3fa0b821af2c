"""What every check works with: fresh examples of one adapter, one way to run and train them, words for errors."""

from __future__ import annotations

import copy
import unittest
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..contract.sites import Node, Site
from ..contract.upstreams import Example
from ..errors import AdapterError
from ..patch.constructors import attach
from ..patch.shims import REPAIRS
from ..plugins.plugin import Plugin
from ..plugins.registry import registry
from ..symmetry.parts import part_of, tensors_in
from .examples import make_importable

PLAIN = {"trace": False, "tell": False, "frames": "off"}
"""Without what is random by design, so that runs can be compared bit for bit."""


class CheckError(AssertionError):
    """An adapter does not keep the contract: what was found, and where to look."""

    def __init__(self, reason: str, look_at: str) -> None:
        self.reason = reason
        self.look_at = look_at
        """The hook, and where it can be told the site and the field: "ace_layers, Site 'layers.0', output"."""
        super().__init__(f"{reason}; look at {look_at}")


class NotApplicable(unittest.SkipTest):
    """A check that has nothing to judge in this adapter. pytest knows it as a skipped test."""


def node_field(node: Node | str, name: str) -> str:
    """Where a field of a site or stem is written."""
    kind = "Site" if isinstance(node, str) else type(node).__name__
    return f"ace_layers, {kind} {node if isinstance(node, str) else node.name!r}, {name}"


class Kit:
    """Fresh examples of one adapter. ``checkout`` is where its upstream is, if that is one people clone."""

    def __init__(self, adapter: str, seed: int = 0, checkout: Path | None = None) -> None:
        self.plugin: Plugin = registry().adapter(adapter)
        self.seed = seed
        self._built: Example | None = None
        self.notes: dict[str, str] = {}
        """What checks measured, for those who want to know more than that they hold."""
        make_importable(self.plugin, checkout)
        REPAIRS.offer_stand_ins(self.plugin)
        REPAIRS.apply(self.plugin, "cpu")  # where the examples are

    def example(self) -> Example:
        """A fresh one. It is built once and copied: some upstreams take seconds to build a model."""
        if self._built is None:
            self._built = self.plugin.example(self.seed)
        try:
            return copy.deepcopy(self._built)
        except Exception:  # upstream's models are no good for that; the check of copies tells
            return self.plugin.example(self.seed)

    def nodes(self, model: nn.Module) -> Sequence[Node]:
        found: Sequence[Node] = self.plugin.call("ace_layers", model=model)
        return found

    def attached(self, **config: Any) -> tuple[Any, Example]:
        example = self.example()
        torch.manual_seed(self.seed)
        return attach(example.model, self.plugin.name, **{**PLAIN, **config}), example

    def needs(self, hook: str) -> None:
        if not self.plugin.has(hook):
            raise NotApplicable(f"adapter {self.plugin.name!r} does not implement {hook}")

    # Running and training.

    def call(self, model: nn.Module, example: Example) -> Any:
        """What the model gives for the example's batch, which stays as it is; the same random numbers each time."""
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(self.seed)
            return model(*copy.deepcopy(example.args), **copy.deepcopy(dict(example.kwargs)))

    def run(self, model: nn.Module, example: Example) -> list[Tensor]:
        """The numbers in it. Dicts of whole batches hold indices too, and empty tensors for what there is not."""
        tensors = (tensor for _, tensor in tensors_in(self.call(model, example)))
        found = [tensor for tensor in tensors if tensor.is_floating_point() and tensor.numel()]
        if not found:
            raise AdapterError(f"adapter {self.plugin.name!r}: the forward of its example gives no numbers")
        return found

    def loss(self, model: nn.Module, example: Example) -> Tensor:
        return torch.stack([(tensor - 1).square().mean() for tensor in self.run(model, example)]).sum()

    def train(self, model: nn.Module, example: Example, steps: int = 3, lr: float = 1e-3) -> list[float]:
        optimizer = torch.optim.Adam(model.parameters(), lr=lr)
        losses = []
        for _ in range(steps):
            optimizer.zero_grad()
            loss = self.loss(model, example)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            losses.append(loss.item())
        return losses


# Comparing.


def same(one: Sequence[Tensor], two: Sequence[Tensor]) -> bool:
    """Down to the last bit."""
    return len(one) == len(two) and all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def different(one: dict[str, Any], two: dict[str, Any]) -> list[str]:
    """The tensors of a state_dict that another one has not, or has with other values."""
    tensors = {name: value for name, value in one.items() if isinstance(value, Tensor)}
    return [name for name, value in tensors.items() if name not in two or not torch.equal(value, two[name])]


def layout(state: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor of a state_dict."""
    return {name: tuple(value.shape) for name, value in state.items() if isinstance(value, Tensor)}


def differing_site(kit: Kit, sites: Iterable[Site], *sides: tuple[nn.Module, Example]) -> str:
    """The first site at which two models give different values, for errors: ``" (first at site 'layers.0')"``."""
    seen: list[dict[str, Any]] = []
    for model, example in sides:
        with outputs_of(model, sites) as found:
            kit.call(model, example)
        seen.append(found)
    for site in sites:
        one, two = (found.get(site.name) for found in seen)
        if isinstance(one, Tensor) and isinstance(two, Tensor) and not torch.equal(one, two):
            return f" (first at site {site.name!r})"
    return ""


@contextmanager
def outputs_of(model: nn.Module, sites: Iterable[Site]) -> Iterator[dict[str, Any]]:
    """What the sites' modules give in a forward, by site: the output that the site names, after its branch."""
    found: dict[str, Any] = {}

    def keep(site: Site) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            found[site.name] = output if site.output is None else part_of(output, str(site.output), site.name)

        return hook

    handles = [model.get_submodule(site.module).register_forward_hook(keep(site)) for site in sites]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
