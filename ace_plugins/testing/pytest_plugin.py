"""The pytest plugin: a test for each check, and a summary of what they found.

    from ace_plugins.testing import parametrize_with_checks

    @parametrize_with_checks("mynet")
    def test_contract(check):
        check()

pytest loads this module wherever ace-plugins is installed, so it imports little; what needs torch waits for its use.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from ..errors import AceError, one_of
from ..later import later
from ..plugins.registry import registry

CHECK, NOTE = "ace_check", "ace_note"
"""Names of what a test report carries: adapter and check; adapter and what was measured."""


@dataclass
class AdapterCheck:
    """One check of one adapter: call it."""

    adapter: str
    name: str
    seed: int = 0
    checkout: Path | None = None
    notes: dict[str, str] = field(default_factory=dict)
    """What the check measured, for the summary."""

    def __call__(self) -> None:
        testing = later("ace_plugins.testing")
        function = {testing.name_of(each): each for each in testing.CHECKS}[self.name]
        try:
            kit = _kit(self.adapter, self.seed, self.checkout)
            function(kit)
            self.notes, kit.notes = kit.notes, {}
            return
        except (AceError, testing.CheckError) as error:
            told = f"adapter {self.adapter!r}, {self.name}: {error}"
        # The adapter is to be mended, not the kit: a traceback through it would only be long.
        pytest.fail(told, pytrace=False)

    def __str__(self) -> str:
        return self.name


_KITS: dict[tuple[str, int, Path | None], Any] = {}


def _kit(adapter: str, seed: int, checkout: Path | None) -> Any:
    """The kit that an adapter's checks share, so that its example is built once."""
    key = adapter, seed, checkout
    if key not in _KITS or _KITS[key].plugin is not registry().adapter(adapter):
        _KITS[key] = later("ace_plugins.testing").Kit(*key)
    return _KITS[key]


def parametrize_with_checks(
    adapter: str,
    *,
    expected_failures: Mapping[str, str] | None = None,
    seed: int = 0,
    checkout: str | os.PathLike[str] | None = None,
) -> pytest.MarkDecorator:
    """Parametrize a test by ``check``, one for each check, with the check's name as its id.

    ``expected_failures`` maps checks to the reason why they fail. One that holds after all fails the test, so that
    the list stays true. ``checkout`` is where the upstream is, if that is one people clone (or
    ``ACE_UPSTREAM_<NAME>`` says it).
    """
    testing = later("ace_plugins.testing")
    names = [testing.name_of(check) for check in testing.CHECKS]
    expected = dict(expected_failures or {})
    for unknown in expected.keys() - set(names):
        raise AceError(one_of("check in expected_failures", unknown, names))
    where = None if checkout is None else Path(checkout)
    parameters = [
        pytest.param(
            AdapterCheck(adapter, name, seed, where),
            id=name,
            marks=[pytest.mark.xfail(reason=expected[name], strict=True)] if name in expected else [],
        )
        for name in names
    ]
    return pytest.mark.parametrize("check", parameters)


def _check_of(item: Any) -> AdapterCheck | None:
    values = getattr(getattr(item, "callspec", None), "params", {}).values()
    return next((value for value in values if isinstance(value, AdapterCheck)), None)


def pytest_itemcollected(item: Any) -> None:
    check = _check_of(item)
    if check is not None:
        item.user_properties.append((CHECK, [check.adapter, check.name]))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(item: Any, call: Any) -> None:
    """Reports travel between processes, checks do not: what was measured goes into the report before it is made."""
    check = _check_of(item)
    if check is not None and call.when == "call":
        item.user_properties += [(NOTE, [check.adapter, f"{what} {value}"]) for what, value in check.notes.items()]


def pytest_terminal_summary(terminalreporter: Any) -> None:
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
        terminalreporter.section("ace-plugins: what adapters are judged by")
    for adapter, checks in outcomes.items():
        terminalreporter.line(_summary(adapter, checks))
        if "failed" not in checks and "error" not in checks and notes.get(adapter):
            terminalreporter.line(f"  {', '.join(dict.fromkeys(notes[adapter]))}")


def _summary(adapter: str, checks: Mapping[str, list[str]]) -> str:
    plugin = registry().plugins.get(adapter)
    whose = f" ({plugin.distribution} {plugin.version})" if plugin and plugin.version else ""
    judged = sum(map(len, checks.values())) - len(checks.get("skipped", ()))
    told = [f"{len(checks.get('passed', ()))} of {judged} checks hold"]
    for outcome, words in (("failed", "fail"), ("error", "could not run"), ("xfailed", "expected to fail")):
        if outcome in checks:
            told.append(f"{len(checks[outcome])} {words} ({', '.join(checks[outcome])})")
    if "skipped" in checks:
        told.append(f"{len(checks['skipped'])} have nothing to judge")
    return f"{adapter}{whose}: {'; '.join(told)}"
