"""doctor: attach an adapter to its own example, run the checks on it, and tell what came of both."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..contract.sites import Site, Stem
from ..engine.measure import equivariance_error
from ..errors import AceError, AdapterError
from ..output import progress
from ..patch.shims import would_act
from ..plugins.plugin import one_line
from ..report.status import status
from ..symmetry.measure import EquivarianceError
from .checks import CHECKS, Judgement, judge, merge_failures
from .examples import attached_example
from .kit import Kit


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
    checks: tuple[str, ...]
    """The checks of the test kit that hold."""
    skipped: dict[str, str]
    """Those that have nothing to judge in this adapter, and why."""
    problems: tuple[str, ...]
    """What is wrong with the adapter, as the checks that fail say it; none if it is healthy."""

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def diagnose(name: str, seed: int = 0, *, checkout: Path | None = None) -> Diagnosis:
    """Build the adapter's example, attach it, measure its symmetry with the branches at 0 and at 1, and run the checks.

    An adapter whose example cannot be attached and run is an error with what the checks say of it.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # examples are small: more threads would only wait for each other
    try:
        kit = Kit(name, seed, checkout)
        with progress(len(CHECKS), "checks") as done:
            judgement = judge(kit, done)
        try:
            return _diagnosis(name, seed, checkout, judgement)
        except AceError as error:
            problems = merge_failures(judgement.failures)
            raise AdapterError("; ".join(problems) or str(error)) from error
    finally:
        torch.set_num_threads(threads)


def _diagnosis(name: str, seed: int, checkout: Path | None, judgement: Judgement) -> Diagnosis:
    built = attached_example(name, seed, checkout=checkout)
    plugin, model = built.plugin, built.model
    now = status(model)
    errors = []
    for gamma in (0.0, 1.0):
        with torch.no_grad():
            model.ace.gamma.fill_(gamma)
        try:
            errors.append(equivariance_error(model, built.batch, branches_on=True))
        except AceError:
            raise
        except Exception as error:
            raise AdapterError(f"adapter {plugin.name!r}: its example does not run: {one_line(error)}") from error
    return Diagnosis(
        adapter=plugin.name,
        upstream=built.upstream,
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
        checks=judgement.held,
        skipped=judgement.skipped,
        problems=tuple(merge_failures(judgement.failures)),
    )


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
