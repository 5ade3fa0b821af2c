"""An adapter's sites and stems against the model: everything is checked before anything is changed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

from ..contract.sites import Node, Site, Stem, Tap
from ..contract.upstreams import class_path
from ..errors import AdapterError
from .state import key
from .taps import Argument, resolve


def check_nodes(nodes: Sequence[Node], model: nn.Module, adapter: str) -> dict[str, Argument]:
    """Every node against the model; all problems in one error. Returns what each node's tap means."""
    who = f"adapter {adapter!r}"
    if not any(isinstance(node, Site) for node in nodes):
        raise AdapterError(
            f"{who} finds no site in {class_path(type(model))}: ace_layers returned {len(nodes)} nodes, expected at "
            "least one Site; check that the model has its layers and that the adapter is the right one"
        )
    arguments: dict[str, Argument] = {}
    seen: dict[str, str] = {}
    taken: dict[tuple[int, int | str | None], str] = {}
    stems: dict[str, Stem] = {}
    problems: list[str] = []
    for node in nodes:
        if key(node.name) in seen:
            problems.append(f"two nodes are named {node.name!r} (or {seen[key(node.name)]!r})")
        if isinstance(node, Site):
            try:
                place = (id(model.get_submodule(node.module)), node.output)
            except AttributeError:
                problems.append(f"site {node.name!r} names submodule {node.module!r}, which does not exist")
                continue
            if place in taken:
                # Each call of the module would add both branches, whichever of the two layers it is.
                problems.append(f"sites {taken[place]!r} and {node.name!r} are one and the same submodule")
            taken[place] = node.name
        if isinstance(node, Site) and node.through is not None:
            problems += _through(node, stems.get(node.through))
        if isinstance(node, Stem):
            stems[node.name] = node
        if isinstance(node.reads, str):
            if key(node.reads) not in seen:
                problems.append(f"{node.name!r} reads {node.reads!r}, which is no earlier stem or site")
            elif (stem := stems.get(node.reads)) is not None and stem.reads is None:
                problems.append(f"{node.name!r} reads {node.reads!r}, which reads nothing itself; go through it")
        elif node.reads is not None:
            try:
                arguments[node.name] = _argument(node, node.reads, model)
            except (AttributeError, AdapterError) as error:
                problems.append(str(error))
        seen[key(node.name)] = node.name
    if problems:
        raise AdapterError(f"{who} does not fit {class_path(type(model))}: {'; '.join(problems)}")
    return arguments


def _through(site: Site, stem: Stem | None) -> Iterator[str]:
    if stem is None or stem.reads is not None:
        yield f"{site.name!r} goes through {site.through!r}, which is no earlier stem with reads=None"
    elif stem.shape_out != site.shape_in:
        yield f"{site.name!r} has shape_in {site.shape_in} but goes through {stem.name!r} of shape_out {stem.shape_out}"


def _argument(node: Node, tap: Tap, model: nn.Module) -> Argument:
    path = tap.module
    if path is None:
        if not isinstance(node, Site):
            raise AdapterError(f"stem {node.name!r} must say which module it reads from")
        path = node.module
    return resolve(tap, model.get_submodule(path), repr(node.name))
