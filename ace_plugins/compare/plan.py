"""Plans a comparison: lists the script's files, checks runs, seeds and metrics, and manages the folder of results.

A trial is one run with one seed. Each trial gets a new folder with a copy of the code, so that trials cannot overwrite
each other's files. Large files are linked instead of copied, except checkpoints and logs, which scripts may overwrite.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import re
import shutil
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from ..contract.upstreams import Script
from ..errors import AceError
from ..output import publish
from ..plugins.plugin import Plugin
from ..plugins.registry import registry
from ..report.page import PAGE
from ..report.record import find_versions
from ..report.trace import refuse_links
from ..run.launch import find_checkout
from .experiment import Experiment, compile_pattern, find_setting, list_points, set_option

try:
    import fcntl
except ImportError:  # Windows, where 'ace-patch run' does not work
    fcntl = None  # type: ignore[assignment]

LARGE = 2**20  # size in bytes from which a file counts as data
WRITTEN = (".pt", ".pth", ".ckpt", ".t7", ".model", ".tar", ".log")  # types that are never linked
SKIPPED = frozenset({".git", ".hg", ".svn", ".ace", ".tox", ".venv", "venv", "__pycache__", "node_modules"})
DESCRIPTION = "comparison.json"  # file in folders of results
CODE = "ace-code"  # folder in folders of results
LOCK = "compare.lock"
FICLONE = 0x40049409  # number of Linux's system call that clones a file
LEFT_OUT = {DESCRIPTION, LOCK, "CACHEDIR.TAG"}  # folders below the root that have one of these files are not copied
SEED, NOT_IN_NAMES = "{seed}", r"[^\w.+=-]+"
VALIDATION = "validation"  # the first metric whose name starts with this word picks a point of the grid
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
        contents, seen, own = cls(root), set(), set(LEFT_OUT)
        if (root / DESCRIPTION).is_file():  # results in the root, as with --out .
            own |= {PAGE, CODE, *(path.parent.name for path in root.glob("*-??????/seed-*"))}
        for folder, folders, names in os.walk(root, followlinks=True):
            real = os.path.realpath(folder)
            if real in seen or (folder != str(root) and not LEFT_OUT.isdisjoint(names)):
                folders.clear()
                continue
            seen.add(real)
            folders[:] = sorted(set(folders) - SKIPPED - own)
            for path in sorted(Path(folder, name) for name in set(names) - own):
                if path.is_file() and path.suffix != ".pyc" and not _is_output(stat := path.stat()):
                    linked = stat.st_size >= LARGE and path.suffix not in WRITTEN
                    (contents.linked if linked else contents.copied).append(path.relative_to(root).as_posix())
        return contents

    def data_state(self) -> list[tuple[str, int, int]]:
        """Return name, size and modification time of every linked file."""
        return [(name, (stat := os.stat(self.root / name)).st_size, stat.st_mtime_ns) for name in self.linked]

    def state(self) -> list[tuple[Any, ...]]:
        """Return name and content of every file but logs; of large files, name, size and modification time."""
        state = list[tuple[Any, ...]](self.data_state())
        for name in self.copied:
            stat = os.stat(path := self.root / name)
            if stat.st_size >= LARGE:
                state.append((name, stat.st_size, stat.st_mtime_ns))
            elif path.suffix != ".log":
                state.append((name, hashlib.sha256(path.read_bytes()).hexdigest()))
        return state

    def lay_out(self, target: Path) -> None:
        """Create the folder of a trial, with copies of the code and links to the data."""
        for name in (*self.copied, *self.linked):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
        for name in self.copied:
            shutil.copy2(self.root / name, target / name)
        for name in self.linked:
            link((self.root / name).resolve(), target / name)

    def check_data(self, before: Sequence[tuple[str, int, int]]) -> None:
        """Raise an AceError if a linked file has changed since ``before``, an earlier result of `data_state`."""
        for name, *expected in before:
            path = (self.root / name).resolve()
            if not path.is_file() or [path.stat().st_size, path.stat().st_mtime_ns] != expected:
                do = "restore it and let the script write another file, or move it away if no run needs it"
                raise AceError(f"stopped: {path}, which all runs read, was changed, probably by a run: {do}")


def _is_output(stat: os.stat_result) -> bool:
    """Return whether this process prints into a file, as in ``ace-patch compare ... > out.txt``."""
    with contextlib.suppress(OSError):  # a closed stream
        return any(os.path.samestat(stat, os.fstat(stream)) for stream in (1, 2))
    return False


def link(source: Path, target: Path) -> None:
    """Clone a file if the file system supports copy-on-write clones; otherwise link it."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            with source.open("rb") as original, target.open("xb") as clone:
                fcntl.ioctl(clone, FICLONE, original.fileno())
            shutil.copystat(source, target)
            return
        target.unlink(missing_ok=True)
    target.symlink_to(source)


@dataclass(frozen=True)
class Trial:
    """One run with one seed."""

    run: str
    seed: int

    def __str__(self) -> str:
        return f"{self.run} seed {self.seed}"


def find_arm(run: str) -> str:
    """Return the name of a run without its point of the grid: "auto" for "auto (lr=5e-4)"."""
    return run.partition(" (")[0]


@dataclass(frozen=True)
class Comparison(Experiment):
    """An experiment that was checked and can be run."""

    contents: Contents = field(default_factory=lambda: Contents(Path()))
    below: str = "."  # working directory of the command, relative to the root of the contents
    script: Script = field(default_factory=Script)  # the adapter's description of the script
    inputs: Mapping[str, str] = field(default_factory=dict)
    """Mapping from each kind of input that results depend on, such as "package versions", to a hash. Runs and seeds are
    not included, so that they can be added later."""

    @property
    def trials(self) -> list[Trial]:
        """All trials, ordered by seed: an interrupted comparison then has every run for the first seeds."""
        return [Trial(run, seed) for seed in self.seeds for run in self.runs]

    points: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    """Mapping from the points of the grid, such as "auto (lr=5e-4)", to settings of ACE and options of the script."""

    @property
    def search(self) -> Comparison | None:
        """The comparison that picks the best point of the grid for each run; None without a grid."""
        metrics = tuple(sorted(self.metrics, key=lambda metric: not metric.name.startswith(VALIDATION)))
        runs = {name: settings for name, (settings, _) in self.points.items()}
        return replace(self, runs=runs, seeds=self.seeds[:1], metrics=metrics) if runs else None

    def options(self, run: str) -> Mapping[str, str]:
        """Return the values that a run's point of the grid gives to options of the script."""
        return self.points[run][1] if run in self.points else {}

    def describe_grid(self) -> Iterator[str]:
        """Yield a line about each key of the grid: its values, and the option or setting that they change."""
        for key, values in self.grid.items():
            old, name = set_option(self.words, key, "")[1], find_setting(key, self.words)
            change = f"replaces {old} in the command" if old else f"--{key}=VALUE is added to the command"
            yield f"grid: {key} = {', '.join(values)} ({f'the setting {name} of ACE' if name else change})"

    def command(self, trial: Trial) -> list[str]:
        """Return the script's command, with the options of the grid, and with the seed if the command takes a seed."""
        words = [*self.words]
        for key, value in self.options(trial.run).items():
            words, _ = set_option(words, key, value)
        seed = [self.script.seed, str(trial.seed)] if self.script.seed and SEED not in str(words) else []
        return [*(word.replace(SEED, str(trial.seed)) for word in words), *seed]

    def seed_shift(self, trial: Trial) -> int | None:
        """Return the number to add to every seed that the script sets; None if the command contains the seed.

        Seed 1 leaves the script's seeds unchanged.
        """
        return None if self.script.seed or SEED in str(self.words) else trial.seed - 1


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
    made: str = ""  # date and time of the end
    notes: Sequence[str] = ()  # what the run did not do, such as landing in mode strict

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
        self.folder = Path(folder or FOLDER / f"{comparison.adapter}-{_hash(dict(comparison.inputs))}").absolute()

    def trial_folder(self, trial: Trial) -> Path:
        """Return the folder of a trial. Its name has a hash of everything that the result depends on."""
        settings, options = self.comparison.runs[trial.run], self.comparison.options(trial.run)
        key = _hash([settings, dict(self.comparison.inputs), *sorted(options.items())])[:6]
        return self.folder / f"{re.sub(NOT_IN_NAMES, '_', trial.run)}-{key}" / f"seed-{trial.seed}"

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Lock the folder for this process. The system removes the lock of a process that has ended."""
        refuse_links(self.folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / LOCK).open("a+", encoding="utf-8") as file:
            try:
                if fcntl is not None:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                do = "wait until it has ended, or choose another folder with --out"
                raise AceError(f"{self.folder} is in use by {file.read(200) or 'another process'}: {do}") from None
            except OSError:
                pass  # a file system without locks
            file.truncate(0)
            file.write(f"process {os.getpid()} on {platform.node()}, since {now()}")
            file.flush()
            yield

    def copy_code(self) -> Comparison:
        """Return the comparison with a copy of the user's files, which can then change while it runs."""
        contents, root = self.comparison.contents, self.folder / CODE
        if contents.root == root:
            return self.comparison
        shutil.rmtree(root, ignore_errors=True)
        with _copying():
            contents.lay_out(root)
        return replace(self.comparison, contents=replace(contents, root=root))

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

    def describe(self, threads: int) -> tuple[int, list[str]]:
        """Write the description of the comparison.

        Returns:
            The number of threads of each trial, and the kinds of inputs that changed since the last call. The number
            of threads is that of the first call, because it affects the rounding of sums.
        """
        changed = list[str]()
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            described = json.loads((self.folder / DESCRIPTION).read_text(encoding="utf-8"))
            threads, before = int(described["threads"]), described.get("inputs", {})
            changed = [kind for kind, value in self.comparison.inputs.items() if before.get(kind) != value]
        described = {
            "threads": threads,
            "inputs": dict(self.comparison.inputs),
            "adapter": self.comparison.adapter,
            "command": list(self.comparison.words),
            "runs": {name: dict(settings) for name, settings in self.comparison.runs.items()},
            "points": dict(self.comparison.points),
            "seeds": list(self.comparison.seeds),
            "metrics": [{"name": metric.name, "higher": metric.higher} for metric in self.comparison.metrics],
        }
        self.folder.mkdir(parents=True, exist_ok=True)
        publish(self.folder / DESCRIPTION, json.dumps(described, indent=1).encode())
        return threads, changed


def plan_comparison(experiment: Experiment) -> Comparison:
    """List the files of the script, and check everything that can be checked before training."""
    plugin, words = registry().adapter(experiment.adapter), experiment.words
    if not words:
        raise AceError("no script given: expected ace-patch compare ADAPTER -- script.py args...")
    root, below = _find_root(plugin, words)
    # An absolute path would run the original script instead of the trial's copy.
    words = tuple(os.path.relpath(w) if os.path.isabs(w) and root in Path(w).parents else w for w in words)
    script: Script = (plugin.call("ace_script", argv=words) if plugin.has("ace_script") else None) or Script()
    metrics = experiment.metrics or script.metrics
    if not metrics:
        add = "add one, as in --metric 'test=Test MAE: {number}'"
        raise AceError(f"adapter {plugin.name!r} has no metrics for {words[0]}: {add}")
    names, grid = [metric.name for metric in metrics], experiment.grid
    points = {name: point for run in experiment.runs.items() for name, point in list_points(grid, words, *run).items()}
    for name, (settings, options) in points.items():
        try:
            plugin.resolve(options=settings)
        except AceError as error:
            raise AceError(f"run {name!r}: {error}") from None
        if keys := [key for key in options if f"--{key}" == script.seed or SEED in set_option(words, key, "")[1]]:
            raise AceError(f"--grid {keys[0]}: this option is the seed; use --seeds")
    if grid and not any(name.startswith(VALIDATION) for name in names):
        give = "give all metrics, as in --metric 'test=Test MAE: {number}' --metric 'validation=Valid MAE: {number}'"
        raise AceError(f"--grid needs a metric whose name starts with {VALIDATION}, found {', '.join(names)}: {give}")
    if len(set(names)) < len(names):
        raise AceError(f"metrics {', '.join(names)}: expected different names")
    for metric in metrics:
        compile_pattern(metric, metric.pattern)
        compile_pattern(metric, metric.curve or metric.pattern)
    fields = vars(experiment) | {"words": words, "metrics": metrics}
    with _copying():
        contents = Contents.of(root)
        files = contents.state()
    inputs = {
        "command": _hash([plugin.name, words, below]),
        "code or data": _hash(files),
        "metrics": _hash([[metric.name, metric.pattern, metric.curve] for metric in metrics]),
        "package versions": _hash(find_versions(plugin.name)),
    }
    return Comparison(
        **fields, contents=contents, below=below, script=script, inputs=inputs, points=points if grid else {}
    )


@contextlib.contextmanager
def _copying() -> Iterator[None]:
    """Report errors in reading or copying the script's files as an AceError of one line."""
    try:
        yield
    except OSError as error:
        raise AceError(f"the script's files cannot be copied: {error.filename}: {error.strerror or error}") from None


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:10]


def now() -> str:
    """Return date and time to the minute."""
    return time.strftime("%Y-%m-%d %H:%M")


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
