"""Tools for checks: fresh examples of one adapter, functions to run and train them, and errors to raise."""

from __future__ import annotations

import copy
import functools
import os
import sys
import unittest
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..checkout.layout import fits, read_layout
from ..contract.sites import Node, Site
from ..contract.upstreams import Example
from ..engine.measure import find_aces, hide_from_budget
from ..errors import AceError, AceWarning, AdapterError, CheckoutError
from ..patch.constructors import attach
from ..patch.shims import REPAIRS
from ..plugins.plugin import Plugin
from ..plugins.registry import registry
from ..symmetry.measure import Call, as_call, evaluate, map_tensors, preserve_state
from ..symmetry.parts import iterate_tensors, select_output

PLAIN = {"trace": False, "tell": False, "frames": "off"}  # settings with which runs can be compared bit for bit


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


def refuse(names: Sequence[str], reason: str, look_at: str) -> None:
    """Raise `CheckError` if there are any names. The first three of them replace ``{}`` in the reason."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    require(not names, reason.replace("{}", ", ".join(names[:3]) + more), look_at)


def node_field(node: Node, name: str) -> str:
    """Return the text for ``CheckError.look_at`` that names a field of a site or stem."""
    return f"ace_layers, {type(node).__name__} {node.name!r}, {name}"


class Kit:
    """Makes fresh examples of one adapter, and runs and trains them. The adapter's shims are applied to upstream."""

    def __init__(self, adapter: str, seed: int = 0, checkout: str | os.PathLike[str] | None = None) -> None:
        self.plugin = registry().adapter(adapter)
        self.root = make_importable(self.plugin, checkout)
        REPAIRS.offer_stand_ins(self.plugin)
        REPAIRS.apply(self.plugin, "cpu")  # examples are built on the CPU
        self.seed = seed  # of the examples, and of the random numbers in `attached` and `call`

    @functools.cached_property
    def example(self) -> Example:
        """The adapter's example. It is built only once, because that may take seconds."""
        return self.plugin.example(self.seed)

    @property
    def batch(self) -> Call:
        """A copy of the example's batch."""
        return copy.deepcopy(Call(self.example.args, dict(self.example.kwargs)))

    def plain(self) -> nn.Module:
        """Return a fresh copy of the example's model, which is plain upstream."""
        try:
            return copy.deepcopy(self.example.model)
        except Exception:  # the check copies_are_independent reports models that cannot be copied
            return self.plugin.example(self.seed).model

    @property
    def upstream(self) -> str:
        """Upstream's title, with the commit of a checkout."""
        title, checkout = self.plugin.patches.title, self.plugin.patches.checkout
        return title if self.root is None or checkout is None else f"{title} {read_layout(self.root, checkout)}"

    def attached(self, *, gamma: float | None = None, **config: Any) -> Any:
        """Return a fresh model with ACE attached, with these settings and, if given, this gamma at all sites."""
        plain = self.plain()
        torch.manual_seed(self.seed)
        model: Any = attach(plain, self.plugin.name, **{**PLAIN, **config})
        if gamma is not None:
            with torch.no_grad():
                model.ace.gamma.fill_(gamma)
        return model

    def needs_action(self) -> None:
        """Raise `NotApplicable` if the adapter does not implement ace_group_action."""
        if not self.plugin.has("ace_group_action"):
            raise NotApplicable(f"adapter {self.plugin.name!r} does not implement ace_group_action")

    def call(self, model: nn.Module) -> Any:
        """Run a model on the batch, with the same random numbers each time."""
        batch = self.batch
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(self.seed)
            return model(*batch.args, **batch.kwargs)

    def run(self, model: nn.Module) -> list[Tensor]:
        """Run a model on the batch, and return the non-empty floating point tensors of its output."""
        tensors = (tensor for _, tensor in iterate_tensors(self.call(model)))
        found = [tensor for tensor in tensors if tensor.is_floating_point() and tensor.numel()]
        if not found:
            name = self.plugin.name
            raise AdapterError(f"adapter {name!r}: its example must return floating point tensors, found none")
        return found

    def site_outputs(self, model: nn.Module, sites: Iterable[Site]) -> dict[str, Tensor]:
        """Run a model on the batch, and return the sites' outputs, with branches, in the order of the calls."""
        found: dict[str, Tensor] = {}

        def keep(site: Site, module: nn.Module, args: Any, output: Any) -> None:
            found[site.name] = select_output(output, site).detach().clone()

        with ExitStack() as hooks:
            for site in sites:
                hook = functools.partial(keep, site)
                hooks.enter_context(model.get_submodule(site.module).register_forward_hook(hook))
            self.call(model)
        return found

    def loss(self, model: nn.Module) -> Tensor:
        """Return the mean squared distance from 1, summed over the tensors of a model's output."""
        return torch.stack([(tensor - 1).square().mean() for tensor in self.run(model)]).sum()

    def train(self, model: nn.Module) -> list[float]:
        """Train a model on the batch with three steps of Adam, and return the loss before each step."""
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        losses = []
        for _ in range(3):
            optimizer.zero_grad()
            loss = self.loss(model)
            torch.autograd.backward(loss)
            optimizer.step()
            losses.append(loss.item())
        return losses

    def trained(self) -> Any:
        """Return a model that was attached in mode strict and then trained."""
        model = self.attached(mode="strict")
        self.train(model.train())
        return model


def same(one: Sequence[Tensor], two: Sequence[Tensor]) -> bool:
    """Return whether two lists of tensors are equal bit for bit."""
    return len(one) == len(two) and all(map(torch.equal, one, two))


def different(one: Mapping[str, Any], two: Mapping[str, Any]) -> list[str]:
    """Return the names of tensors in ``one`` that are missing in ``two`` or differ there."""
    tensors = {name: value for name, value in one.items() if isinstance(value, Tensor)}
    return [name for name, value in tensors.items() if name not in two or not torch.equal(value, two[name])]


@contextmanager
def hide_warnings() -> Iterator[None]:
    """Hide warnings of ACE, which give advice for training, for example to bound the branches."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AceWarning)
        yield


def make_importable(plugin: Plugin, checkout: str | os.PathLike[str] | None = None) -> Path | None:
    """Put the adapter's checkout on ``sys.path`` and return its folder; None for an installed upstream.

    The folder is ``checkout``, else the value of the environment variable ``ACE_UPSTREAM_<ADAPTER>``, else the first
    folder with the right layout among ``sys.path``, the current folder and its parents.
    """
    expected, variable = plugin.patches.checkout, f"ACE_UPSTREAM_{plugin.name.upper()}"
    if expected is None:
        if checkout is not None:
            raise AdapterError(f"adapter {plugin.name!r} patches an installed package: leave the checkout out")
        return None
    given = checkout or os.environ.get(variable)
    folders = [Path(given)] if given else [*map(Path, sys.path), Path.cwd(), *Path.cwd().parents]
    root = next((folder for folder in folders if fits(folder, expected)), None)
    if root is None:
        where = given or "this folder"
        do = "" if given else f"; run the command in a clone, give its path, or set {variable}"
        details = read_layout(folders[0], expected).differences if given else ()
        raise CheckoutError(f"{where} does not look like a checkout of {expected.repository}{do}", details)
    if os.path.realpath(root) not in map(os.path.realpath, sys.path):
        sys.path.insert(0, os.path.realpath(root))
    return root


def convert_to_double(model: nn.Module, batch: Any, *, copied: bool) -> tuple[nn.Module, Any, str]:
    """Return model (or a copy), batch and "" after conversion to float64; if it fails, the originals and the reason."""
    try:
        judged = copy.deepcopy(model).double() if copied else model
        for original, twin in zip(find_aces(model), find_aces(judged), strict=True):
            twin.passes.forced = original.passes.forced  # deepcopy drops it
        args, kwargs = map_tensors(as_call(batch), lambda x: x.double() if x.is_floating_point() else x)
        with torch.inference_mode(False), hide_from_budget(judged), preserve_state(judged):
            evaluate(judged, args, kwargs, 0)
        return judged, Call(args, kwargs), ""
    except AceError:
        raise
    except Exception as error:
        return model, batch, f"not converted to float64: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
