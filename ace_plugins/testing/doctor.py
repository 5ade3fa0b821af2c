"""doctor: attach an adapter to its own example and tell what came of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..checkout.layout import layout
from ..contract.sites import Site, Stem
from ..contract.upstreams import Upstream, class_path
from ..engine.measuring import equivariance_error
from ..errors import AceError, AdapterError
from ..patch.constructors import attach
from ..patch.shims import REPAIRS, would_act
from ..plugins.claims import claims
from ..plugins.plugin import Plugin, one_line
from ..plugins.registry import registry, sees
from ..report.status import status
from ..symmetry.measuring import Call, EquivarianceError
from .importable import make_importable

SYMMETRIC = 1e-3
"""Largest relative equivariance error of plain upstream, in float32."""


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
    presets: dict[str, dict[str, Any]]
    problems: tuple[str, ...]
    """What is wrong with the adapter; none if it is healthy."""

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def diagnose(name: str, seed: int = 0, *, checkout: Path | None = None) -> Diagnosis:
    """Build the adapter's example, attach it, and measure its symmetry with the branches at 0 and at 1."""
    plugin = registry().adapter(name)
    name = plugin.name
    root = make_importable(plugin, checkout)
    REPAIRS.offer_stand_ins(plugin)
    REPAIRS.apply(plugin, "cpu")  # where the example is
    example = plugin.example(seed)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # the same branches, and so the same numbers, each time
        model: Any = attach(example.model, name, trace=False)
    now = status(model)
    errors = []
    for gamma in (0.0, 1.0):
        with torch.no_grad():
            model.ace.gamma.fill_(gamma)
        try:
            errors.append(equivariance_error(model, Call(example.args, example.kwargs), branches_on=True))
        except AceError:
            raise
        except Exception as error:
            raise AdapterError(f"adapter {name!r}: its example does not run: {one_line(error)}") from error
    return Diagnosis(
        adapter=name,
        upstream=plugin.patches.title + _commit(plugin.patches, root),
        distribution=f"{plugin.distribution} {plugin.version}".strip(),
        requires=tuple(f"{r.requirement} (found {r.found})" for r in plugin.requires),
        model=type(model).__name__,
        parts=tuple(_part(node, model.ace.branch(node.name)) for node in model.ace.nodes.values()),
        parameters_before=now.upstream_parameters,
        parameters_after=now.upstream_parameters + now.ace_parameters,
        error_at_0=errors[0],
        error_at_1=errors[1],
        shims=tuple(Repair(shim.name, shim.reason, would_act(plugin, shim)) for shim in plugin.shims),
        presets=plugin.presets,
        problems=tuple(_problems(plugin, model, *errors)),
    )


def _commit(upstream: Upstream, root: Path | None) -> str:
    return f" {layout(root, upstream.checkout)}" if root is not None and upstream.checkout is not None else ""


def _problems(plugin: Plugin, model: torch.nn.Module, zero: EquivarianceError, one: EquivarianceError) -> Iterator[str]:
    if not claims(plugin.patches, type(model)) and not sees(plugin, model):
        named = ", ".join(plugin.patches.models)
        yield f"its example is a {class_path(type(model))}, which is not among the models it names ({named})"
    if not zero.relative < SYMMETRIC:
        yield (
            f"at gamma = 0 the relative equivariance error is {zero.relative:.3g}, expected below {SYMMETRIC:g}: "
            "ace_group_action does not fit the model, or the model is not equivariant"
        )
    if not one.relative > 2 * zero.relative:
        yield "at gamma = 1 the symmetry is as at gamma = 0: the branches break nothing, so they relax nothing"


def _part(node: Site | Stem, branch: torch.nn.Module) -> Part:
    site = isinstance(node, Site)
    if isinstance(node.reads, str):
        reads = f"branch of {node.reads}"
    elif node.reads is None:
        reads = "what each site reads"
    elif node.reads.module is None:
        reads = f"its input {node.reads.argument!r}" if node.reads.argument else "its input"
    else:
        which = f"argument {node.reads.argument}" if isinstance(node.reads.argument, int) else node.reads.argument
        reads = f"{which} of {node.reads.module or 'the model'}"
    if isinstance(node, Site) and node.through is not None:
        reads += f" through {node.through}"
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
