"""One forward of an attached model: what its branches have read, and what they have given so far."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor

from ..contract.sites import Node, Site
from ..errors import AdapterError, AttachError
from ..symmetry.parts import part_of, with_part
from .bounded import Bounded, divided, maps
from .state import Ace


class Forward:
    """One forward under way."""

    __slots__ = ("ace", "alone", "bounded", "fired", "gammas", "prepared", "tapped", "values")

    def __init__(self, ace: Ace, *, alone: bool = False) -> None:
        self.ace = ace
        self.alone = alone
        """Of a submodule that was called on its own, outside its model's forward."""
        self.gammas = dict(zip((site.name for site in ace.sites), ace.gamma.unbind(0), strict=True))
        self.fired: set[str] = set()
        """Sites that have added their branch."""
        self.tapped: dict[str, Any] = {}
        self.values: dict[str, Tensor] = {}
        self.prepared: dict[str, Any] = {}
        self.bounded: list[Bounded] = []

    def open(self) -> None:
        """Divide the weights of all bounded branches at once, rather than each when it is called."""
        if not self.ace.bounds or torch.compiler.is_compiling():
            return  # a compiler merges what it can itself, and does not keep what is put aside on modules
        self.bounded = maps(self.ace.branches)
        for bounded, weight in zip(self.bounded, divided(self.bounded), strict=True):
            bounded.divided = weight

    def close(self) -> None:
        for bounded in self.bounded:
            bounded.divided = None

    def take(self, name: str, read: Any) -> None:
        """Note what a site or stem reads. The module it reads from may be called several times in a forward."""
        self.tapped[name] = read
        self.prepared.pop(name, None)

    def add(self, site: Site, output: Any) -> Any:
        """The output of the site's module with ``gamma * branch`` added."""
        self.fired.add(site.name)
        gamma, chosen = self.gammas[site.name], chosen_output(output, site)
        if site.name in self.ace.prepared_by:
            branch: Any = self.ace.branch(site.name)
            return with_output(output, site, branch.add_to(chosen, gamma, self._prepared(site)))
        if self.ace.module_taps.get(site.name) == site.module:
            # Not kept from call to call: the module may be called several times, with other inputs.
            value = self.values[site.name] = self._branch(site, self._read(site))
        else:
            value = self._value(site.name)
        if value.shape != chosen.shape:
            raise AdapterError(
                f"site {site.name!r}: its branch gives shape {tuple(value.shape)}, "
                f"expected {tuple(chosen.shape)} as {site.module} gives"
            )
        return with_output(output, site, torch.addcmul(chosen, value, gamma))

    def _value(self, name: str) -> Tensor:
        """The output of a stem or of a site's branch, computed once in a forward."""
        if name not in self.values:
            node = self.ace.nodes[name]
            self.values[name] = self._branch(node, self._read(node))
        return self.values[name]

    def _prepared(self, site: Site) -> Any:
        """What the site reads as its branch wants it, made once for all sites that read the same."""
        first = self.ace.prepared_by[site.name]
        if first not in self.prepared:
            self.prepared[first] = self.ace.branch(first).prepare(self._read(site))  # type: ignore[operator]
        return self.prepared[first]

    def _read(self, node: Node) -> Any:
        if isinstance(node.reads, str):
            return self._value(node.reads)
        if node.name in self.tapped:
            return self.tapped[node.name]
        assert node.reads is not None  # such stems are gone through, not read
        where = f"the input of {node.reads.module!r}" if node.reads.module else "the model's own input"
        raise AttachError(
            f"{node.name!r} reads {where}, which this call has not seen: a submodule was called outside its model's "
            "forward (on its own, taken into another model, or recomputed by activation checkpointing); call "
            "the model itself, or project(model) first"
        )

    def _branch(self, node: Node, read: Any) -> Tensor:
        """The node's module on what it reads, which must be features of the shape the adapter says."""
        if isinstance(node, Site) and node.through is not None:
            read = self._branch(self.ace.nodes[node.through], read)
        found: Any = tuple(read.shape[-len(node.shape_in) :]) if isinstance(read, Tensor) else type(read).__name__
        if found != node.shape_in:
            raise AdapterError(f"{node.name!r} reads features of shape {found}, expected shape_in {node.shape_in}")
        value: Tensor = self.ace.branch(node.name)(read)
        return value


def chosen_output(output: Any, site: Site) -> Any:
    """The tensor of the module's output that the site adds to."""
    chosen = output if site.output is None else part_of(output, str(site.output), f"output of {site.module}")
    if isinstance(chosen, Tensor):
        return chosen
    kind = type(chosen).__name__
    if site.output is not None:
        raise AdapterError(f"site {site.name!r}: output {site.output!r} of {site.module} is a {kind}, not a tensor")
    if isinstance(chosen, (tuple, list)):
        raise AdapterError(f"site {site.name!r}: {site.module} returns a {kind} of {len(chosen)}; set output=0")
    known = f" with {', '.join(map(repr, chosen))}" if isinstance(chosen, dict) else ""
    raise AdapterError(f"site {site.name!r}: {site.module} returns a {kind}{known}; set output= to what it adds to")


def with_output(output: Any, site: Site, summed: Tensor) -> Any:
    """The module's output with that tensor replaced."""
    if site.output is None:
        return summed
    return with_part(output, str(site.output), summed, f"output of {site.module}")


class OpenForwards(threading.local):
    """The forwards under way in this thread, the innermost last.

    A forward is found here rather than through the hook, because replicas of a model (nn.DataParallel) share hook
    objects but not parameters.
    """

    def __init__(self) -> None:
        self.stack: list[Forward] = []

    def of(self, ace: Ace) -> Forward | None:
        for forward in reversed(self.stack):
            # A replica's hook names the original ace; the nodes object is what the two share.
            if forward.ace is ace or forward.ace.nodes is ace.nodes:
                return forward
        return None

    def begin(self, forward: Forward) -> None:
        self.stack.append(forward)

    def end(self, forward: Forward) -> None:
        self.stack.remove(forward)
        forward.close()

    def end_all(self, ace: Ace) -> None:
        """Those that were interrupted (Ctrl-C, an error in a submodule called on its own)."""
        for forward in [forward for forward in self.stack if forward.ace is ace]:
            self.end(forward)


OPEN = OpenForwards()
