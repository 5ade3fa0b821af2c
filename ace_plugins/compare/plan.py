"""A folder of its own for each run: code copied, data linked, so that what scripts write never meets.

What a script writes goes to its own folder, since every folder is made anew. Only large files are links. Files that
scripts like to write again, such as checkpoints, are copied whatever their size.

What is to be compared: a script, runs with settings of their own, seeds, and how the script prints its results.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..contract.upstreams import Metric, Script
from ..errors import AceError
from ..plugins.claims import holding
from ..plugins.plugin import Plugin
from ..settings.sources import resolve
from .metrics import compiled

LARGE = 2**20
"""Bytes from which a file counts as data."""
WRITTEN = (".pt", ".pth", ".ckpt", ".t7", ".model", ".tar", ".log")
SKIPPED = frozenset({".git", ".hg", ".svn", ".ace", ".tox", ".venv", "venv", "__pycache__", "node_modules"})
OURS = "comparison.json"
"""A folder with this file is one of ours, and not copied."""
SPARE = 50 * 2**20
"""Bytes that are left free beside what is copied."""


@dataclass
class Contents:
    """The files of a folder, named from it."""

    root: Path
    copied: list[str] = field(default_factory=list)
    linked: list[str] = field(default_factory=list)
    bytes: int = 0
    """Of those that are copied."""

    @classmethod
    def of(cls, root: Path) -> Contents:
        found = cls(root)
        for path in _files(root):
            about = path.stat()
            name = path.relative_to(root).as_posix()
            if about.st_size >= LARGE and path.suffix not in WRITTEN:
                found.linked.append(name)
            else:
                found.copied.append(name)
                found.bytes += about.st_size
        return found

    def fingerprint(self) -> str:
        """Of the code by its contents, of data by size and time: another one is another experiment.

        In a clone, code is what git knows and every Python file; what runs have left there does not count.
        """
        digest = hashlib.sha256()
        tracked = _tracked(self.root)
        for name in sorted(n for n in self.copied if tracked is None or n in tracked or n.endswith((".py", ".toml"))):
            digest.update(name.encode() + b"\0" + (self.root / name).read_bytes() + b"\0")
        digest.update(repr(self.state_of_data()).encode())
        return digest.hexdigest()

    def state_of_data(self) -> list[tuple[str, int, int]]:
        stats = [(name, os.stat(self.root / name)) for name in sorted(self.linked)]
        return [(name, about.st_size, about.st_mtime_ns) for name, about in stats]

    def lay_out(self, target: Path) -> None:
        """Copies and links, in a folder that is made for them."""
        try:
            for name in (*self.copied, *self.linked):
                (target / name).parent.mkdir(parents=True, exist_ok=True)
            for name in self.copied:
                shutil.copy2(self.root / name, target / name)
            for name in self.linked:
                (target / name).symlink_to((self.root / name).resolve())
        except OSError as error:
            shutil.rmtree(target, ignore_errors=True)
            why = "no space is left on the disk" if error.errno == errno.ENOSPC else str(error.strerror or error)
            raise AceError(f"{self.root} cannot be copied to {target}: {why}; give another folder with --out") from None

    def check_space(self, target: Path, times: int) -> None:
        """Before anything is started."""
        free = shutil.disk_usage(target).free
        wanted = times * self.bytes + SPARE
        if free < wanted:
            raise AceError(
                f"{target}: expected {_size(wanted)} free for {times} copies of {self.root}, found {_size(free)}; "
                "give another folder with --out"
            )


def _tracked(root: Path) -> set[str] | None:
    """What git knows in this folder; None if it is no clone, or there is no git."""
    if not (root / ".git").exists():
        return None
    try:
        done = subprocess.run(["git", "-C", str(root), "ls-files", "-z"], capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return set(os.fsdecode(done.stdout).split("\0"))


def _files(root: Path) -> Iterator[Path]:
    """All of them, through links to folders too, each folder once."""
    seen: set[str] = set()
    for folder, folders, names in os.walk(root, followlinks=True):
        real = os.path.realpath(folder)
        if real in seen or OURS in names:
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if name not in SKIPPED)
        for name in sorted(names):
            path = Path(folder, name)
            if path.is_file() and not name.endswith(".pyc"):
                yield path


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


SEED = "{seed}"
FOLDER = Path(".ace/compare")
MOST = 10_000
"""Seeds; more are a slip of the finger."""


@dataclass(frozen=True)
class Trial:
    """One run with one seed."""

    run: str
    seed: int

    def __str__(self) -> str:
        return f"{self.run} seed {self.seed}"


@dataclass(frozen=True)
class Comparison:
    """All of it. The same comparison is the same folder, whenever it is asked for."""

    adapter: str
    words: tuple[str, ...]
    """The script's own command."""
    runs: Mapping[str, Mapping[str, Any]]
    """Name -> settings. The first is what the others are compared with."""
    seeds: tuple[int, ...]
    metrics: tuple[Metric, ...]
    """The first is what counts."""
    contents: Contents
    """What each run gets a copy of."""
    below: str
    """The folder the command is called in, from the root of what is copied."""
    script: Script | None = None
    about: Mapping[str, Any] = field(default_factory=dict)
    """What is printed beside the results: the paper's figures, for one."""

    @property
    def trials(self) -> list[Trial]:
        """Seed by seed, so that a comparison that is cut short has compared something."""
        return [Trial(run, seed) for seed in self.seeds for run in self.runs]

    @property
    def epochs(self) -> int | None:
        return self.script.epochs if self.script else None

    def command(self, trial: Trial) -> list[str]:
        """The script's command with this trial's seed."""
        words = [word.replace(SEED, str(trial.seed)) for word in self.words]
        if self.script is not None and self.script.seed and not self.names_seed:
            words += [self.script.seed, str(trial.seed)]
        return words

    @property
    def names_seed(self) -> bool:
        """The user's command has a place for the seed."""
        return any(SEED in word for word in self.words)

    def shift(self, trial: Trial) -> int | None:
        """By how much the seeds of the process are shifted; None where the command says the seed itself.

        Seed 1 is what the script does by itself.
        """
        own = self.names_seed or (self.script is not None and self.script.seed)
        return None if own else trial.seed - 1

    def fingerprint(self) -> str:
        """Runs that are added later, and seeds, find what was finished before."""
        told = [self.adapter, list(self.words), self.below, self.contents.fingerprint()]
        return hashlib.sha256(json.dumps(told).encode()).hexdigest()[:10]

    def settings_key(self, trial: Trial) -> str:
        """Of a run's settings, so that a name that means something else now is another run."""
        told = json.dumps(self.runs[trial.run], sort_keys=True, default=str)
        return hashlib.sha256(told.encode()).hexdigest()[:6]


def parse_seeds(text: str) -> tuple[int, ...]:
    """``3``: seeds 1, 2, 3. ``7,11``: these. ``7,``: this one."""
    expected = "expected a number of seeds, such as 3, or the seeds themselves, such as 7,11 (7, for seed 7 alone)"
    try:
        numbers = [int(word) for word in str(text).removesuffix(",").split(",")]
    except ValueError:
        raise AceError(f"seeds {text!r}: {expected}") from None
    if len(numbers) == 1 and "," not in str(text):
        numbers = list(range(1, numbers[0] + 1)) if 0 < numbers[0] <= MOST else []
    if not numbers or min(numbers) < 0 or len(set(numbers)) < len(numbers):
        raise AceError(f"seeds {text!r}: {expected}, each once and at least 0")
    return tuple(numbers)


def planned(
    plugin: Plugin,
    words: Sequence[str],
    runs: Mapping[str, Mapping[str, Any]],
    seeds: Sequence[int],
    metrics: Sequence[Metric] = (),
    about: Mapping[str, Any] | None = None,
) -> Comparison:
    """A comparison, with everything checked that can be before hours are spent on it."""
    if not words:
        raise AceError("no script given: expected ace-patch compare ADAPTER -- script.py args...")
    for name, settings in runs.items():
        try:
            plugin.checked(resolve(plugin.presets, options=dict(settings), environment={}))
        except AceError as error:
            raise AceError(f"run {name!r}: {error}") from None
    root, below = _root(plugin, words)
    # The copy's own script, wherever the copy is.
    words = [os.path.relpath(word) if os.path.isabs(word) and root in Path(word).parents else word for word in words]
    script = _script(plugin, words)
    found = tuple(metrics) or (script.metrics if script else ())
    if not found:
        raise AceError(
            f"adapter {plugin.name!r} does not know how {words[0]} prints its results: say so, as in "
            "--metric 'test=Test MAE: ([0-9.e-]+)'"
        )
    names = [metric.name for metric in found]
    if len(set(names)) < len(names):
        raise AceError(f"metrics {', '.join(names)}: expected each name once")
    for metric in found:
        for pattern in filter(None, (metric.pattern, metric.curve)):
            compiled(pattern, metric.name)
    return Comparison(
        plugin.name, tuple(words), dict(runs), tuple(seeds), found, Contents.of(root), below, script, about or {}
    )


def _script(plugin: Plugin, words: Sequence[str]) -> Script | None:
    told: Script | None = plugin.call("ace_script", argv=tuple(words)) if plugin.has("ace_script") else None
    return told


def _root(plugin: Plugin, words: Sequence[str]) -> tuple[Path, str]:
    """What is copied, and where in it the command is called: the checkout around the script, or the current folder."""
    here = Path.cwd()
    named = next((word for word in words if word.endswith(".py")), None)
    script = (here / named).resolve() if named else None
    if script is not None and not script.is_file():
        raise AceError(f"no script {named!r} in {here}: expected the command as you would call it here")
    start = script.parent if script is not None else here
    found = holding(str(start), plugin.patches.files) if plugin.patches.checkout else None
    root = Path(found) if found is not None else here
    if script is not None and root not in script.parents:
        raise AceError(f"{named} is not in {root}: expected a script below the current folder; call it from there")
    if root != here and root not in here.parents:
        raise AceError(f"{root} is not around {here}: call it from inside the checkout")
    return root, os.path.relpath(here, root)
