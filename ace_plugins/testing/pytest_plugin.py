"""pytest plugin: one test per check, and a summary per adapter.

    from ace_plugins.testing import parametrize_with_checks

    @parametrize_with_checks("mynet")
    def test_contract(check):
        check()

pytest loads this module wherever ace-plugins is installed, so torch is imported only when a check runs.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ..errors import AceError, one_of
from ..plugins.registry import registry

if TYPE_CHECKING:
    from .kit import Kit

CHECK, NOTE = "ace_check", "ace_note"
"""Names of properties of a test report, with the values (adapter, check) and (adapter, measurement)."""


@dataclass
class AdapterCheck:
    """One check of one adapter, to be called by a test.

    Attributes:
        notes: Mapping from the description of each of the check's measurements to its value, for the summary.
    """

    adapter: str
    name: str
    seed: int = 0
    checkout: Path | None = None
    notes: dict[str, str] = field(default_factory=dict)

    def __call__(self) -> None:
        """Run the check. If it fails, the test fails with a message only, without a traceback."""
        from .checks import CHECKS
        from .kit import CheckError

        try:
            kit = _kit(self.adapter, self.seed, self.checkout)
            CHECKS[self.name](kit)
            self.notes, kit.notes = kit.notes, {}
            return
        except (AceError, CheckError) as error:
            problem = f"adapter {self.adapter!r}, {self.name}: {error}"
        pytest.fail(problem, pytrace=False)

    def __str__(self) -> str:
        return self.name


_KITS: dict[tuple[str, int, Path | None], Kit] = {}


def _kit(adapter: str, seed: int, checkout: Path | None) -> Kit:
    """Return the kit that all checks of an adapter share, so that its example is built only once."""
    from .kit import Kit

    key = adapter, seed, checkout
    if key not in _KITS or _KITS[key].plugin is not registry().adapter(adapter):
        _KITS[key] = Kit(*key)
    return _KITS[key]


def parametrize_with_checks(
    adapter: str,
    *,
    expected_failures: Mapping[str, str] | None = None,
    seed: int = 0,
    checkout: str | os.PathLike[str] | None = None,
) -> pytest.MarkDecorator:
    """Parametrize a test over all checks of an adapter. Its argument is ``check``, and its ids are the checks' names.

    Args:
        adapter: Name of the adapter's entry point.
        expected_failures: Mapping from the names of checks that are expected to fail to the reason. The test fails if
            such a check passes.
        seed: Seed of the examples.
        checkout: Folder of the upstream, for adapters of a cloned repository. Default: the folder in
            ``ACE_UPSTREAM_<ADAPTER>``, or the one found near the current folder.

    Returns:
        A decorator for a test function that calls ``check()``.

    Raises:
        AceError: ``expected_failures`` names an unknown check.
    """
    from .checks import CHECKS

    expected = dict(expected_failures or {})
    for unknown in expected.keys() - CHECKS.keys():
        raise AceError(one_of("check in expected_failures", unknown, CHECKS))
    folder = None if checkout is None else Path(checkout)
    marks = {name: [pytest.mark.xfail(reason=reason, strict=True)] for name, reason in expected.items()}
    checks = [AdapterCheck(adapter, name, seed, folder) for name in CHECKS]
    parameters = [pytest.param(check, id=check.name, marks=marks.get(check.name, [])) for check in checks]
    return pytest.mark.parametrize("check", parameters)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(item: Any, call: Any) -> None:
    """Add the check and its measurements to the report, because only reports travel between processes (xdist)."""
    for check in getattr(getattr(item, "callspec", None), "params", {}).values():
        if isinstance(check, AdapterCheck) and call.when == "setup":
            item.user_properties.append((CHECK, [check.adapter, check.name]))
        elif isinstance(check, AdapterCheck) and call.when == "call":
            item.user_properties += [(NOTE, [check.adapter, f"{what} {value}"]) for what, value in check.notes.items()]


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print one line for each adapter, and its measurements if none of its checks failed."""
    outcomes: dict[str, dict[str, list[str]]] = {}
    notes: dict[str, list[str]] = {}
    for outcome in ("passed", "failed", "error", "xfailed", "skipped"):
        for report in terminalreporter.stats.get(outcome, ()):
            for name, value in getattr(report, "user_properties", ()):
                if name == CHECK:
                    outcomes.setdefault(value[0], {}).setdefault(outcome, []).append(value[1])
                elif name == NOTE:
                    notes.setdefault(value[0], []).append(value[1])
    if outcomes:
        terminalreporter.section("ace-plugins: checks of adapters")
    for adapter, checks in outcomes.items():
        terminalreporter.line(_summary(adapter, checks))
        if "failed" not in checks and "error" not in checks and notes.get(adapter):
            terminalreporter.line(f"  {', '.join(dict.fromkeys(notes[adapter]))}")


def _summary(adapter: str, checks: Mapping[str, list[str]]) -> str:
    plugin = registry().plugins.get(adapter)
    version = f" ({plugin.distribution} {plugin.version})" if plugin and plugin.version else ""
    run = sum(map(len, checks.values())) - len(checks.get("skipped", ()))
    parts = [f"{len(checks.get('passed', ()))} of {run} checks pass"]
    for outcome, words in (("failed", "fail"), ("error", "could not run"), ("xfailed", "expected to fail")):
        if outcome in checks:
            parts.append(f"{len(checks[outcome])} {words} ({', '.join(checks[outcome])})")
    if "skipped" in checks:
        parts.append(f"{len(checks['skipped'])} do not apply")
    return f"{adapter}{version}: {'; '.join(parts)}"
