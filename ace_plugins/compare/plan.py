"""Plan a comparison: the script's files, the runs with their settings, the seeds, the metrics and the result folder.

Each trial runs in a fresh folder with a copy of the code, so that scripts cannot overwrite each other's files. Large
files are linked instead of copied, except types that scripts tend to write again, such as checkpoints.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from ..contract.upstreams import Script
from ..errors import AceError
from ..output import publish
from ..plugins.plugin import Plugin
from ..plugins.registry import registry
from ..run.launch import find_checkout
from .experiment import Experiment, compile_pattern

LARGE = 2**20
"""Smallest size in bytes of a file that counts as data and is linked instead of copied."""
WRITTEN = (".pt", ".pth", ".ckpt", ".t7", ".model", ".tar", ".log")
"""File types that are copied whatever their size, because scripts tend to write such files again."""
SKIPPED = frozenset({".git", ".hg", ".svn", ".ace", ".tox", ".venv", "venv", "__pycache__", "node_modules"})
DESCRIPTION = "comparison.json"
"""File that describes a comparison. Folders that contain it hold results and are not copied."""
SEED = "{seed}"
FOLDER = Path(".ace/compare")
RESULT, LOG = "result.json", "log.txt"


@dataclass
class Contents:
    """Files that each trial gets, as paths relative to a root."""

    root: Path
    copied: list[str] = field(default_factory=list)
    linked: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, root: Path) -> Contents:
        """List the files below a folder."""
        contents = cls(root)
        for path in _walk(root):
            linked = path.stat().st_size >= LARGE and path.suffix not in WRITTEN
            (contents.linked if linked else contents.copied).append(path.relative_to(root).as_posix())
        return contents

    def fingerprint(self) -> str:
        """Hash the content of the copied files, and the sizes and modification times of the linked files.

        Copied files in a git clone are left out if they are neither tracked nor ``.py`` or ``.toml`` files: they may be
        output of earlier runs.
        """
        digest = hashlib.sha256()
        tracked = _list_tracked(self.root)
        for name in sorted(n for n in self.copied if tracked is None or n in tracked or n.endswith((".py", ".toml"))):
            digest.update(name.encode() + b"\0" + (self.root / name).read_bytes() + b"\0")
        digest.update(repr(self.data_state()).encode())
        return digest.hexdigest()

    def data_state(self) -> list[tuple[str, int, int]]:
        """Return name, size and modification time of every linked file."""
        stats = [(name, os.stat(self.root / name)) for name in sorted(self.linked)]
        return [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]

    def lay_out(self, target: Path) -> None:
        """Create the folder of a run, with copies of the code and links to the data."""
        try:
            for name in (*self.copied, *self.linked):
                (target / name).parent.mkdir(parents=True, exist_ok=True)
            for name in self.copied:
                shutil.copy2(self.root / name, target / name)
            for name in self.linked:
                (target / name).symlink_to((self.root / name).resolve())
        except OSError as error:
            shutil.rmtree(target, ignore_errors=True)
            why = error.strerror or error
            raise AceError(
                f"{self.root} cannot be copied to {target}: {why}; choose another folder with --out"
            ) from None


def _list_tracked(root: Path) -> set[str] | None:
    """Return the files that git tracks in this folder, or None if it is no git clone or git cannot be run."""
    if not (root / ".git").exists():
        return None
    try:
        done = subprocess.run(["git", "-C", str(root), "ls-files", "-z"], capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return set(os.fsdecode(done.stdout).split("\0"))


def _walk(root: Path) -> Iterator[Path]:
    """Yield all files below a folder. Links to folders are followed, but no folder is visited twice."""
    seen: set[str] = set()
    for folder, folders, names in os.walk(root, followlinks=True):
        real = os.path.realpath(folder)
        if real in seen or DESCRIPTION in names:
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if name not in SKIPPED)
        for name in sorted(names):
            path = Path(folder, name)
            if path.is_file() and not name.endswith(".pyc"):
                yield path


@dataclass(frozen=True)
class Trial:
    """One run with one seed."""

    run: str
    seed: int

    def __str__(self) -> str:
        return f"{self.run} seed {self.seed}"


@dataclass(frozen=True)
class Comparison(Experiment):
    """An experiment that was checked and can be run."""

    contents: Contents = field(default_factory=lambda: Contents(Path()))
    below: str = "."
    """Working directory of the command, relative to the root of the contents."""
    script: Script = field(default_factory=Script)
    """The adapter's description of the script."""

    @property
    def trials(self) -> list[Trial]:
        """All trials, ordered by seed, so that an interrupted comparison has all runs of its first seeds."""
        return [Trial(run, seed) for seed in self.seeds for run in self.runs]

    def command(self, trial: Trial) -> list[str]:
        """Return the script's command, with the trial's seed if the command takes a seed."""
        words = [word.replace(SEED, str(trial.seed)) for word in self.words]
        if self.script.seed and not self._has_seed:
            words += [self.script.seed, str(trial.seed)]
        return words

    @property
    def _has_seed(self) -> bool:
        return any(SEED in word for word in self.words)

    def seed_shift(self, trial: Trial) -> int | None:
        """Return the number to add to every seed the script sets, or None if the command contains the seed.

        Seed 1 leaves the script's own seeds unchanged.
        """
        return None if self._has_seed or self.script.seed else trial.seed - 1

    def fingerprint(self) -> str:
        """Hash the script and its command. The hash ignores runs and seeds, so that these can be added later."""
        parts = [self.adapter, list(self.words), self.below, self.contents.fingerprint()]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:10]

    def settings_key(self, trial: Trial) -> str:
        """Hash a run's settings, so that results are not reused for a run with the same name but other settings."""
        settings = json.dumps(self.runs[trial.run], sort_keys=True, default=str)
        return hashlib.sha256(settings.encode()).hexdigest()[:6]


@dataclass(frozen=True)
class TrialResult:
    """Outcome of a trial that ended successfully."""

    run: str
    seed: int
    metrics: dict[str, float]
    curves: dict[str, list[list[float]]] = field(default_factory=dict)
    """Mapping from each metric to its evaluations, each as [seconds since the start, value]."""
    seconds: float = 0.0
    """Duration of the trial in seconds."""
    error: float | None = None
    """Last measured relative equivariance error of the deployed model."""

    @property
    def seconds_per_evaluation(self) -> float | None:
        """Median number of seconds between two evaluations, or None with fewer than three evaluations."""
        times = [point[0] for point in max(self.curves.values(), key=len, default=[])]
        gaps = sorted(after - before for before, after in pairwise(times))
        return gaps[len(gaps) // 2] if len(gaps) > 1 else None


class Store:
    """Reads and writes the result folder of one comparison."""

    def __init__(self, comparison: Comparison, folder: str | os.PathLike[str] | None = None) -> None:
        self.comparison = comparison
        self.folder = Path(folder or FOLDER / f"{comparison.adapter}-{comparison.fingerprint()}").absolute()

    def trial_folder(self, trial: Trial) -> Path:
        return self.folder / f"{trial.run}-{self.comparison.settings_key(trial)}" / f"seed-{trial.seed}"

    def load(self) -> dict[Trial, TrialResult]:
        """Return the results of all finished trials."""
        loaded = {trial: self._load(trial) for trial in self.comparison.trials}
        return {trial: result for trial, result in loaded.items() if result is not None}

    def _load(self, trial: Trial) -> TrialResult | None:
        try:
            result = TrialResult(**json.loads((self.trial_folder(trial) / RESULT).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None
        return result if {metric.name for metric in self.comparison.metrics} <= result.metrics.keys() else None

    def save(self, trial: Trial, result: TrialResult) -> None:
        publish(self.trial_folder(trial) / RESULT, _encode(vars(result)))

    def describe(self, threads: int) -> int:
        """Write the description of the comparison.

        Returns the number of threads per trial. It stays that of the first call, since it affects floating-point sums.
        """
        path = self.folder / DESCRIPTION
        try:
            described: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            described = {"threads": threads}
        described |= {
            "adapter": self.comparison.adapter,
            "command": list(self.comparison.words),
            "runs": {name: dict(settings) for name, settings in self.comparison.runs.items()},
            "seeds": list(self.comparison.seeds),
            "metrics": [{"name": metric.name, "higher": metric.higher} for metric in self.comparison.metrics],
        }
        self.folder.mkdir(parents=True, exist_ok=True)
        publish(path, _encode(described))
        return int(described["threads"])


def _encode(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, indent=1) + "\n").encode()


def plan_comparison(experiment: Experiment) -> Comparison:
    """Check everything that can be checked before training, and list the files of the script."""
    plugin, words = registry().adapter(experiment.adapter), experiment.words
    if not words:
        raise AceError("no script given: expected ace-patch compare ADAPTER -- script.py args...")
    for name, settings in experiment.runs.items():
        try:
            plugin.resolve(options=settings)
        except AceError as error:
            raise AceError(f"run {name!r}: {error}") from None
    root, below = _find_root(plugin, words)
    # An absolute path would run the original script instead of the trial's copy.
    words = tuple(os.path.relpath(w) if os.path.isabs(w) and root in Path(w).parents else w for w in words)
    script: Script = (plugin.call("ace_script", argv=words) if plugin.has("ace_script") else None) or Script()
    metrics = experiment.metrics or script.metrics
    if not metrics:
        raise AceError(
            f"adapter {plugin.name!r} has no metrics for {words[0]}: add one, as in "
            "--metric 'test=Test MAE: {number}'"
        )
    names = [metric.name for metric in metrics]
    if len(set(names)) < len(names):
        raise AceError(f"metrics {', '.join(names)}: expected different names")
    for metric in metrics:
        for pattern in filter(None, (metric.pattern, metric.curve)):
            compile_pattern(pattern, metric.name)
    fields = vars(experiment) | {"words": words, "metrics": metrics}
    return Comparison(**fields, contents=Contents.of(root), below=below, script=script)


def _find_root(plugin: Plugin, words: Sequence[str]) -> tuple[Path, str]:
    """Return the folder to copy (the script's checkout or the current folder) and the working directory in it."""
    here = Path.cwd()
    name = next((word for word in words if word.endswith(".py")), None)
    script = (here / name).resolve() if name else None
    if script is not None and not script.is_file():
        raise AceError(f"no script {name!r} in {here}: give the command as you would type it in that folder")
    root = find_checkout(plugin, words) or here
    if script is not None and root not in script.parents:
        raise AceError(f"{name} is not in {root}: expected a script below the current folder")
    if root != here and root not in here.parents:
        raise AceError(f"{here} is outside the checkout {root}: call the command from inside the checkout")
    return root, os.path.relpath(here, root)
