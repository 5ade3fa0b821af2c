"""doctor: attach an adapter to its own example and tell what came of it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch

from .attaching import attach, equivariance_error
from .contract import Example, Site, Stem
from .equivariance import Call, EquivarianceError
from .plugins import registry
from .shims import applied, shims
from .site_status import status


@dataclass(frozen=True)
class Part:
    """A site or a stem, and its branch."""

    name: str
    kind: str
    module: str
    reads: str
    features: str
    branch: str
    parameters: int


@dataclass(frozen=True)
class Repair:
    name: str
    reason: str
    applied: bool


@dataclass(frozen=True)
class Diagnosis:
    """What doctor found out about an adapter on this machine."""

    adapter: str
    upstream: str
    distribution: str
    requires: tuple[str, ...]
    model: str
    parts: tuple[Part, ...]
    parameters_before: int
    parameters_after: int
    error_at_0: EquivarianceError
    error_at_1: EquivarianceError
    shims: tuple[Repair, ...]

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def diagnose(name: str, seed: int = 0) -> Diagnosis:
    """Build the adapter's example, attach it, and measure its symmetry with the branches at 0 and at 1."""
    plugin = registry().adapter(name)
    assert plugin.upstream is not None
    example: Example = plugin.call("ace_example", seed=seed)
    model: Any = attach(example.model, name, trace=False)
    now = status(model)
    errors = []
    for gamma in (0.0, 1.0):
        with torch.no_grad():
            model.ace.gamma.fill_(gamma)
        errors.append(equivariance_error(model, Call(example.args, example.kwargs), branches_on=True))
    return Diagnosis(
        adapter=name,
        upstream=plugin.upstream.title,
        distribution=f"{plugin.distribution} {plugin.version}".strip(),
        requires=tuple(f"{r.requirement} (found {r.found})" for r in plugin.requires),
        model=type(model).__name__,
        parts=tuple(_part(node, model.ace.branch(node.name)) for node in model.ace.nodes.values()),
        parameters_before=now.upstream_parameters,
        parameters_after=now.upstream_parameters + now.ace_parameters,
        error_at_0=errors[0],
        error_at_1=errors[1],
        shims=tuple(Repair(shim.name, shim.reason, applied(plugin, shim)) for shim in shims(plugin)),
    )


def _part(node: Site | Stem, branch: torch.nn.Module) -> Part:
    site = isinstance(node, Site)
    if isinstance(node.reads, str):
        reads = node.reads
    elif node.reads.module is None:
        reads = f"its input {node.reads.argument!r}" if node.reads.argument else "its input"
    else:
        which = f"argument {node.reads.argument}" if isinstance(node.reads.argument, int) else node.reads.argument
        reads = f"{which} of {node.reads.module or 'the model'}"
    layers = " ".join(type(m).__name__ for m in branch.modules() if not list(m.children()))
    return Part(
        name=node.name,
        kind="site" if site else "stem",
        module=node.module if isinstance(node, Site) else "",
        reads=reads,
        features=f"{'x'.join(map(str, node.shape_in))} -> {'x'.join(map(str, node.shape_out))}",
        branch=layers,
        parameters=sum(p.numel() for p in branch.parameters()),
    )
