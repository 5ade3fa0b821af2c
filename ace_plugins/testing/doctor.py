"""Runs all checks on an adapter: as tests of pytest, in `check_adapter`, or in `diagnose`, which describes it too."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from ..contract.sites import Node, Site, Tap
from ..engine.measure import equivariance_error, one_thread
from ..errors import AceError, AdapterError, one_of
from ..output import progress
from ..patch.shims import has_effect
from ..plugins.plugin import one_line
from ..report.status import status
from ..symmetry.measure import EquivarianceError
from .checks import CHECKS
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


def merge_failures(outcomes: Mapping[str, Exception | None]) -> list[str]:
    """Return one line for each cause of failures, with the names of all checks that failed for it."""
    checks: dict[str, list[str]] = {}
    for name, error in outcomes.items():
        if isinstance(error, CheckError):
            checks.setdefault(str(error), []).append(name)
    return [f"{', '.join(names)}: {cause}" for cause, names in checks.items()]


def run_check(name: str, kit: Kit) -> CheckError | NotApplicable | None:
    """Run one check and return its error, or None if the adapter passed it."""
    try:
        CHECKS[name](kit)
    except (NotApplicable, CheckError) as error:
        return error
    except Exception as error:
        return CheckError(str(error) if isinstance(error, AceError) else one_line(error))
    return None


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
    kit = Kit(name, seed, checkout)
    if failures := {check: error for check in CHECKS if isinstance(error := run_check(check, kit), CheckError)}:
        raise AdapterCheckError(name, failures)


@dataclass(frozen=True)
class AdapterCheck:
    """One check of one adapter, to be called by a test."""

    adapter: str
    name: str
    make_kit: Callable[[], Kit]

    def __call__(self) -> None:
        """Run the check. If it fails, the test fails with a message only, without a traceback."""
        import pytest  # not at the top: users who only call `check_adapter` need not have it

        try:
            CHECKS[self.name](self.make_kit())
        except (AceError, CheckError) as error:
            raise pytest.fail.Exception(f"adapter {self.adapter!r}, {self.name}: {error}", pytrace=False) from None


def parametrize_with_checks(
    adapter: str,
    *,
    expected_failures: Mapping[str, str] | None = None,
    seed: int = 0,
    checkout: str | os.PathLike[str] | None = None,
) -> Any:
    """Turn each check of an adapter into one pytest test. The test function gets the check as its argument ``check``.

    The name of the check is the id of its test:

        @parametrize_with_checks("mynet")
        def test_contract(check):
            check()

    Args:
        adapter: Name of the adapter's entry point.
        expected_failures: Checks that are expected to fail: a mapping from their names to the reasons. The test of such
            a check fails if the check passes.
        seed: Seed of the examples.
        checkout: Folder of the upstream, for adapters of a cloned repository. Default: the folder in
            ``ACE_UPSTREAM_<ADAPTER>``, or the one found near the current folder.

    Returns:
        A decorator for a test function that calls ``check()``.

    Raises:
        AceError: ``expected_failures`` names an unknown check.
    """
    import pytest

    expected = expected_failures or {}
    for unknown in expected.keys() - CHECKS.keys():
        raise AceError(one_of("check in expected_failures", unknown, CHECKS))
    # All checks share one kit, because building its example can take seconds.
    kit = functools.cache(functools.partial(Kit, adapter, seed, checkout))
    marks = {name: pytest.mark.xfail(reason=reason, strict=True) for name, reason in expected.items()}
    checks = (AdapterCheck(adapter, name, kit) for name in CHECKS)
    parameters = [pytest.param(check, id=check.name, marks=marks.get(check.name, ())) for check in checks]
    return pytest.mark.parametrize("check", parameters)


@dataclass(frozen=True)
class Diagnosis:
    """State of an adapter on this machine."""

    adapter: str
    upstream: str
    distribution: str
    requires: tuple[str, ...]
    model: str
    parts: tuple[dict[str, Any], ...]  # description of each site and stem
    parameters_before: int
    parameters_after: int
    error_at_0: EquivarianceError
    error_at_1: EquivarianceError
    shims: tuple[dict[str, Any], ...]  # name and reason of each shim, and whether it has an effect (applied)
    presets: dict[str, dict[str, Any]]
    checks: tuple[str, ...]  # names of the checks that passed
    skipped: dict[str, str]  # mapping from the name of each skipped check to the reason why it does not apply
    problems: tuple[str, ...]  # one line for each cause of failed checks

    def to_dict(self) -> dict[str, Any]:
        """Return the diagnosis as a dict for JSON."""
        return dataclasses.asdict(self)


def diagnose(name: str, seed: int = 0, *, checkout: Path | None = None) -> Diagnosis:
    """Attach an adapter to its example, run all checks and measure the symmetry at gamma = 0 and gamma = 1.

    Raises AdapterError with the failures of the checks if the example cannot be attached and run.
    """
    kit = Kit(name, seed, checkout)
    outcomes: dict[str, CheckError | NotApplicable | None] = {}
    with one_thread():
        with progress(len(CHECKS), "checks") as done:
            for check in CHECKS:
                outcomes[check] = run_check(check, kit)
                if done is not None:
                    done(1)
        problems = tuple(merge_failures(outcomes))
        try:
            models = [kit.attached(gamma=gamma) for gamma in (0.0, 1.0)]
            errors = [equivariance_error(model, kit.batch, branches_on=True) for model in models]
        except Exception as error:  # failed checks, if any, explain the error better
            raise AdapterError("; ".join(problems) or str(error)) from error
    plugin, model = kit.plugin, models[0]
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
        shims=tuple({"name": s.name, "reason": s.reason, "applied": has_effect(plugin, s)} for s in plugin.shims),
        presets=plugin.presets,
        checks=tuple(check for check, error in outcomes.items() if error is None),
        skipped={check: str(error) for check, error in outcomes.items() if isinstance(error, NotApplicable)},
        problems=problems,
    )


def _describe(node: Node, branch: nn.Module) -> dict[str, Any]:
    module, through = (node.module, node.through) if isinstance(node, Site) else ("", None)
    reads = f"branch of {node.reads}" if isinstance(node.reads, str) else "input of each site"
    if isinstance(node.reads, Tap):
        argument, owner = node.reads.argument, node.reads.module
        what = f"argument {argument}" if isinstance(argument, int) else argument
        reads = f"{what} of {'its module' if owner is None else owner or 'the model'}"
    return {
        "name": node.name,
        "kind": "site" if isinstance(node, Site) else "stem",
        "module": module,
        "reads": f"{reads} through {through}" if through else reads,
        "features": f"{'x'.join(map(str, node.shape_in))} -> {'x'.join(map(str, node.shape_out))}",
        "branch": " ".join(type(m).__name__ for m in branch.modules() if not list(m.children())),
        "parameters": sum(p.numel() for p in branch.parameters()),
    }
