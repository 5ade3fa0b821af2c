"""The checks as tests of pytest: an id for each check, and failures that are expected."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
from clones import python

from ace_plugins.errors import AceError
from ace_plugins.testing import CHECKS, AdapterCheckError, check_adapter, parametrize_with_checks

TESTS = """
    import pytest
    from ace_plugins.adapter import hookimpl
    from ace_plugins.plugins.registry import registry
    from ace_plugins.testing import parametrize_with_checks
    from toy import ADAPTERS, LayeredAdapter

    class Keeping(LayeredAdapter):
        @hookimpl
        def ace_preset(self):
            return {"paper": {"mode": "strickt"}}

    registry().add(ADAPTERS["two_outputs"](), "pair")
    registry().add(LayeredAdapter(), "known", "ace-known", "1.2")
    registry().add(Keeping(), "bad")

    @parametrize_with_checks("pair")
    def test_pair(check):
        check()

    @parametrize_with_checks("known", expected_failures={"branches_break_the_symmetry": "it reads invariants"})
    def test_known(check):
        check()

    @parametrize_with_checks("pair", expected_failures={"eval_is_upstream": "so they say"})
    def test_too_pessimistic(check):
        if check.name == "eval_is_upstream":
            check()

    @parametrize_with_checks("bad")
    def test_bad(check):
        if check.name in ("hooks_answer", "example_repeats"):
            check()

    @parametrize_with_checks("nobody")
    def test_nobody(check):
        if check.name == "hooks_answer":
            check()
"""


def test_ids_and_expected_failures(tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text(textwrap.dedent(TESTS))
    words = ["-m", "pytest", "-p", "no:cacheprovider", "-v", "--strict-markers", "test_mine.py"]
    done = python(tmp_path, *words, PYTHONPATH=str(Path(__file__).parents[1]))
    assert done.returncode == 1, done.stderr
    lines = done.stdout.splitlines()
    for check in CHECKS:
        outcome = "SKIPPED" if check == "importing_is_light" else "PASSED"
        assert any(line.startswith(f"test_mine.py::test_pair[{check}] {outcome}") for line in lines)
    assert any(line.startswith("test_mine.py::test_known[branches_break_the_symmetry] XFAIL") for line in lines)
    failed = [line for line in lines if line.startswith("FAILED")]
    assert [line for line in failed if "test_too_pessimistic" in line] == [
        "FAILED test_mine.py::test_too_pessimistic[eval_is_upstream] - [XPASS(strict)] so they say"
    ]
    assert "adapter 'bad', hooks_answer: adapter 'bad': ace_preset returned 'paper' with unknown mode" in done.stdout
    assert "adapter 'nobody', hooks_answer: unknown adapter 'nobody'" in done.stdout
    assert "kit.py" not in done.stdout, "no way through the kit's own files"
    assert "Traceback" not in done.stdout
    assert "During handling" not in done.stdout


def test_an_expected_failure_that_is_no_check_is_refused() -> None:
    with pytest.raises(AceError, match="unknown check in expected_failures 'gama_zero_is_upstream': did you mean"):
        parametrize_with_checks("schnet", expected_failures={"gama_zero_is_upstream": "misspelt"})


def test_all_at_once_without_pytest() -> None:
    check_adapter("two_outputs")
    with pytest.raises(AdapterCheckError, match=r"adapter 'free' fails \d+ of 25 checks:\n  .*ace_example"):
        check_adapter("free")
