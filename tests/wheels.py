"""Build the distributions of the host and all adapters, check them, and try the wheels in a fresh environment.

    python tests/wheels.py DIST

`tox run -e build` calls this. DIST is emptied first and holds all sdists and wheels afterwards. torch is installed as
constraints.txt pins it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROJECTS = [ROOT, *sorted(path.parent for path in ROOT.glob("adapters/*/pyproject.toml"))]
TRIED = ("c4", "schnet")
"""Adapters that `ace-patch doctor` is run for: their upstreams install quickly."""


def run(*command: str | Path, cwd: Path = ROOT, **environment: str) -> str:
    """Run a command and return its output, or exit with that output if it fails."""
    print("$", *(Path(word).name for word in command), flush=True)
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"{done.stdout}{done.stderr}\nexit code {done.returncode}")
    return done.stdout


def build(dist: Path) -> None:
    """Build the sdist and the wheel of every project into `dist`, and check their metadata."""
    shutil.rmtree(dist, ignore_errors=True)
    for project in PROJECTS:
        run(sys.executable, "-m", "build", "--no-isolation", "--outdir", dist, project)
    run(sys.executable, "-m", "twine", "check", "--strict", *sorted(dist.iterdir()))


def check_contents(dist: Path) -> None:
    """Check that every wheel holds all files of its package: modules, stubs, py.typed, style sheets, templates."""
    for project in PROJECTS:
        package = ROOT / "ace_plugins" if project == ROOT else project / f"ace_{project.name}"
        files = run("git", "ls-files", "--", package.name, cwd=project).splitlines()
        (wheel,) = dist.glob(f"{package.name}-*.whl")
        missing = set(files) - set(zipfile.ZipFile(wheel).namelist())
        if missing or f"{package.name}/py.typed" not in files:
            raise SystemExit(f"{wheel.name} lacks {sorted(missing) or 'py.typed'}")


def try_wheels(dist: Path, folder: Path) -> None:
    """Install the wheels into a virtual environment in `folder` and run commands there, away from this repository."""
    venv.create(folder / "venv", with_pip=True)
    python, command = folder / "venv" / "bin" / "python", folder / "venv" / "bin" / "ace-patch"
    wheels = [f"{wheel}[upstream]" if wheel.name.startswith("ace_schnet-") else wheel for wheel in dist.glob("*.whl")]
    run(python, "-m", "pip", "install", "--quiet", *wheels, PIP_CONSTRAINT=str(ROOT / "constraints.txt"))
    away = {"PYTHONPATH": "", "OMP_NUM_THREADS": "1"}
    imported = run(python, "-c", "import ace_plugins; print(ace_plugins.__file__)", cwd=folder, **away)
    if not imported.startswith(str(folder)):
        raise SystemExit(f"ace_plugins is imported from {imported.strip()} instead of {folder}")
    listed = run(command, "list", "--json", cwd=folder, **away)
    missing = {project.name for project in PROJECTS[1:]} - {plugin["name"] for plugin in json.loads(listed)}
    if missing:
        raise SystemExit(f"ace-patch list does not show {sorted(missing)}")
    for adapter in TRIED:
        print(run(command, "doctor", adapter, cwd=folder, **away).strip().splitlines()[-1])


if __name__ == "__main__":
    target = Path(sys.argv[1]).resolve()
    build(target)
    check_contents(target)
    with tempfile.TemporaryDirectory() as scratch:
        try_wheels(target, Path(scratch).resolve())
