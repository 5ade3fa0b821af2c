"""What a run came to, read off its trace: a verdict for each layer and for the whole, and what to do."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..settings.config import Config
from .run import QUANTITIES, Run
from .verdicts import DIVERGED, LANDED, meaning, sites_verdicts, whole_verdict

POINTS = 256
"""Of a history, as many as the run itself keeps for its verdicts."""


@dataclass(frozen=True)
class Layer:
    """One site at the end of the trace."""

    name: str
    gamma: float
    lambda_: float
    u: float
    verdict: str
    """Empty if nothing can be said."""


@dataclass(frozen=True)
class Outcome:
    layers: list[Layer]
    whole: str
    """What to know about the run as a whole; empty if there is nothing to say."""
    meanings: dict[str, str]
    """What each word that was used says, and what to do."""

    def named(self, word: str) -> list[str]:
        """The layers with this verdict."""
        return [layer.name for layer in self.layers if layer.verdict == word]


def outcome(run: Run) -> Outcome:
    """The run's own verdicts where it has written them at its end, and otherwise those that the trace allows."""
    words, whole = _told(run) or _found(run)
    now = (run.now(name) for name in QUANTITIES)
    layers = [Layer(*values) for values in zip(run.sites, *now, words, strict=True)]
    meanings = {word: _meaning(word, run.mode) for word in dict.fromkeys(words) if word}
    return Outcome(layers, whole, meanings)


def _told(run: Run) -> tuple[list[str], str] | None:
    words = (run.end or {}).get("verdicts")
    if not isinstance(words, list) or len(words) != len(run.sites):
        return None
    return [str(word) for word in words], str((run.end or {}).get("verdict") or "")


def _found(run: Run) -> tuple[list[str], str]:
    nothing = ["" for _ in run.sites]
    config = run.config
    if config is None or config.mode == "off" or run.absent or not run.steps or not run.sites:
        return nothing, ""
    every = max(1, -(-len(run.steps) // POINTS))
    # From the end backwards, so that the last values are among them.
    kept = range(len(run.steps) - 1, -1, -every)[::-1]
    history = [
        [[run.values[name][site][point] for point in kept] for name in QUANTITIES] for site in range(len(run.sites))
    ]
    landed = frozenset(number for number, (gamma, _, _) in enumerate(history) if _landed(config, run, number, gamma))
    unknown = landed - run.landings.keys() if config.paced else frozenset()
    held = [run.landings.get(number, 0.0) for number in range(len(history))]
    turned = bool(run.about.get("frames", config.turns))
    words = sites_verdicts(config, history, landed=landed, held=held, gradients=run.averaged, turned=turned)
    words = [LANDED if n in unknown and word != DIVERGED else word for n, word in enumerate(words)]
    budget = config.budget if isinstance(config.budget, int) else None
    finite = all(math.isfinite(value) for site in history for values in site for value in values)
    if run.end is None or not finite:  # of a run that goes on, "still" and "not yet" are no news
        return words, ""
    everywhere = len(landed) == len(history)
    return words, whole_verdict(config, run.sites, history, words, run.length, landed=everywhere, budget=budget)


def _landed(config: Config, run: Run, number: int, gamma: Sequence[float]) -> bool:
    """A strict gamma that arrives at 0 by itself stays there; under the printed loop all land at one step."""
    if config.mode == "strict" and config.paced:
        return gamma[-1] == 0 and (number in run.landings or (len(gamma) > 1 and gamma[-2] == 0))
    return config.has_landed(run.length)


def _meaning(word: str, mode: str) -> str:
    try:
        return meaning(word, mode)
    except KeyError:  # a word of another version
        return ""
