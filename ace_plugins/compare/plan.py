"""What is to be compared: a script, runs with settings of their own, seeds, and how the script prints its results."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..contract.upstreams import Metric, Script
from ..errors import AceError
from ..plugins.claims import holding
from ..plugins.plugin import Plugin
from ..settings.sources import resolve
from .outputs import compiled
from .workspace import Contents

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
