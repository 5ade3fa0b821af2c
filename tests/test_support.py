"""The matrix of upstream versions: the choice of versions, and that tox.ini and docs/support.md are up to date."""

from __future__ import annotations

import configparser
import importlib.util
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
spec = importlib.util.spec_from_file_location("write_support", ROOT / "docs" / "write_support.py")
assert spec is not None
assert spec.loader is not None
support: Any = importlib.util.module_from_spec(spec)
sys.modules["write_support"] = support
spec.loader.exec_module(support)
RECORD = json.loads(support.RECORD.read_text(encoding="utf-8"))
TOX = support.TOX.read_text(encoding="utf-8")


def test_tox_and_the_page_are_up_to_date() -> None:
    again = "run python docs/write_support.py"
    assert support.with_matrix(TOX, RECORD) == TOX, again
    assert support.PAGE.read_text(encoding="utf-8") == support.page(TOX, RECORD), again


@pytest.mark.parametrize(
    ("requirement", "known", "picked"),
    [
        ("a>=1,<5", "4.1 4.0 3.9 3.0 2.5 2.4 1.1 1.0 0.9 5.0", "1.0 1.1 2.5 3.9 4.1"),  # the highest of each major
        ("a>=2.4,<2.9", "2.8.1 2.8.0 2.7.0 2.6.1 2.5.3 2.5.0 2.4.0", "2.4.0 2.5.3 2.7.0 2.8.1"),  # of two minors
        ("a>=0.5,<0.7", "0.6.0 0.5.9 0.5.1 0.5.0 0.4.4", "0.5.0 0.5.9 0.6.0"),
        ("a>=0.3.13", "0.3.16 0.3.15 0.3.14 0.3.13 0.3.12", "0.3.13 0.3.14 0.3.15 0.3.16"),
        ("a>=1,<2", "2.0 1.9rc1 1.1", "1.1"),
        ("a==1.1", "1.2 1.1 1.0", "1.1"),
        ("a<2.4", "2.4 2.3 2.2 1.0", "2.3"),  # no lower bound
    ],
)
def test_the_lowest_the_highest_and_some_between(requirement: str, known: str, picked: str) -> None:
    assert support.pick_versions(Requirement(requirement), {"a": known}) == picked.split()


def test_unknown_versions() -> None:
    with pytest.raises(SystemExit, match="support.json has no versions of A_b: .* --ask"):
        support.pick_versions(Requirement("A_b>=1"), {})
    with pytest.raises(SystemExit, match="no version of a>=3 is known: .* --ask"):
        support.pick_versions(Requirement("a>=3"), {"a": "1.0 2.0"})


@pytest.fixture
def with_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Add an adapter that `py` does not install, and return a record with its upstream's versions."""
    for path in ROOT.glob("adapters/*/pyproject.toml"):
        folder = tmp_path / "adapters" / path.parent.name
        folder.mkdir(parents=True)
        shutil.copy(path, folder)
    another = tmp_path / "adapters" / "another"
    another.mkdir()
    (another / "pyproject.toml").write_text(
        '[project]\nname = "ace-another"\nrequires-python = ">=3.11"\n'
        '[project.optional-dependencies]\nupstream = ["Some_net>=1,<2", "helper==7"]\n'
    )
    monkeypatch.setattr(support, "ROOT", tmp_path)
    return {**RECORD, "versions": {**RECORD["versions"], "some-net": "2.0 1.2 1.1 1.0", "helper": "7"}}


def test_an_adapter_that_does_not_go_with_the_others_has_its_own_environment(with_another: dict[str, Any]) -> None:
    written = support.with_matrix(TOX, with_another)
    parsed = configparser.RawConfigParser()
    parsed.read_string(written)
    assert parsed["tox"]["env_list"] == "{[matrix]default}"
    assert "another-newest" in parsed["matrix"]["default"].split(", ")
    assert "-e {tox_root}{/}adapters{/}another" in parsed["matrix"]["apart"].split("\n")
    section = parsed["testenv:another-{oldest,between1,newest}"]
    assert section["labels"] == "matrix"
    deps = section["deps"].split("\n")
    assert {"oldest: Some_net==1.0", "between1: Some_net==1.1", "newest: Some_net==1.2", "newest: helper==7"} < {*deps}
    assert [dep for dep in deps if "tox_root" in dep] == [
        "-e {tox_root}[test]",
        "-e {tox_root}{/}adapters{/}another[upstream]",
    ], "other adapters may need other versions"
    assert "| `another-newest` | Some_net 1.2, helper 7 | >=3.11 | yes |  | not run |" in support.page(
        written, with_another
    )


def test_an_adapter_without_upstream_or_with_one_that_pip_cannot_install(with_another: dict[str, Any]) -> None:
    another = support.ROOT / "adapters" / "another" / "pyproject.toml"
    about = another.read_text(encoding="utf-8")
    by_hand = about + '[tool.ace-matrix]\nby-hand = "see there"\n'
    for text, row in ((about.partition("[project.opt")[0], None), (by_hand, " | no environment: see there |")):
        another.write_text(text, encoding="utf-8")
        written = support.with_matrix(TOX, with_another)
        assert "another-" not in written
        assert "    -e {tox_root}{/}adapters{/}another\n" in written, "`py` installs it without its upstream"
        rows = [line for line in support.page(written, with_another).splitlines() if "another" in line]
        assert rows == ([f"| another | Some_net 1.2, helper 7 | >=3.11 |  | {row}"] if row else [])


def test_an_adapter_that_waits_until_it_is_asked_for(with_another: dict[str, Any]) -> None:
    another = support.ROOT / "adapters" / "another" / "pyproject.toml"
    another.write_text(another.read_text(encoding="utf-8") + "[tool.ace-matrix]\ndefault = false\n", encoding="utf-8")
    written = support.with_matrix(TOX, with_another)
    parsed = configparser.RawConfigParser()
    parsed.read_string(written)
    assert "another-newest" not in parsed["matrix"]["default"]
    assert parsed["testenv:another-{oldest,between1,newest}"]["labels"] == "matrix"
    assert "| `another-newest` | Some_net 1.2, helper 7 | >=3.11 |  |  | not run |" in support.page(
        written, with_another
    )


def test_the_page_shows_how_runs_ended(with_another: dict[str, Any]) -> None:
    def row(**about: Any) -> str:
        run = {
            "versions": {"Some_net": "1.2", "helper": "7"},
            "date": "2026-01-02",
            "ran": True,
            "passed": 3,
            "failed": [],
            "skipped": 0,
            "python": "3.11.7",
            "torch": "2.13.0",
        }
        page = support.page(TOX, {**with_another, "runs": {"another-newest": {**run, **about}}})
        return next(line for line in page.splitlines() if "another-newest" in line).split("| yes | ")[1]

    assert row() == "2026-01-02 | 3 passed (Python 3.11.7, torch 2.13.0) |"
    assert row(failed=["test_a"], skipped=2).startswith("2026-01-02 | 3 passed, 1 failed: test_a, 2 skipped (")
    assert row(ran=False) == "2026-01-02 | could not be installed or run |"
    assert row(versions={"Some_net": "1.1", "helper": "7"}) == " | not run |", "the recorded run had other versions"


def test_what_the_whole_suite_has_is_not_called_untested(with_another: dict[str, Any]) -> None:
    rows = support.page(TOX, {**with_another, "runs": {}}).splitlines()
    newest = next(row for row in rows if "`schnet-newest`" in row)
    assert newest.endswith("| in `py` |  | part of every `tox run` |")
    assert next(row for row in rows if "`schnet-oldest`" in row).endswith("| not run |")
