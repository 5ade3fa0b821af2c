"""Runs all checks on an adapter: `check_adapter` raises if one fails, and `diagnose` describes the adapter too."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from ..contract.sites import Node, Site
from ..demo import one_thread
from ..engine.measure import equivariance_error
from ..errors import AceError, AdapterError
from ..output import progress
from ..patch.shims import has_effect
from ..plugins.plugin import one_line
from ..report.status import status
from ..symmetry.measure import Call, EquivarianceError
from .checks import CHECKS, Check
from .kit import CheckError, Kit, NotApplicable


class AdapterCheckError(AssertionError):
    """Raised if an adapter fails at least one check.

    Attributes:
        failures: Mapping from the name of each failed check to its error.
    """

    def __init__(self, adapter: str, failures: Mapping[str, CheckError]) -> None:
        self.failures = dict(failures)
        lines = "".join(f"\n  {line}" for line in merge_failures(failures))
        super().__init__(f"adapter {adapter!r} fails {len(failures)} of {len(CHECKS)} checks:{lines}")


def merge_failures(failures: Mapping[str, CheckError]) -> list[str]:
    """Return one line for each cause, with the names of all checks that failed for it."""
    checks: dict[str, list[str]] = {}
    for name, error in failures.items():
        checks.setdefault(str(error), []).append(name)
    return [f"{', '.join(names)}: {cause}" for cause, names in checks.items()]


@dataclass
class Judgement:
    """Outcome of all checks on one adapter."""

    passed: list[str] = field(default_factory=list)
    failures: dict[str, CheckError] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    """Mapping from the name of each skipped check to the reason why it does not apply to this adapter."""


def judge(kit: Kit, done: Callable[[int], None] | None = None) -> Judgement:
    """Run every check on one adapter; call ``done(1)`` after each."""
    found = Judgement()
    for name, check in CHECKS.items():
        try:
            run_check(check, kit)
            found.passed.append(name)
        except NotApplicable as reason:
            found.skipped[name] = str(reason)
        except CheckError as error:
            found.failures[name] = error
        if done is not None:
            done(1)
    return found


def run_check(check: Check, kit: Kit) -> None:
    """Run one check, and raise any error as a `CheckError` with one line of text."""
    try:
        check(kit)
    except (NotApplicable, CheckError):
        raise
    except Exception as error:  # the message of an AceError names plugin, hook and site
        raise CheckError(str(error) if isinstance(error, AceError) else one_line(error)) from error


def check_adapter(name: str, *, seed: int = 0, checkout: str | os.PathLike[str] | None = None) -> None:
    """Run all checks on an adapter.

    Args:
        name: Name of the adapter's entry point.
        seed: Seed of the examples.
        checkout: Folder of the upstream, for adapters of a cloned repository. Default: the folder in
            ``ACE_UPSTREAM_<ADAPTER>``, or the one found near the current folder.

    Raises:
        AdapterCheckError: At least one check failed; the error lists every failure.
        AdapterError: The adapter is unknown or not usable.
    """
    judgement = judge(Kit(name, seed, None if checkout is None else Path(checkout)))
    if judgement.failures:
        raise AdapterCheckError(name, judgement.failures)


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
    kit = Kit(name, seed, checkout)
    with one_thread():
        with progress(len(CHECKS), "checks") as done:
            judgement = judge(kit, done)
        try:
            return _diagnosis(kit, judgement)
        except Exception as error:  # failed checks, if any, explain the error better
            problem = str(error) if isinstance(error, AceError) else one_line(error)
            raise AdapterError("; ".join(merge_failures(judgement.failures)) or problem) from error


def _diagnosis(kit: Kit, judgement: Judgement) -> Diagnosis:
    plugin = kit.plugin
    errors = []
    for gamma in (0.0, 1.0):
        model, example = kit.attached(gamma=gamma)
        errors.append(equivariance_error(model, Call(example.args, example.kwargs), branches_on=True))
    now = status(model)
    return Diagnosis(
        adapter=plugin.name,
        upstream=kit.upstream,
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
        checks=tuple(judgement.passed),
        skipped=judgement.skipped,
        problems=tuple(merge_failures(judgement.failures)),
    )


def _describe(node: Node, branch: nn.Module) -> Part:
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
