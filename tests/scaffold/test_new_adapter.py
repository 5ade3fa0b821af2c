"""ace-patch new-adapter: what it writes installs and passes its own tests untouched, and it spoils nothing."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from clones import python

import ace_plugins
from ace_plugins.cli.main import cli
from ace_plugins.plugins.registry import registry
from ace_plugins.scaffold import SUFFIX, TEMPLATES

ROOT = Path(__file__).parents[2]
BUILT = {"PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


def call(*words: str) -> Any:
    return CliRunner().invoke(cli, ["new-adapter", *words], catch_exceptions=False)


def test_it_is_a_whole_package(tmp_path: Path) -> None:
    told = call("my-net", "--into", str(tmp_path), "--json")
    assert told.exit_code == 0, told.output
    made = json.loads(told.output)
    folder = tmp_path / "ace-my-net"
    assert made["folder"] == str(folder)
    assert set(made["files"]) == {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert {"pyproject.toml", "README.md", "tox.ini", "ace_my_net/plugin.py", "tests/test_adapter.py"} <= {
        *made["files"]
    }
    text = "".join(path.read_text() for path in folder.rglob("*") if path.is_file())
    assert "$" not in text, "every word was filled in"
    major, minor, _ = ace_plugins.__version__.split(".")
    assert f"ace-plugins>={major}.{minor},<{major}.{int(minor) + 1}" in text
    assert 'my_net = "ace_my_net.plugin"' in text


def test_it_prints_the_next_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    told = call("mynet")
    assert told.exit_code == 0
    assert "cd ace-mynet && pip install -e '.[test]' && pytest" in told.output


@pytest.mark.parametrize("name", ["MyNet", "1net", "my net", "my--net", "../net", "", "-x-", "netz\u00e9", "a" + "/b"])
def test_bad_names_are_refused_in_one_line(name: str, tmp_path: Path) -> None:
    told = call("--into", str(tmp_path), "--", name)
    assert told.exit_code == 2
    assert told.output.startswith(f"ace-patch: invalid name {name!r}: expected")
    assert told.output.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_names_that_are_taken_are_refused(tmp_path: Path) -> None:
    assert registry().plugins
    for name, why in {
        "two-outputs": "'two-outputs' is taken: (registered) has an adapter",
        "list": "'list' is taken: 'ace-patch list' is a command",
        "new-adapter": "'new-adapter' is taken",
        "ace-mynet": "did you mean 'mynet'?",
    }.items():
        told = call(name, "--into", str(tmp_path))
        assert told.exit_code == 2
        assert why in told.output
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "ace-mynet").mkdir()
    (tmp_path / "ace-mynet" / "mine.txt").write_text("mine")
    told = call("mynet", "--into", str(tmp_path))
    assert told.exit_code == 2
    assert "ace-mynet cannot be created: File exists" in told.output
    assert [path.name for path in (tmp_path / "ace-mynet").iterdir()] == ["mine.txt"]
    told = call("mynet", "--into", str(tmp_path / "nowhere"))
    assert told.exit_code == 2
    assert "No such file or directory" in told.output


def test_it_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = Path.write_text

    def full(path: Path, text: str, **options: Any) -> int:
        if path.name == "tox.ini":
            raise OSError(28, "No space left on device")
        return write(path, text, **options)

    monkeypatch.setattr(Path, "write_text", full)
    told = call("mynet", "--into", str(tmp_path))
    assert told.exit_code == 2
    assert (
        told.output
        == f"ace-patch: {tmp_path}/ace-mynet cannot be written: No space left on device; fix this and try again\n"
    )
    assert list(tmp_path.iterdir()) == []


def test_it_installs_and_passes_its_own_tests_untouched(tmp_path: Path) -> None:
    pytest.importorskip("hatchling", reason="needs hatchling: pip install hatchling")
    assert call("mynet", "--into", str(tmp_path)).exit_code == 0
    site, folder = tmp_path / "site", tmp_path / "ace-mynet"
    install = ["-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--target", str(site), str(folder)]
    done = python(tmp_path, *install, **BUILT)
    assert done.returncode == 0, done.stderr
    tests = python(folder, "-m", "pytest", "-q", "-W", "error", PYTHONPATH=str(site))
    assert tests.returncode == 0, tests.stdout
    assert "26 passed" in tests.stdout


def test_the_wheel_has_the_templates(tmp_path: Path) -> None:
    pytest.importorskip("hatchling", reason="needs hatchling: pip install hatchling")
    wheel = ["-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(tmp_path), str(ROOT)]
    done = python(tmp_path, *wheel, **BUILT)
    assert done.returncode == 0, done.stderr
    (built,) = tmp_path.glob("*.whl")
    names = {name for name in zipfile.ZipFile(built).namelist() if name.endswith(SUFFIX)}
    assert names == {
        f"ace_plugins/scaffold/templates/{p.relative_to(TEMPLATES)}" for p in TEMPLATES.rglob(f"*{SUFFIX}")
    }
    assert len(names) == 9
