"""Runs all checks on an adapter: `check_adapter` raises if one fails, and `diagnose` describes the adapter too."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
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
from ..symmetry.measure import EquivarianceError
from .checks import CHECKS
from .kit import CheckError, Kit, NotApplicable

Outcomes = Mapping[str, CheckError | NotApplicable | None]
"""Mapping from the name of each check to its error; None if the adapter passed it."""


class AdapterCheckError(AssertionError):
    """Raised if an adapter fails at least one check.

    Attributes:
        failures: Mapping from the name of each failed check to its error.
    """

    def __init__(self, adapter: str, failures: Mapping[str, CheckError]) -> None:
        self.failures = dict(failures)
        lines = "".join(f"\n  {line}" for line in merge_failures(failures))
        super().__init__(f"adapter {adapter!r} fails {len(failures)} of {len(CHECKS)} checks:{lines}")


def merge_failures(outcomes: Outcomes) -> list[str]:
    """Return one line for each cause of failures, with the names of all checks that failed for it."""
    checks: dict[str, list[str]] = {}
    for name, error in outcomes.items():
        if isinstance(error, CheckError):
            checks.setdefault(str(error), []).append(name)
    return [f"{', '.join(names)}: {cause}" for cause, names in checks.items()]


def judge(kit: Kit, done: Callable[[int], None] | None = None) -> Outcomes:
    """Run every check on one adapter, and call ``done(1)`` after each."""
    outcomes = {}
    for name in CHECKS:
        outcomes[name] = run_check(name, kit)
        if done is not None:
            done(1)
    return outcomes


def run_check(name: str, kit: Kit) -> CheckError | NotApplicable | None:
    """Run one check and return its error, or None if the adapter passed it."""
    try:
        CHECKS[name](kit)
    except (NotApplicable, CheckError) as error:
        return error
    except Exception as error:
        return CheckError(_message(error))
    return None


def _message(error: Exception) -> str:
    """Return the message of an error. Unlike the message of an AceError, that of other errors needs their type."""
    return str(error) if isinstance(error, AceError) else one_line(error)


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
    outcomes = judge(Kit(name, seed, checkout))
    if failures := {check: error for check, error in outcomes.items() if isinstance(error, CheckError)}:
        raise AdapterCheckError(name, failures)


@dataclass(frozen=True)
class Diagnosis:
    """State of an adapter on this machine."""

    adapter: str
    upstream: str
    distribution: str
    requires: tuple[str, ...]
    model: str
    parts: tuple[dict[str, Any], ...]
    """Description of each site and stem: name, kind, module, reads, features, branch and parameters."""
    parameters_before: int
    parameters_after: int
    error_at_0: EquivarianceError
    error_at_1: EquivarianceError
    shims: tuple[dict[str, Any], ...]
    """Name and reason of each shim, and whether it has an effect on this machine (applied)."""
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
            outcomes = judge(kit, done)
        problems = tuple(merge_failures(outcomes))
        try:
            errors = []
            for gamma in (0.0, 1.0):
                model = kit.attached(gamma=gamma)
                errors.append(equivariance_error(model, kit.batch, branches_on=True))
        except Exception as error:  # failed checks, if any, explain the error better
            raise AdapterError("; ".join(problems) or _message(error)) from error
    plugin, now = kit.plugin, status(model)
    shims = ({"name": s.name, "reason": s.reason, "applied": has_effect(plugin, s)} for s in plugin.shims)
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
        shims=tuple(shims),
        presets=plugin.presets,
        checks=tuple(check for check, error in outcomes.items() if error is None),
        skipped={check: str(error) for check, error in outcomes.items() if isinstance(error, NotApplicable)},
        problems=problems,
    )


def _describe(node: Node, branch: nn.Module) -> dict[str, Any]:
    reads, site = "input of each site", node if isinstance(node, Site) else None
    if isinstance(node.reads, str):
        reads = f"branch of {node.reads}"
    elif node.reads is not None:
        argument, owner = node.reads.argument, node.reads.module
        what = f"argument {argument}" if isinstance(argument, int) else argument
        reads = f"{what} of {'its module' if owner is None else owner or 'the model'}"
    return {
        "name": node.name,
        "kind": "site" if site else "stem",
        "module": site.module if site else "",
        "reads": reads + (f" through {site.through}" if site and site.through else ""),
        "features": f"{'x'.join(map(str, node.shape_in))} -> {'x'.join(map(str, node.shape_out))}",
        "branch": " ".join(type(m).__name__ for m in branch.modules() if not list(m.children())),
        "parameters": sum(p.numel() for p in branch.parameters()),
    }
