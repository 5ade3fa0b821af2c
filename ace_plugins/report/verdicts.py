"""What a run tells its user about each layer, read off the history of its gamma and lambda.

strict: gamma goes to 0 and stays there, the symmetry fits the data. gamma keeps swinging about 0, or settles elsewhere
while lambda keeps growing: the data breaks the symmetry. resilient: u says how much.

What a run came to, read off its trace: a verdict for each layer and for the whole, and what to do.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ..settings.config import Config
from .runs import QUANTITIES, Run

NEAR = 0.05
"""|gamma| below this counts as 0: what the branch adds is small beside f_eq."""
HELD = 0.7
"""|lambda| / s above which a gamma that has landed would not stay at 0: most of the gradient there is no noise."""
FEWEST_GRADIENTS = 12
"""Gradients at 0 below which their mean says nothing: early in training all of them may point one way."""
FEWEST_STEPS = 40
"""Steps below which no budget is long enough for gamma to land."""
AFTER = 30
"""Steps after the horizon that landing takes, in a short run."""
FEWEST = 12
"""Points of a history below which nothing can be said about where it goes."""

FEWEST_TO_BREAK = 64
"""Points below which a gamma that stays where it is may just not have begun to move."""

DRIFT = 0.25
"""How far lambda may still move in half a run, beside its size, for u to say roughly how much: it drifts as long as the
loss falls."""

FITS, MOVING, BREAKS, CUT, SHORT, DIVERGED = "fits", "moving", "breaks", "cut", "too short", "diverged"
UNASKED = "scheduled"
LANDED, SETTLED = "landed", "settled"
"""gamma is at 0 for good, or at rest, and what the data want was not seen."""
_UNSEEN = (
    "whether the data break the symmetry was not seen, since in random frames no branch can learn what breaks it "
    "(mode resilient with frames off tells)"
)
_MEANING = {
    ("strict", FITS): "gamma is at 0: the symmetry fits the data, the branch can go",
    ("bounded", FITS): "|gamma| is below epsilon",
    ("resilient", FITS): "gamma is at 0 and needs no slack: the symmetry fits the data",
    ("strict", MOVING): "gamma is still on its way to 0: give it more steps, or a budget that fits the run",
    ("bounded", MOVING): "|gamma| is still above epsilon: give it more steps",
    ("resilient", MOVING): "gamma or u is still on its way: give it more steps",
    (
        "strict",
        BREAKS,
    ): "gamma does not stay at 0: the data breaks the symmetry here (try mode resilient), or a "
    "learning rate (dual_lr, gamma_lr) does not fit",
    ("bounded", BREAKS): "|gamma| is at epsilon: the data breaks the symmetry here, this layer would use more",
    ("resilient", BREAKS): "the data breaks the symmetry here: u says how much",
    (
        "strict",
        CUT,
    ): "gamma was set to 0 from far away: this is plain upstream again, but the branch was cut off "
    "rather than learnt away; preset 'fit' lets gamma arrive by itself",
}


def meaning(word: str, mode: str) -> str:
    """A verdict in a sentence."""
    if word == SHORT:
        return "too few steps to tell"
    if word == LANDED:
        return f"gamma is at 0: what is left is upstream's model, the branch can go; {_UNSEEN}"
    if word == SETTLED:
        return f"gamma and u have come to rest; {_UNSEEN}"
    if word == UNASKED:
        return "gamma follows the schedule, whatever the data say: nothing is known of the symmetry here"
    if word == DIVERGED:
        return "gamma, lambda or the loss's gradient is not finite: lower the learning rate"
    return _MEANING[mode, word]


def sites_verdicts(
    config: Config,
    history: Sequence[Sequence[Sequence[float]]],
    *,
    landed: Collection[int] = (),
    held: Sequence[float] = (),
    gradients: float = math.inf,
    turned: bool = False,
) -> list[str]:
    """A word per site, from the gammas, lambdas and us of each.

    ``landed`` are the sites that have; ``held`` says of each site how hard lambda has to hold gamma, in units of the
    loss's gradient there, as the mean of so many ``gradients``. ``turned``: the run trained in random frames.
    """
    words = []
    for number, (gamma, lambda_, u) in enumerate(history):
        gamma = [value / config.gamma_unit for value in gamma]
        bound = config.epsilon if config.mode == "bounded" else u[-1]
        there = number in landed
        word = verdict(config.mode, gamma, lambda_, bound, landed=there)
        if config.mode == "strict" and config.paced and not there and word in (FITS, BREAKS):
            word = MOVING  # at its own pace it arrives, or the run was too short for it
        if held and not math.isfinite(held[number]):
            word = DIVERGED
        if turned and config.paced and word in (FITS, CUT, BREAKS):
            word = LANDED if there else SETTLED
        elif there and word in (FITS, CUT) and config.paced:  # there gamma arrives by itself
            word = FITS if held[number] <= HELD else BREAKS if gradients >= FEWEST_GRADIENTS else SHORT
        words.append(word)
    return words


def verdict(mode: str, gamma: Sequence[float], lambda_: Sequence[float], bound: float, *, landed: bool = False) -> str:
    """A word for one site. ``bound`` is what |gamma| may be at the end: u or epsilon."""
    if not all(map(math.isfinite, (*gamma, *lambda_, bound))):
        return DIVERGED
    if mode == "scheduled":
        return UNASKED
    if landed:
        before = next((value for value in reversed(gamma) if value), 0.0)
        return CUT if abs(before) > NEAR else FITS
    if len(gamma) < FEWEST:
        return SHORT
    if mode == "strict":
        return _strict(gamma, lambda_)
    now = _mean([*map(abs, gamma[-(len(gamma) // 4) :])])  # wherever it is in its swing
    if now > bound + min(NEAR, max(0.25 * bound, 0.02)):
        return MOVING
    if mode == "bounded":
        return BREAKS if now > 0.9 * bound else FITS
    unused = bound > NEAR and now < 0.5 * bound  # slack that gamma leaves goes, if slowly
    if unused or _spread(lambda_, 4) > DRIFT * _size(lambda_):  # u follows lambda
        return FITS if now <= NEAR and (unused or bound <= NEAR) else MOVING
    return FITS if bound < 0.01 else BREAKS


def whole_verdict(
    config: Config,
    sites: Sequence[str],
    history: Sequence[Sequence[Sequence[float]]],
    verdicts: Sequence[str],
    steps: int,
    *,
    landed: bool = False,
    budget: int | None = None,
) -> str:
    """What the user should know about how the run ended; empty if there is nothing to say.

    ``budget`` is what the run was taken for, in steps.
    """
    if DIVERGED in verdicts or landed:
        return ""
    lands = config.lands
    if config.paced and budget is not None and steps < (1 if lands else 0.9) * budget:
        bounds = [config.epsilon if config.mode == "bounded" else u[-1] for _, _, u in history]
        gammas = [abs(gamma[-1]) for gamma, _, _ in history]
        above = max(gamma - (0.0 if lands else bound) for gamma, bound in zip(gammas, bounds, strict=True))
        return _ended_early(config, max(gammas), steps, budget) if above >= 0.01 * config.gamma_unit else ""
    if SHORT in verdicts:
        return ""
    if config.mode == "strict" and config.loop == "paper":
        return _strict_whole(config, max(abs(gamma[-1]) for gamma, _, _ in history), steps)
    us = [u[-1] for _, _, u in history]
    most = max(range(len(us)), key=us.__getitem__)
    if config.mode == "resilient" and us[most] > max(0.01, 1.1 * sorted(us)[(len(us) - 1) // 2]):
        return f"{sites[most]} breaks the symmetry the most: u = {us[most]:.3g}"
    return ""


def _ended_early(config: Config, largest: float, steps: int, budget: int) -> str:
    fewest = FEWEST_STEPS if config.mode == "scheduled" else max(FEWEST_STEPS, round(AFTER / (1 - config.share)))
    told = f"|gamma| is still up to {largest:.2g}: the run made {steps:,} steps and was taken for {budget:,}; "
    if steps < fewest:
        return told + f"it needs {fewest} for gamma to arrive: train longer, with budget = {fewest}"
    return told + f"with budget = {steps} gamma arrives in a run of this length"


def _strict_whole(config: Config, largest: float, steps: int) -> str:
    if largest <= NEAR:
        return "the symmetry holds: gamma is at 0" if largest < 0.01 else ""
    told = (
        f"|gamma| is still up to {largest:.2f}: the f_eq that model.eval() shows is not yet the model that trains, "
        "and early stopping or a falling learning rate can leave it there; "
    )
    if config.land_at:
        return told + f"land_at = {config.land_at:,} was not reached in {steps:,} steps"
    return told + "preset 'fit' paces gamma by the length of the run"


def _strict(gamma: Sequence[float], lambda_: Sequence[float]) -> str:
    quarter = len(gamma) // 4
    if _size(gamma[-quarter:]) <= NEAR:
        return FITS
    half = gamma[-2 * quarter :]
    if min(half) < -0.5 * NEAR and max(half) > 0.5 * NEAR:
        return _swing(gamma)
    # A slow gamma, and one that is just turning round, were elsewhere half a run ago.
    stays = _spread(gamma, 4) <= 0.1 * min(abs(gamma[-1]), abs(gamma[-1] - gamma[0]))
    grows = _spread(lambda_, 2) > 0.05 * _size(lambda_)
    return BREAKS if stays and grows and len(gamma) >= FEWEST_TO_BREAK else MOVING


def _swing(gamma: Sequence[float]) -> str:
    peaks = _peaks(gamma)
    if len(peaks) > 1 and 0.5 * peaks[-1] < abs(gamma[-1]) and peaks[-1] < peaks[-2]:
        peaks.pop()  # it may still rise
    count = max(2, len(peaks) // 3)
    dying = max(peaks[-count:]) < 0.8 * max(peaks[-2 * count : -count], default=0.0)
    return MOVING if dying or len(peaks) < 4 else BREAKS


def _peaks(gamma: Sequence[float]) -> list[float]:
    """How far gamma got each time it was on one side of 0."""
    peaks: list[float] = []
    side = 0.0
    for value in gamma:
        if abs(value) > 0.5 * NEAR and math.copysign(1, value) != side:
            side = math.copysign(1, value)
            peaks.append(0.0)
        if peaks:
            peaks[-1] = max(peaks[-1], abs(value))
    return peaks


def _spread(values: Sequence[float], eighths: int) -> float:
    """How far it moved in the last eighths of the run, noise aside."""
    length = len(values) // 8
    ends = [len(values) - number * length for number in range(eighths)]
    means = [_mean(values[end - length : end]) for end in ends]
    return max(means) - min(means)


def _size(values: Sequence[float]) -> float:
    return max(map(abs, values))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


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
    """A strict gamma that arrives at 0 by itself stays there; under the paper's loop all land at one step."""
    if config.mode == "strict" and config.paced:
        return gamma[-1] == 0 and (number in run.landings or (len(gamma) > 1 and gamma[-2] == 0))
    return config.has_landed(run.length)


def _meaning(word: str, mode: str) -> str:
    try:
        return meaning(word, mode)
    except KeyError:  # a word of another version
        return ""
