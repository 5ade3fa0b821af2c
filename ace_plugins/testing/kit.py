"""Tools for checks: fresh examples of one adapter, functions to run and train them, and errors to raise."""

from __future__ import annotations

import copy
import unittest
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..checkout.layout import read_layout
from ..contract.sites import Node, Site
from ..contract.upstreams import Example
from ..engine.forward import select_output
from ..errors import AdapterError
from ..patch.constructors import attach
from ..patch.shims import REPAIRS
from ..plugins.registry import registry
from ..symmetry.parts import iterate_tensors
from .examples import make_importable

QUIET = {"trace": False, "tell": False}
PLAIN = {**QUIET, "frames": "off"}
"""Settings of `attach` without trace, messages and random frames, so that runs can be compared bit for bit."""


class CheckError(AssertionError):
    """Raised by a check if an adapter breaks the contract.

    Attributes:
        reason: What was found.
        look_at: The hook that is the likely cause, with site and field if known: "ace_layers, Site 'layers.0', output".
            "" if the cause is unknown, or if ``reason`` names it.
    """

    def __init__(self, reason: str, look_at: str = "") -> None:
        self.reason = " ".join(reason.split())
        self.look_at = look_at
        super().__init__(f"{self.reason}; look at {look_at}" if look_at else self.reason)


class NotApplicable(unittest.SkipTest):
    """Raised by a check that has nothing to test in this adapter. pytest reports the test as skipped."""


def require(condition: object, reason: str, look_at: str) -> None:
    """Raise `CheckError` unless the condition holds."""
    if not condition:
        raise CheckError(reason, look_at)


def node_field(node: Node, name: str) -> str:
    """Return the text for ``CheckError.look_at`` that names a field of a site or stem."""
    return f"ace_layers, {type(node).__name__} {node.name!r}, {name}"


class Kit:
    """Fresh examples of one adapter, for checks.

        kit = Kit("mynet")
        model, example = kit.attached(mode="strict")
        losses = kit.train(model, example)

    Args:
        adapter: Name of the adapter's entry point.
        seed: Seed of the examples, and of the random numbers in `attached` and `call`.
        checkout: Folder of the upstream, for adapters of a cloned repository. Default: the folder in
            ``ACE_UPSTREAM_<ADAPTER>``, or the one found near the current folder.

    Attributes:
        plugin: The adapter.
        root: Folder of the checkout; None for an installed upstream.
        notes: Mapping from the description of a measurement to its value, for the summary that pytest prints.

    Raises:
        AdapterError: The adapter is unknown or not usable, or its upstream was not found.
    """

    def __init__(self, adapter: str, seed: int = 0, checkout: Path | None = None) -> None:
        self.plugin = registry().adapter(adapter)
        self.root = make_importable(self.plugin, checkout)
        REPAIRS.offer_stand_ins(self.plugin)
        REPAIRS.apply(self.plugin, "cpu")  # examples are built on the CPU
        self.seed = seed
        self.notes: dict[str, str] = {}
        self._built: Example | None = None

    def example(self) -> Example:
        """Return a fresh copy of the adapter's example. It is built only once, because that may take seconds."""
        if self._built is None:
            self._built = self.plugin.example(self.seed)
        try:
            return copy.deepcopy(self._built)
        except Exception:  # the check copies_are_independent reports models that cannot be copied
            return self.plugin.example(self.seed)

    @property
    def upstream(self) -> str:
        """Upstream's title, with the commit of a checkout."""
        upstream = self.plugin.patches
        if self.root is None or upstream.checkout is None:
            return upstream.title
        return f"{upstream.title} {read_layout(self.root, upstream.checkout)}"

    def nodes(self, model: nn.Module) -> Sequence[Node]:
        """Return the sites and stems that the adapter names for this model."""
        found: Sequence[Node] = self.plugin.call("ace_layers", model=model)
        return found

    def attached(self, **config: Any) -> tuple[Any, Example]:
        """Attach a fresh example.

        Args:
            config: Settings, as for `attach`. Trace, messages and random frames are off by default.

        Returns:
            The attached model, and its example with the batch.
        """
        example = self.example()
        torch.manual_seed(self.seed)
        return attach(example.model, self.plugin.name, **{**PLAIN, **config}), example

    def needs(self, hook: str) -> None:
        """Skip the check if the adapter does not implement a hook.

        Args:
            hook: Name of the hook, such as "ace_group_action".

        Raises:
            NotApplicable: The adapter does not implement the hook.
        """
        if not self.plugin.has(hook):
            raise NotApplicable(f"adapter {self.plugin.name!r} does not implement {hook}")

    def call(self, model: nn.Module, example: Example) -> Any:
        """Run a model on a copy of an example's batch, with the same random numbers each time.

        Args:
            model: The model, attached or plain.
            example: The example with the batch.

        Returns:
            The model's output.
        """
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(self.seed)
            return model(*copy.deepcopy(example.args), **copy.deepcopy(dict(example.kwargs)))

    def run(self, model: nn.Module, example: Example) -> list[Tensor]:
        """Run a model on an example as `call` does, and return the non-empty floating point tensors of its output.

        Raises:
            AdapterError: The output has no such tensor.
        """
        tensors = (tensor for _, tensor in iterate_tensors(self.call(model, example)))
        found = [tensor for tensor in tensors if tensor.is_floating_point() and tensor.numel()]
        if not found:
            raise AdapterError(f"adapter {self.plugin.name!r}: its example has no floating point output")
        return found

    def loss(self, model: nn.Module, example: Example) -> Tensor:
        """Return the loss of a model on an example: the mean squared distance from 1, summed over `run`'s tensors."""
        return torch.stack([(tensor - 1).square().mean() for tensor in self.run(model, example)]).sum()

    def train(self, model: nn.Module, example: Example, steps: int = 3, lr: float = 1e-3) -> list[float]:
        """Train a model on an example's batch with Adam.

        Args:
            model: The model, attached or plain; it is changed.
            example: The example with the batch.
            steps: Number of training steps.
            lr: Learning rate.

        Returns:
            The loss before each step.
        """
        optimizer = torch.optim.Adam(model.parameters(), lr=lr)
        losses = []
        for _ in range(steps):
            optimizer.zero_grad()
            loss = self.loss(model, example)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            losses.append(loss.item())
        return losses


def same(one: Sequence[Tensor], two: Sequence[Tensor]) -> bool:
    """Return whether two lists of tensors are equal bit for bit."""
    return len(one) == len(two) and all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def different(one: dict[str, Any], two: dict[str, Any]) -> list[str]:
    """Return the names of tensors in ``one`` that are missing in ``two`` or differ there."""
    tensors = {name: value for name, value in one.items() if isinstance(value, Tensor)}
    return [name for name, value in tensors.items() if name not in two or not torch.equal(value, two[name])]


def shapes(state: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor of a state_dict."""
    return {name: tuple(value.shape) for name, value in state.items() if isinstance(value, Tensor)}


def few(names: Sequence[str]) -> str:
    """Return the first three names as text, with the number of the others."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def differing_site(kit: Kit, sites: Iterable[Site], *sides: tuple[nn.Module, Example]) -> str:
    """Return text for an error about the first site where two models differ: ``" (first at site 'layers.0')"``."""
    seen = []
    for model, example in sides:
        with outputs_of(model, sites) as found:
            kit.call(model, example)
        seen.append(found)
    names = different(*seen)
    return f" (first at site {names[0]!r})" if names else ""


@contextmanager
def outputs_of(model: nn.Module, sites: Iterable[Site]) -> Iterator[dict[str, Tensor]]:
    """Collect the sites' outputs, branches included, of a forward pass inside the block, in the order of the calls."""
    found: dict[str, Tensor] = {}

    def keep(site: Site) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            found[site.name] = select_output(output, site).detach().clone()

        return hook

    handles = [model.get_submodule(site.module).register_forward_hook(keep(site)) for site in sites]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
