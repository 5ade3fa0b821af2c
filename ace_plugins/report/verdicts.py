"""Derives verdicts on each site and on the whole run from the history of gamma, lambda and u.

In strict mode, the symmetry fits the data if gamma goes to 0 and stays there. The data breaks the symmetry if gamma
keeps swinging about 0, or becomes constant elsewhere while lambda keeps growing. In resilient mode, u says how much.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..settings.config import Config
from .trace import QUANTITIES, SavedRun, to_json, to_number, to_numbers

TEST = ("log_e", "benefit", "limit", "kept", "used")  # numbers per site that verdicts in mode auto are derived from
SMALL = 0.01  # if all branches together cannot lower the loss by more than this share, the symmetry fits the data
NEAR = 0.05  # a smaller |gamma| counts as 0: the branch then adds little to the equivariant layer
HELD = 0.7  # above this |lambda| / s (see `Evidence`), a landed gamma would leave 0: most of its gradient is not noise
FEWEST_GRADIENTS = 12  # fewer gradients at gamma = 0 give no reliable mean: all may have the same sign by chance
FEWEST_STEPS = 40  # smallest number of steps in which gamma can land, whatever the budget is
LANDING_STEPS = 30  # number of steps from the end of the horizon until gamma lands, in a short run
FEWEST = 12  # smallest number of points of a history that shows a trend
FEWEST_TO_DECIDE = 120  # smallest number of steps of a run in which mode auto can find evidence
FEWEST_TO_BREAK = 64  # with fewer points, a constant gamma is no evidence: it may not have begun to move
DRIFT = 0.25  # lambda counts as constant if it changes by less than this share of its size in half a run
POINTS = 256  # number of points of a saved run that are used for verdicts; a run in progress keeps as many

UNDECIDED, UNUSED = "undecided", "unused"
FITS, MOVING, BREAKS, CUT, SHORT, DIVERGED = "fits", "moving", "breaks", "cut", "too short", "diverged"
SCHEDULED, LANDED, SETTLED = "scheduled", "landed", "settled"

_UNKNOWN = (
    "Whether the data breaks the symmetry is unknown: this run used random frames, which hide any symmetry breaking "
    "in the data (mode resilient with frames off shows it)"
)
_MEANINGS = {
    (FITS, "strict"): "gamma is at 0: the symmetry fits the data, and the branch can be removed",
    (FITS, "bounded"): "|gamma| is below epsilon",
    (FITS, "resilient"): "gamma and its bound u are at 0: the symmetry fits the data",
    (MOVING, "strict"): "gamma has not reached 0 yet: train longer, or set a budget that matches the run",
    (MOVING, "bounded"): "|gamma| is still above epsilon: train longer",
    (MOVING, "resilient"): "gamma or u is still changing: train longer",
    (BREAKS, "strict"): "gamma does not stay at 0: the data breaks the symmetry here (try mode resilient), or a "
    "learning rate (dual_lr, gamma_lr) is unsuitable",
    (
        BREAKS,
        "bounded",
    ): "|gamma| has reached epsilon: the data breaks the symmetry here by more than epsilon allows",
    (BREAKS, "resilient"): "the data breaks the symmetry here: u measures how much",
    (CUT, ""): "gamma was set to 0 while it was still large: the model is plain upstream again, but the branch was cut "
    "off before training had reduced it; preset 'fit' lets gamma reach 0 by itself",
    (SHORT, ""): "too few steps for a verdict",
    (LANDED, ""): f"gamma is at 0, and the branch can be removed. {_UNKNOWN}",
    (SETTLED, ""): f"gamma and u no longer change. {_UNKNOWN}",
    (SCHEDULED, ""): "gamma follows the schedule regardless of the data: the symmetry of the data is unknown",
    (UNUSED, ""): "gamma had no gradient in any step, so the loss does not depend on this output: leave the site out",
    (UNUSED, "auto"): "no held-out sample gave this branch's gamma a gradient: if the loss does not depend on the "
    "layer's output, leave the site out",
    (DIVERGED, ""): "gamma, lambda or the gradient of the loss is not finite: lower the learning rate",
}


def explain(verdict: str, mode: str) -> str:
    """Explain a verdict in a sentence that says what to do. Returns "" for unknown verdicts, of other versions."""
    return _MEANINGS.get((verdict, mode)) or _MEANINGS.get((verdict, ""), "")


@dataclass(frozen=True)
class SiteOutcome:
    """The last values of a site and its verdict."""

    name: str
    gamma: float
    lambda_: float
    u: float
    verdict: str = ""  # empty if there is none
    benefit: float = math.nan  # mode auto: share by which the branch lowers the loss on held-out samples
    limit: float = math.nan  # mode auto: upper confidence limit of the benefit of all branches that are not kept
    p: float = math.nan  # mode auto: p-value of the benefit

    def to_dict(self) -> dict[str, Any]:
        values = {"name": self.name, "gamma": self.gamma, "lambda": self.lambda_, "u": self.u, "verdict": self.verdict}
        test = {"benefit": self.benefit, "limit": self.limit, "p": self.p} if math.isfinite(self.p) else {}
        found: dict[str, Any] = to_json({**values, **test})
        return found


@dataclass(frozen=True)
class RunOutcome:
    """The outcome of a run: the outcome of each site, and advice."""

    mode: str
    sites: Sequence[SiteOutcome]
    advice: str = ""  # a sentence about the whole run that says what to do; may be empty
    exploring: bool = False  # mode auto: True if the run has not decided yet
    ended: bool = True  # see `Evidence`

    @property
    def counts(self) -> Counter[str]:
        return Counter(site.verdict for site in self.sites if site.verdict)

    @property
    def meanings(self) -> dict[str, str]:
        """Mapping from each verdict that a site has to its explanation."""
        return {word: self._explain(word) for word in self.counts}

    def _explain(self, word: str) -> str:
        """Explain a verdict. In mode auto, say how much the branches with this verdict lower the loss."""
        sites = [site for site in self.sites if site.verdict == word]
        limit = max((site.limit for site in sites if math.isfinite(site.limit)), default=math.nan)
        if self.mode != "auto" or word not in (BREAKS, FITS, UNDECIDED):
            return explain(word, self.mode) if self.ended else explain(word, self.mode).partition(": train longer")[0]
        if word == BREAKS:
            together, p = sum(site.benefit for site in sites), max(site.p for site in sites)
            size = f" together by {_percent(together)}" if math.isfinite(together) else ""
            chance = "p < 0.001" if p < 0.001 else f"p = {p:.2g}"
            return f"on held-out samples the branches lower the loss{size} ({chance}): they stay in the model"
        if word == FITS:
            lower = (
                f"lower the held-out loss by at most {_percent(limit)}"
                if limit > 0
                else "do not lower the held-out loss"
            )
            return f"together the branches {lower}: they are removed"
        if self.exploring:
            return "no decision up to this step: model.eval() leaves these branches out"
        most = f" (by up to {_percent(limit)} together)" if math.isfinite(limit) else ""
        return f"too few samples or steps to tell if the branches lower the loss{most}; they are removed"


@dataclass(frozen=True)
class Evidence:
    """Everything that verdicts are derived from."""

    config: Config
    sites: Sequence[str]
    history: Sequence[Sequence[Sequence[float]]]  # for each site three series: gamma, lambda, u
    steps: int
    landed: Collection[int] = ()  # indices of landed sites
    held: Sequence[float] = ()  # |lambda| / s of each site; s is the typical size of the loss's gradient at gamma
    gradients: float = math.inf  # number of gradients that ``held`` is computed from
    frames: bool = False  # True if the run trained in random frames
    budget: int | None = None  # number of steps that the run was expected to have
    ended: bool = True  # False for a run that is in progress or was interrupted, which gets no advice
    test: Mapping[str, Sequence[float]] | None = None  # mode auto: the outcome of the test, see engine.evidence
    unused: Collection[int] = ()  # modes other than auto: indices of sites whose gamma never had a gradient
    loaded: int | None = None  # step of the checkpoint that the script loaded after its last step, usually the best


def judge(evidence: Evidence) -> RunOutcome:
    """Derive the verdicts of a run."""
    test, landed = evidence.test, evidence.landed
    sites = []
    for number, (name, series) in enumerate(zip(evidence.sites, evidence.history, strict=True)):
        gamma, lambda_, u = (values[-1] for values in series)
        site = SiteOutcome(name, gamma, lambda_, u, _judge_site(evidence, number))
        if test is not None:
            log_e, benefit, limit = (test[key][number] for key in ("log_e", "benefit", "limit"))
            site = replace(site, benefit=benefit, limit=limit, p=math.exp(min(0.0, -log_e)))
        sites.append(site)
    exploring = test is not None and any(not kept and n not in landed for n, kept in enumerate(test["kept"]))
    silent = not evidence.ended or not sites or len(landed) == len(sites) or any(s.verdict == DIVERGED for s in sites)
    advice = "" if silent or (test is not None and not exploring) else _advise(evidence, sites)
    if evidence.loaded is not None:
        advice = f"the script loaded its checkpoint of step {evidence.loaded:,} after step {evidence.steps:,}: "
        advice += "these results describe that checkpoint, not the last step"
    return RunOutcome(evidence.config.mode, sites, advice, exploring, evidence.ended)


def _percent(share: float) -> str:
    return f"{100 * share:.{0 if abs(share) >= 0.1 else 1}f} %"


def judge_saved(run: SavedRun) -> RunOutcome:
    """Return the verdicts that a run wrote at its end, or derive verdicts from its trace."""
    if not run.lines or not run.sites:
        return RunOutcome(run.mode, [SiteOutcome(name, math.nan, math.nan, math.nan) for name in run.sites])
    end = run.end
    if last := run.landed_at:  # later values are 0
        run = replace(run, lines=[line for line in run.lines if line["step"] <= last])
    every = -(-len(run.lines) // POINTS)
    series = [[values[::-every][::-1] for values in run.per_site(name)[1]] for name in QUANTITIES]
    landed = {int(site) for site in to_numbers(run.lines[-1].get("landed")) if math.isfinite(site)}
    held, averaged = run.last("held") or [0.0] * len(run.sites), to_number(run.lines[-1].get("averaged"))
    evidence = Evidence(run.config, run.sites, list(zip(*series, strict=True)), run.length, landed, held, averaged)
    budget = run.config.budget if isinstance(run.config.budget, int) else None
    pulls = run.per_site("gradient")[1]
    before = to_numbers(run.lines[0].get("landed"))  # before the first line, in an earlier process
    unused = [n for n, pull in enumerate(pulls) if pull and not any(pull) and n not in before]
    evidence = replace(evidence, unused=unused)
    test = {key: run.last(key) for key in TEST}
    evidence = replace(evidence, frames=bool(run.about.get("frames")), budget=budget, ended=run.state == "finished")
    found = judge(replace(evidence, test=test if all(test.values()) else None))
    written = end.get("verdicts") if end else None
    if end is None or not isinstance(written, list) or len(written) != len(run.sites):
        return found
    # Verdicts that the run wrote take precedence: the trace has fewer points than the run had.
    sites = [replace(site, verdict=str(word)) for site, word in zip(found.sites, written, strict=True)]
    return replace(found, sites=sites, advice=str(end.get("verdict") or ""))


def _judge_site(evidence: Evidence, number: int) -> str:
    config, held, test = evidence.config, evidence.held, evidence.test
    gamma, lambda_, u = evidence.history[number]
    landed = number in evidence.landed
    if held and not math.isfinite(held[number]):
        return DIVERGED
    if test is not None:
        if not math.isfinite(gamma[-1]):
            return DIVERGED
        if not test["used"][number]:
            return UNUSED
        if test["kept"][number]:
            return BREAKS
        return FITS if landed and test["limit"][number] < SMALL else UNDECIDED
    if number in evidence.unused and evidence.steps >= FEWEST:  # earlier a branch may still be 0
        return UNUSED
    if not (config.paced or config.gamma_lr):
        return ""  # gamma is constant, which shows nothing about the data
    scaled = [value / config.gamma_unit for value in gamma]
    word = judge_course(config.mode, scaled, lambda_, u[-1], landed=landed)
    if not config.paced:
        return word
    if config.mode == "strict" and not landed and word in (FITS, BREAKS):
        return MOVING  # the paced loop brings every gamma to 0, unless the run was too short
    if evidence.frames and word in (FITS, CUT, BREAKS):
        return LANDED if landed else SETTLED
    if landed and word in (FITS, CUT):
        return FITS if held[number] <= HELD else BREAKS if evidence.gradients >= FEWEST_GRADIENTS else SHORT
    return word


def judge_course(
    mode: str, gamma: Sequence[float], lambda_: Sequence[float], bound: float, *, landed: bool = False
) -> str:
    """Return the verdict on one site, derived only from its gamma and lambda over time.

    ``bound`` is the largest |gamma| that is allowed at the end: u or epsilon."""
    if not all(map(math.isfinite, (*gamma, *lambda_, bound))):
        return DIVERGED
    if mode == "scheduled":
        return SCHEDULED
    if landed:
        before = next((value for value in reversed(gamma) if value), 0.0)
        return CUT if abs(before) > NEAR else FITS
    if len(gamma) < FEWEST:
        return SHORT
    if mode == "strict":
        return _judge_strict(gamma, lambda_)
    now = _mean([*map(abs, gamma[-(len(gamma) // 4) :])])  # a mean, since gamma may oscillate
    if now > bound + min(NEAR, max(0.25 * bound, 0.02)):
        return MOVING
    if mode == "bounded":
        return BREAKS if now > 0.9 * bound else FITS
    unused = bound > NEAR and now < 0.5 * bound  # gamma stays well below u, so u slowly goes to 0
    if unused or _spread(lambda_, 4) > DRIFT * _size(lambda_):  # u follows lambda, so u changes too
        return FITS if now <= NEAR and (unused or bound <= NEAR) else MOVING
    return FITS if bound < 0.01 else BREAKS


def _judge_strict(gamma: Sequence[float], lambda_: Sequence[float]) -> str:
    quarter = len(gamma) // 4
    if _size(gamma[-quarter:]) <= NEAR:
        return FITS
    half = gamma[-2 * quarter :]
    if min(half) < -0.5 * NEAR and max(half) > 0.5 * NEAR:
        return _judge_swing(gamma)
    # Changes are measured over half a run: a slow gamma, or one at a turning point, moves little in a shorter time.
    stays = _spread(gamma, 4) <= 0.1 * min(abs(gamma[-1]), abs(gamma[-1] - gamma[0]))
    grows = _spread(lambda_, 2) > 0.05 * _size(lambda_)
    return BREAKS if stays and grows and len(gamma) >= FEWEST_TO_BREAK else MOVING


def _judge_swing(gamma: Sequence[float]) -> str:
    peaks: list[float] = []  # the largest |gamma| between two changes of sign
    side = 0.0
    for value in gamma:
        if abs(value) > 0.5 * NEAR and math.copysign(1, value) != side:
            side = math.copysign(1, value)
            peaks.append(0.0)
        if peaks:
            peaks[-1] = max(peaks[-1], abs(value))
    if len(peaks) > 1 and 0.5 * peaks[-1] < abs(gamma[-1]) and peaks[-1] < peaks[-2]:
        peaks.pop()  # the last peak may still rise
    count = max(2, len(peaks) // 3)
    fading = max(peaks[-count:]) < 0.8 * max(peaks[-2 * count : -count], default=0.0)
    return MOVING if fading or len(peaks) < 4 else BREAKS


def _advise(evidence: Evidence, sites: Sequence[SiteOutcome]) -> str:
    config, steps, budget = evidence.config, evidence.steps, evidence.budget
    if evidence.test is not None:
        if budget is None or steps >= budget:
            return ""
        ended = f"the run ended after {steps:,} of {budget:,} expected steps, before ACE could decide; "
        if steps < FEWEST_TO_DECIDE:
            return ended + f"a decision needs at least {FEWEST_TO_DECIDE} steps: train longer"
        return ended + f"set budget = {steps} if runs have this length"
    largest = max(abs(site.gamma) for site in sites)
    still = f"|gamma| is still up to {largest:.2g}: "
    if config.paced and budget is not None and steps < (1 if config.lands else 0.9) * budget:
        above = max(abs(site.gamma) - (0.0 if config.lands else site.u) for site in sites)
        if above < 0.01 * config.gamma_unit:
            return ""
        landing = 0 if config.mode == "scheduled" else round(LANDING_STEPS / (1 - config.share))
        fewest = max(FEWEST_STEPS, landing)
        still += f"the run made {steps:,} of {budget:,} expected steps; "
        if steps < fewest:
            return still + f"gamma needs {fewest} steps: train longer, with budget = {fewest}"
        return still + f"set budget = {steps} if runs have this length, so that gamma reaches its final value"
    if any(site.verdict == SHORT for site in sites):
        return ""
    if config.mode == "strict" and config.loop == "paper":
        if largest <= NEAR:
            return "the symmetry holds: gamma is at 0" if largest < 0.01 else ""
        still += "model.eval() leaves out the branches that the model was trained with, so its outputs differ; "
        still += "early stopping or a falling learning rate can stop gamma before it reaches 0; "
        if config.land_at:
            return still + f"land_at = {config.land_at:,} was not reached in {steps:,} steps"
        return still + "preset 'fit' paces gamma by the length of the run"
    most = max(sites, key=lambda site: site.u)
    middle = sorted(site.u for site in sites)[(len(sites) - 1) // 2]
    if config.mode == "resilient" and most.u > max(0.01, 1.1 * middle):
        return f"{most.name} breaks the symmetry the most: u = {most.u:.3g}"
    return ""


def _spread(values: Sequence[float], eighths: int) -> float:
    """Return the largest minus the smallest mean of the last ``eighths`` eighths of a series. Means reduce noise."""
    length = len(values) // 8
    ends = [len(values) - number * length for number in range(eighths)]
    means = [_mean(values[end - length : end]) for end in ends]
    return max(means) - min(means)


def _size(values: Sequence[float]) -> float:
    return max(map(abs, values))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
