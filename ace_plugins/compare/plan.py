"""Plans a comparison: lists the script's files, checks runs, seeds and metrics, and manages the folder of results.

A trial is one run with one seed. Each trial gets a new folder with a copy of the code, so that trials cannot overwrite
each other's files. Large files are linked instead of copied, except checkpoints and logs, which scripts may overwrite.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import statistics
import subprocess
from collections.abc import Sequence
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

LARGE = 2**20  # size in bytes from which a file counts as data
WRITTEN = (".pt", ".pth", ".ckpt", ".t7", ".model", ".tar", ".log")  # types that are never linked
SKIPPED = frozenset({".git", ".hg", ".svn", ".ace", ".tox", ".venv", "venv", "__pycache__", "node_modules"})
DESCRIPTION = "comparison.json"  # file in folders of results
LEFT_OUT = {DESCRIPTION, "CACHEDIR.TAG"}  # folders below the root that have one of these files are not copied
_RUN = re.compile(r"-[0-9a-f]{6}$")  # end of the name of a run's folder in a folder of results
SEED = "{seed}"
FOLDER = Path(".ace/compare")
RESULT, LOG = "result.json", "log.txt"


@dataclass
class Contents:
    """Files that each trial gets, as paths relative to ``root``."""

    root: Path
    copied: list[str] = field(default_factory=list)
    linked: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, root: Path) -> Contents:
        """List the files below a folder. Links to folders are followed, but no folder is visited twice."""
        contents, seen, results_here = cls(root), set(), (root / DESCRIPTION).is_file()
        for folder, folders, names in os.walk(root, followlinks=True):
            real, top = os.path.realpath(folder), folder == str(root)
            if real in seen or not (top or LEFT_OUT.isdisjoint(names)):
                folders.clear()
                continue
            seen.add(real)
            skipped = {name for name in folders if name in SKIPPED or (top and results_here and _RUN.search(name))}
            folders[:] = sorted(set(folders) - skipped)
            for path in sorted(Path(folder, name) for name in set(names) - LEFT_OUT):
                if path.is_file() and path.suffix != ".pyc":
                    linked = path.stat().st_size >= LARGE and path.suffix not in WRITTEN
                    (contents.linked if linked else contents.copied).append(path.relative_to(root).as_posix())
        return contents

    def data_state(self) -> list[tuple[str, int, int]]:
        """Return name, size and modification time of every linked file."""
        return [(name, (stat := os.stat(self.root / name)).st_size, stat.st_mtime_ns) for name in self.linked]

    def lay_out(self, target: Path) -> None:
        """Create the folder of a trial, with copies of the code and links to the data."""
        for name in (*self.copied, *self.linked):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
        for name in self.copied:
            shutil.copy2(self.root / name, target / name)
        for name in self.linked:
            (target / name).symlink_to((self.root / name).resolve())


def _list_tracked(root: Path) -> set[str] | None:
    """Return the files that git tracks in a folder; None if there are none or git is not installed."""
    try:
        done = subprocess.run(["git", "-C", str(root), "ls-files", "-z"], capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return set(os.fsdecode(done.stdout).split("\0")) - {""} or None


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
    below: str = "."  # working directory of the command, relative to the root of the contents
    script: Script = field(default_factory=Script)  # the adapter's description of the script

    @property
    def trials(self) -> list[Trial]:
        """All trials, ordered by seed: an interrupted comparison then has every run for the first seeds."""
        return [Trial(run, seed) for seed in self.seeds for run in self.runs]

    def command(self, trial: Trial) -> list[str]:
        """Return the script's command, with the trial's seed if the command takes a seed."""
        words = [word.replace(SEED, str(trial.seed)) for word in self.words]
        if self.script.seed and words == [*self.words]:
            words += [self.script.seed, str(trial.seed)]
        return words

    def seed_shift(self, trial: Trial) -> int | None:
        """Return the number to add to every seed that the script sets; None if the command contains the seed.

        Seed 1 leaves the script's seeds unchanged.
        """
        return trial.seed - 1 if self.command(trial) == [*self.words] else None

    def fingerprint(self) -> str:
        """Hash the command, the content of the copied files, and sizes and modification times of the linked files.

        Runs and seeds are not hashed, so that they can be added later. In a git clone, untracked files other than
        ``.py`` and ``.toml`` are ignored, because earlier runs may have written them.
        """
        parts = [self.adapter, self.words, self.below, self.contents.data_state()]
        digest = hashlib.sha256(json.dumps(parts).encode())
        tracked = _list_tracked(self.contents.root)
        for name in self.contents.copied:
            if tracked is None or name in tracked or name.endswith((".py", ".toml")):
                digest.update(name.encode() + b"\0" + (self.contents.root / name).read_bytes() + b"\0")
        return digest.hexdigest()[:10]


@dataclass(frozen=True)
class TrialResult:
    """Outcome of a trial that ended successfully."""

    run: str
    seed: int
    metrics: dict[str, float]
    curves: dict[str, list[list[float]]] = field(default_factory=dict)
    """Mapping from each metric to its evaluations, each as [seconds since the start, value]."""
    seconds: float = 0.0  # duration of the trial in seconds
    error: float | None = None  # last measured relative equivariance error of the deployed model

    @property
    def seconds_per_evaluation(self) -> float | None:
        """Median number of seconds between two evaluations, or None with fewer than three evaluations."""
        times = [point[0] for point in max(self.curves.values(), key=len, default=[])]
        gaps = [after - before for before, after in pairwise(times)]
        return statistics.median(gaps) if len(gaps) > 1 else None


class Store:
    """Reads and writes the result folder of one comparison."""

    def __init__(self, comparison: Comparison, folder: str | os.PathLike[str] | None = None) -> None:
        self.comparison = comparison
        self.folder = Path(folder or FOLDER / f"{comparison.adapter}-{comparison.fingerprint()}").absolute()

    def trial_folder(self, trial: Trial) -> Path:
        """Return the folder of a trial. Its name has a hash of the settings, because a run's name may be reused."""
        settings = json.dumps(self.comparison.runs[trial.run], sort_keys=True, default=str)
        key = hashlib.sha256(settings.encode()).hexdigest()[:6]
        return self.folder / f"{trial.run}-{key}" / f"seed-{trial.seed}"

    def load(self) -> dict[Trial, TrialResult]:
        """Return the results of the finished trials. Results that lack one of the metrics are left out."""
        results, names = {}, {metric.name for metric in self.comparison.metrics}
        for trial in self.comparison.trials:
            with contextlib.suppress(OSError, ValueError, TypeError):
                result = TrialResult(**json.loads((self.trial_folder(trial) / RESULT).read_text(encoding="utf-8")))
                if names <= result.metrics.keys():
                    results[trial] = result
        return results

    def save(self, trial: Trial, result: TrialResult) -> None:
        publish(self.trial_folder(trial) / RESULT, json.dumps(vars(result), indent=1).encode())

    def describe(self, threads: int) -> int:
        """Write the description of the comparison, and return the number of threads of each trial.

        Later calls return the number of the first call, because the number of threads affects the rounding of sums.
        """
        described: dict[str, Any] = {"threads": threads}
        with contextlib.suppress(OSError, ValueError):
            described = json.loads((self.folder / DESCRIPTION).read_text(encoding="utf-8"))
        described |= {
            "adapter": self.comparison.adapter,
            "command": list(self.comparison.words),
            "runs": {name: dict(settings) for name, settings in self.comparison.runs.items()},
            "seeds": list(self.comparison.seeds),
            "metrics": [{"name": metric.name, "higher": metric.higher} for metric in self.comparison.metrics],
        }
        self.folder.mkdir(parents=True, exist_ok=True)
        publish(self.folder / DESCRIPTION, json.dumps(described, indent=1).encode())
        return int(described["threads"])


def plan_comparison(experiment: Experiment) -> Comparison:
    """List the files of the script, and check everything that can be checked before training."""
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
        add = "add one, as in --metric 'test=Test MAE: {number}'"
        raise AceError(f"adapter {plugin.name!r} has no metrics for {words[0]}: {add}")
    names = [metric.name for metric in metrics]
    if len(set(names)) < len(names):
        raise AceError(f"metrics {', '.join(names)}: expected different names")
    for metric in metrics:
        compile_pattern(metric, metric.pattern)
        compile_pattern(metric, metric.curve or metric.pattern)
    fields = vars(experiment) | {"words": words, "metrics": metrics}
    return Comparison(**fields, contents=Contents.of(root), below=below, script=script)


def _find_root(plugin: Plugin, words: Sequence[str]) -> tuple[Path, str]:
    """Return the folder to copy (the script's checkout or the current folder) and the working directory in it."""
    here = Path.cwd()
    name = next((word for word in words if word.endswith(".py")), None)
    script = (here / name).resolve() if name else None
    if script is not None and not script.is_file():
        raise AceError(f"no script {name!r} in {here}: give its path relative to this folder")
    root = find_checkout(plugin, words) or here
    if script and root not in script.parents:
        raise AceError(f"{name} is not in {root}: expected a script below the current folder")
    if root != here and root not in here.parents:
        raise AceError(f"{here} is outside the checkout {root}: call the command from inside the checkout")
    return root, os.path.relpath(here, root)
