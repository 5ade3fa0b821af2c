"""Diagnoses: attach an adapter to its own example, measure the symmetry and run all checks."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..contract.sites import Node, Site
from ..engine.measure import equivariance_error
from ..errors import AceError, AdapterError
from ..output import progress
from ..patch.shims import has_effect
from ..plugins.plugin import one_line
from ..report.status import status
from ..symmetry.measure import EquivarianceError
from .checks import CHECKS
from .examples import attach_example
from .judging import Judgement, judge, merge_failures
from .kit import Kit


@dataclass(frozen=True)
class Part:
    """Description of a site or stem and its branch."""

    name: str
    kind: str
    module: str
    reads: str
    features: str
    branch: str
    parameters: int


@dataclass(frozen=True)
class Repair:
    """A compatibility shim, and whether it has an effect on this machine."""

    name: str
    reason: str
    applied: bool


@dataclass(frozen=True)
class Diagnosis:
    """State of an adapter on this machine."""

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
    """Names of the checks that passed."""
    skipped: dict[str, str]
    """Mapping from the name of each skipped check to the reason why it does not apply."""
    problems: tuple[str, ...]
    """One line for each cause of failed checks; empty if no check failed."""

    def to_dict(self) -> dict[str, Any]:
        """Return the diagnosis as a dict for JSON."""
        return dataclasses.asdict(self)


def diagnose(name: str, seed: int = 0, *, checkout: Path | None = None) -> Diagnosis:
    """Attach an adapter to its example, run all checks and measure the symmetry at gamma = 0 and gamma = 1.

    Raises AdapterError with the failures of the checks if the example cannot be attached and run.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # examples are too small to gain from more threads
    try:
        kit = Kit(name, seed, checkout)
        with progress(len(CHECKS), "checks") as done:
            judgement = judge(kit, done)
        try:
            return _diagnosis(name, seed, checkout, judgement)
        except Exception as error:  # failed checks, if any, explain the error better
            problem = str(error) if isinstance(error, AceError) else one_line(error)
            raise AdapterError("; ".join(merge_failures(judgement.failures)) or problem) from error
    finally:
        torch.set_num_threads(threads)


def _diagnosis(name: str, seed: int, checkout: Path | None, judgement: Judgement) -> Diagnosis:
    built = attach_example(name, seed, checkout=checkout)
    plugin, model = built.plugin, built.model
    now = status(model)
    errors = []
    for gamma in (0.0, 1.0):
        with torch.no_grad():
            model.ace.gamma.fill_(gamma)
        errors.append(equivariance_error(model, built.batch, branches_on=True))
    return Diagnosis(
        adapter=plugin.name,
        upstream=built.upstream,
        distribution=f"{plugin.distribution} {plugin.version}".strip(),
        requires=tuple(f"{r.requirement} (found {r.found})" for r in plugin.requires),
        model=type(model).__name__,
        parts=tuple(_describe(node, model.ace.branch(node.name)) for node in model.ace.nodes.values()),
        parameters_before=now.upstream_parameters,
        parameters_after=now.upstream_parameters + now.ace_parameters,
        error_at_0=errors[0],
        error_at_1=errors[1],
        shims=tuple(Repair(shim.name, shim.reason, has_effect(plugin, shim)) for shim in plugin.shims),
        presets=plugin.presets,
        checks=judgement.held,
        skipped=judgement.skipped,
        problems=tuple(merge_failures(judgement.failures)),
    )


def _describe(node: Node, branch: torch.nn.Module) -> Part:
    return Part(
        name=node.name,
        kind="site" if isinstance(node, Site) else "stem",
        module=node.module if isinstance(node, Site) else "",
        reads=_input_of(node),
        features=f"{'x'.join(map(str, node.shape_in))} -> {'x'.join(map(str, node.shape_out))}",
        branch=" ".join(type(m).__name__ for m in branch.modules() if not list(m.children())),
        parameters=sum(p.numel() for p in branch.parameters()),
    )


def _input_of(node: Node) -> str:
    """Return a phrase that describes the input of a node's branch."""
    through = f" through {node.through}" if isinstance(node, Site) and node.through is not None else ""
    if isinstance(node.reads, str):
        return f"branch of {node.reads}{through}"
    if node.reads is None:
        return "input of each site"
    argument = node.reads.argument
    if node.reads.module is None:
        return (f"its input {argument!r}" if argument else "its input") + through
    which = f"argument {argument}" if isinstance(argument, int) else argument
    return f"{which} of {node.reads.module or 'the model'}{through}"
