"""Writes docs/support.md and the matrix in tox.ini from the adapters' own metadata.

    python docs/write_support.py                  from the versions in docs/support.json, without a network
    python docs/write_support.py --ask            from the versions that the package index has now, which are kept there
    python docs/write_support.py --run ENV ...    run these environments of the matrix with tox, and keep how they went

The extra ``upstream`` of an adapter says what it patches. Of the versions that it allows the lowest and the highest are
tested, and between them the highest of each major version; where there is none, two that lie between.
"""

from __future__ import annotations

import argparse
import configparser
import datetime
import json
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomlkit
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "docs" / "support.json"
PAGE = ROOT / "docs" / "support.md"
TOX = ROOT / "tox.ini"
TOX_COMMAND = (sys.executable, "-m", "tox")
BEGIN, END = "# Written by docs/write_support.py: begin", "# Written by docs/write_support.py: end"
HEAD = """\
# Versions

Written by `python docs/write_support.py` from the adapters' own metadata and from [support.json](support.json); a test
checks that it is up to date. `tox run -m matrix` runs all of it, `tox run -e NAME` one environment.

Each adapter is tested in an environment of its own, on the lowest and the highest version of what it patches, and on
some between. `py` is the environment of the whole suite, which has the newest of everything that can be installed
together; a plain `tox run` runs that, and the environments marked so.

| environment | upstream | Python | `tox run` | last run | |
|---|---|---|---|---|---|
"""


@dataclass(frozen=True)
class Environment:
    """One adapter on one choice of versions."""

    adapter: str
    factor: str
    versions: Mapping[str, str]

    @property
    def name(self) -> str:
        return f"{self.adapter}-{self.factor}"


@dataclass(frozen=True)
class Adapter:
    """What an adapter's metadata say."""

    name: str
    distribution: str
    python: str
    upstream: tuple[Requirement, ...]
    by_hand: str = ""
    """Why pip cannot install what it patches by name, where that is so: ``by-hand`` in ``tool.ace-matrix``."""
    by_default: bool = True
    """Whether a plain ``tox run`` tests it, if it has an environment of its own: ``default`` in ``tool.ace-matrix``."""

    @classmethod
    def read(cls, folder: Path) -> Adapter:
        read: Any = tomlkit.parse((folder / "pyproject.toml").read_text(encoding="utf-8")).unwrap()
        project = read["project"]
        extra = project.get("optional-dependencies", {}).get("upstream", ())
        requirements = tuple(map(Requirement, extra))
        told = read.get("tool", {}).get("ace-matrix", {})
        how = told.get("by-hand", ""), told.get("default", True)
        return cls(folder.name, project["name"], project["requires-python"], requirements, *how)

    def environments(self, known: Mapping[str, str]) -> list[Environment]:
        """From the lowest versions to the highest."""
        chosen = {r.name: picked(r, known) for r in self.upstream}
        count = max(map(len, chosen.values()), default=0)
        factors = ["oldest", *(f"between{number}" for number in range(1, count - 1)), "newest"]
        return [
            Environment(self.name, factor, {name: _at(place, count, each) for name, each in chosen.items()})
            for place, factor in enumerate(factors[-count:] if count else ())
            if factor == "newest" or not self.by_hand
        ]


def _at(place: int, count: int, versions: Sequence[str]) -> str:
    """Of fewer versions than environments the first and the last still come first and last."""
    return versions[round(place * (len(versions) - 1) / max(count - 1, 1))]


def picked(requirement: Requirement, known: Mapping[str, str]) -> list[str]:
    """The versions to test, the lowest first. Where the metadata tell no lowest one, the highest alone."""
    if canonicalize_name(requirement.name) not in known:
        raise SystemExit(f"{RECORD.name} has no versions of {requirement.name}: python docs/write_support.py --ask")
    found = sorted(map(Version, requirement.specifier.filter(known[canonicalize_name(requirement.name)].split())))
    if not found:
        raise SystemExit(f"no version of {requirement} is known: python docs/write_support.py --ask")
    if all(each.operator in ("<", "<=", "!=") for each in requirement.specifier):
        return [str(found[-1])]
    ends = {found[0], found[-1]}
    majors, minors = (sorted({v.release[:n]: v for v in found}.values()) for n in (1, 2))
    between = [version for version in majors if version not in ends]
    for candidates in (minors, found):
        left = [version for version in candidates if version not in ends]
        if not between:
            between = left if len(left) <= 2 else [left[len(left) // 4], left[-1 - len(left) // 4]]
    return list(map(str, sorted({*ends, *between})))


def adapters() -> list[Adapter]:
    return [Adapter.read(path.parent) for path in sorted(ROOT.glob("adapters/*/pyproject.toml"))]


def together(tox: str, extra: str = "upstream") -> set[str]:
    """The adapters that the environment of the whole suite names, with what they patch; without an extra, all."""
    parsed = configparser.RawConfigParser()
    parsed.read_string(tox)
    end = rf"\[[^]]*{extra}" if extra else r"\b"
    return set(re.findall(rf"adapters\{{/}}(\w+){end}", parsed["testenv"]["deps"]))


def matrix(tox: str, record: Mapping[str, Any]) -> str:
    """The part of tox.ini between the two marks."""
    inside, named = together(tox), together(tox, "")
    own = [adapter for adapter in adapters() if adapter.upstream and not adapter.by_hand]
    alone = [f"{adapter.name}-newest" for adapter in own if adapter.name not in inside and adapter.by_default]
    lines = [
        "[matrix]",
        "# What a plain `tox run` runs. The upstream of some adapters does not go with the others': these have",
        "# an environment of their own on its newest version, and are everywhere else without it. Those that say",
        "# so in their metadata wait until they are asked for.",
        f"default = {', '.join(['lint', 'docs', 'py', *alone])}",
        "apart =",
        *(f"    -e {{tox_root}}{{/}}adapters{{/}}{a.name}" for a in adapters() if a.name not in named),
    ]
    for adapter in own:
        made = adapter.environments(record["versions"])
        lines += [
            "",
            f"[testenv:{adapter.name}-{{{','.join(environment.factor for environment in made)}}}]",
            f"description = {adapter.distribution} on one choice of versions of what it patches",
            "labels = matrix",
            "deps =",
            "    -e {tox_root}[test]",
            f"    -e {{tox_root}}{{/}}adapters{{/}}{adapter.name}[upstream]",
            *(f"    {e.factor}: {name}=={version}" for e in made for name, version in e.versions.items()),
            f"commands = pytest -n auto tests{{/}}adapters{{/}}test_{adapter.name}.py {{posargs}}",
        ]
    return "\n".join(lines) + "\n"


def with_matrix(tox: str, record: Mapping[str, Any]) -> str:
    before, rest = tox.split(BEGIN + "\n")
    return f"{before}{BEGIN}\n{matrix(tox, record)}{END}\n{rest.split(END + chr(10))[1]}"


def page(tox: str, record: Mapping[str, Any]) -> str:
    inside, rows = together(tox), []
    for adapter in adapters():
        for environment in adapter.environments(record["versions"]):
            newest = environment.factor == "newest" and not adapter.by_hand
            alone = "yes" if adapter.by_default else ""
            where = ("in `py`" if adapter.name in inside else alone) if newest else ""
            versions = ", ".join(f"{name} {version}" for name, version in environment.versions.items())
            name = adapter.name if adapter.by_hand else f"`{environment.name}`"
            unless_run = "with the whole suite, at every `tox run`" if where == "in `py`" else "not run"
            if adapter.by_hand:
                unless_run = f"no environment: {adapter.by_hand}"
            told = _told(record["runs"].get(environment.name), environment.versions) or f" | {unless_run}"
            rows.append(f"| {name} | {versions} | {adapter.python} | {where} | {told} |")
    return HEAD + "\n".join(rows) + f"\n\nThe package index was asked for versions on {record['asked']}.\n"


def _told(run: Mapping[str, Any] | None, versions: Mapping[str, str]) -> str:
    """How the last run went; empty if there was none, or on other versions."""
    if run is None or run["versions"] != versions:
        return ""
    failed = f", {len(run['failed'])} failed: {', '.join(run['failed'])}" if run["failed"] else ""
    if not run["ran"]:
        return f"{run['date']} | could not be made or run"
    skipped = f", {run['skipped']} skipped" if run["skipped"] else ""
    on = f"Python {run['python']}, torch {run['torch']}"
    return f"{run['date']} | {run['passed']} passed{failed}{skipped} ({on})"


def ask(record: dict[str, Any]) -> None:
    """The versions that the package index has for this Python, the newest first."""
    record["asked"] = datetime.date.today().isoformat()
    wanted = {canonicalize_name(r.name) for adapter in adapters() for r in adapter.upstream}
    for name in sorted({*wanted, *record["versions"]}):
        command = [sys.executable, "-m", "pip", "index", "versions", name]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        line = re.search(r"^Available versions: (.*)$", told, re.MULTILINE)
        if line is None:
            raise SystemExit(f"{' '.join(command[2:])} told no versions:\n{told}")
        record["versions"][name] = line[1].replace(",", "")


def run(name: str, record: dict[str, Any]) -> None:
    """Run one environment of the matrix, and keep how that went."""
    made = {
        e.name: e for adapter in adapters() if not adapter.by_hand for e in adapter.environments(record["versions"])
    }
    if name not in made:
        raise SystemExit(f"environment {name!r}: expected one of {', '.join(made)}")
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.xml"
        subprocess.run([*TOX_COMMAND, "run", "-e", name, "--", f"--junitxml={results}"], cwd=ROOT)
        cases = list(ElementTree.parse(results).iter("testcase")) if results.exists() else []
    about = "import platform, torch; print(platform.python_version(), torch.__version__.partition('+')[0])"
    asked = [*TOX_COMMAND, "exec", "-q", "-e", name, "--", "python", "-c", about]
    found = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True).stdout.split() if cases else ["", ""]
    bad = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = [case for case in cases if case.find("skipped") is not None]
    record["runs"][name] = {
        "versions": dict(made[name].versions),
        "date": datetime.date.today().isoformat(),
        "ran": bool(cases),
        "passed": len(cases) - len(bad) - len(skipped),
        "failed": sorted(case.attrib["name"] for case in bad),
        "skipped": len(skipped),
        "python": found[0],
        "torch": found[1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ask", action="store_true", help="ask the package index which versions there are")
    parser.add_argument("--run", nargs="+", default=(), metavar="ENV", help="run these and keep how they went")
    options = parser.parse_args()
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    if options.ask:
        ask(record)
    for name in options.run:
        run(name, record)
    tox = TOX.read_text(encoding="utf-8")
    written = with_matrix(tox, record)
    RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    TOX.write_text(written, encoding="utf-8")
    PAGE.write_text(page(written, record), encoding="utf-8")


if __name__ == "__main__":
    main()
