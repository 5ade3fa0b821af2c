"""pytest plugin: one test per check, and a summary per adapter.

    from ace_plugins.testing import parametrize_with_checks

    @parametrize_with_checks("mynet")
    def test_contract(check):
        check()

pytest loads this module wherever ace-plugins is installed, so only a call of `parametrize_with_checks` imports torch.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from ..errors import AceError, one_of
from ..plugins.registry import registry

if TYPE_CHECKING:
    from .kit import Kit

OUTCOMES = {"passed": "", "failed": "fail", "xfailed": "expected to fail", "skipped": "do not apply"}
"""Outcomes of pytest, and the words for them in the summary."""


@dataclass(frozen=True)
class AdapterCheck:
    """One check of one adapter, to be called by a test."""

    adapter: str
    name: str
    make_kit: Callable[[], Kit]

    def __call__(self) -> None:
        """Run the check. If it fails, the test fails with a message only, without a traceback."""
        from .checks import CHECKS
        from .kit import CheckError

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
) -> pytest.MarkDecorator:
    """Make one test of every check of an adapter. The test function gets the check as its argument ``check``.

    The name of the check is the id of its test.

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
    from .checks import CHECKS
    from .kit import Kit

    expected = expected_failures or {}
    for unknown in expected.keys() - CHECKS.keys():
        raise AceError(one_of("check in expected_failures", unknown, CHECKS))
    # All checks share one kit, because building its example can take seconds.
    kit = functools.cache(functools.partial(Kit, adapter, seed, checkout))
    marks = {name: pytest.mark.xfail(reason=reason, strict=True) for name, reason in expected.items()}
    checks = (AdapterCheck(adapter, name, kit) for name in CHECKS)
    parameters = [pytest.param(check, id=check.name, marks=marks.get(check.name, ())) for check in checks]
    return pytest.mark.parametrize("check", parameters)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(item: Any, call: Any) -> None:
    """Add the check to the report, because only reports are sent from the processes of pytest-xdist."""
    check = getattr(getattr(item, "callspec", None), "params", {}).get("check")
    if isinstance(check, AdapterCheck) and call.when == "call":
        item.user_properties.append(("ace_check", [check.adapter, check.name]))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print one line for each adapter."""
    found: dict[str, dict[str, list[str]]] = {}
    for outcome in OUTCOMES:
        for report in terminalreporter.stats.get(outcome, ()):
            if about := dict(getattr(report, "user_properties", ())).get("ace_check"):
                found.setdefault(about[0], {}).setdefault(outcome, []).append(about[1])
    if found:
        terminalreporter.section("ace-plugins: checks of adapters")
    for adapter, checks in found.items():
        plugin = registry().plugins.get(adapter)
        version = f" ({plugin.distribution} {plugin.version})" if plugin and plugin.version else ""
        run = sum(map(len, checks.values())) - len(checks.get("skipped", ()))
        parts = [f"{adapter}{version}: {len(checks.get('passed', ()))} of {run} checks pass"]
        parts += [f"{len(names)} {OUTCOMES[o]} ({', '.join(names)})" for o, names in checks.items() if OUTCOMES[o]]
        terminalreporter.line("; ".join(parts))
