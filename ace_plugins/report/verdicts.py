"""Derives verdicts on each site and on the whole run.

In mode auto, a verdict is the outcome of the test on held-out samples. In the other modes a run tests nothing: there, a
verdict is only the state of the branch, such as ``landed``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..settings.config import Config
from .trace import QUANTITIES, SavedRun, to_json, to_number, to_numbers

TEST = ("log_e", "benefit", "limit", "kept", "used")  # numbers per site that verdicts in mode auto are derived from
SMALL = 0.01  # if all branches together cannot lower the loss by more than this share, the symmetry fits the data
NEAR = 0.05  # a smaller |gamma| counts as 0: the branch then adds little to the equivariant layer
FEWEST_STEPS = 40  # smallest number of steps in which gamma can land, whatever the budget is
LANDING_STEPS = 30  # number of steps from the end of the horizon until gamma lands, in a short run
FEWEST_TO_DECIDE = 120  # smallest number of steps of a run in which mode auto can find evidence

FITS, BREAKS, UNDECIDED = "fits", "breaks", "undecided"  # outcomes of the test in mode auto
LANDED, MOVING, KEPT = "landed", "moving", "kept"  # states of a branch in the other modes
UNUSED, DIVERGED = "unused", "diverged"

_TESTS = "(mode auto tests whether the data break the symmetry)"
_MEANINGS = {
    LANDED: f"gamma stays 0, and the model no longer computes the branch {_TESTS}",
    MOVING: "gamma has not landed at 0: train longer, or set a budget that matches the run",
    KEPT: f"the branch stays in the model, and gamma is its factor {_TESTS}",
    UNUSED: "gamma had no gradient in any step, so the loss does not depend on this output: leave the site out",
    DIVERGED: "gamma, lambda or the gradient of the loss is not finite: lower the learning rate",
}
_UNUSED_IN_AUTO = (
    "no held-out sample gave this branch's gamma a gradient: if the loss does not depend on the layer's output, leave "
    "the site out"
)


def explain(verdict: str, mode: str) -> str:
    """Return an explanation of a verdict, with advice; "" for a verdict of another version."""
    return _UNUSED_IN_AUTO if (verdict, mode) == (UNUSED, "auto") else _MEANINGS.get(verdict, "")


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
    advice: str = ""  # advice about the whole run, one sentence; may be empty
    exploring: bool = False  # mode auto: True if the run has not decided yet
    ended: bool = True  # False for a run that is in progress or was interrupted

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


def _percent(share: float) -> str:
    return f"{100 * share:.{0 if abs(share) >= 0.1 else 1}f} %"


def judge(config: Config, names: Sequence[str], line: Mapping[str, Any], *, ended: bool = True) -> RunOutcome:
    """Derive the verdicts of a run from its settings, the names of its sites and the last line of its trace.

    A run that is in progress or was interrupted has not ``ended``, and gets no advice.
    """
    rows = {name: to_numbers(line.get(name)) for name in (*QUANTITIES, *TEST)}
    landed, unused = (to_numbers(line.get(key)) for key in ("landed", "unused"))
    tested = all(len(rows[name]) == len(names) for name in TEST)
    sites = []
    for number, name in enumerate(names):
        gamma, lambda_, u = (rows[key][number] for key in QUANTITIES)
        site = SiteOutcome(name, gamma, lambda_, u)
        if tested:
            log_e, benefit, limit = (rows[key][number] for key in ("log_e", "benefit", "limit"))
            site = replace(site, benefit=benefit, limit=limit, p=math.exp(min(0.0, -log_e)))
        if line.get("diverged") or not all(map(math.isfinite, (gamma, lambda_, u))):
            word = DIVERGED
        elif number in unused or (tested and not rows["used"][number]):
            word = UNUSED
        elif not tested:
            word = LANDED if number in landed else MOVING if config.lands else KEPT
        elif rows["kept"][number]:
            word = BREAKS
        else:
            word = FITS if number in landed and site.limit < SMALL else UNDECIDED
        sites.append(replace(site, verdict=word))
    exploring = tested and any(not kept and number not in landed for number, kept in enumerate(rows["kept"]))
    silent = not ended or len(landed) == len(sites) or any(site.verdict == DIVERGED for site in sites)
    advice = "" if silent or (tested and not exploring) else _advise(config, sites, line, tested=tested)
    if math.isfinite(loaded := to_number(line.get("loaded"))):
        advice = f"the script loaded its checkpoint of step {loaded:,.0f} after step {line['step']:,}: "
        advice += "these results describe that checkpoint, not the last step"
    return RunOutcome(config.mode, sites, advice, exploring, ended)


def judge_saved(run: SavedRun) -> RunOutcome:
    """Derive the verdicts of a run from its files."""
    if not run.lines or not run.sites:
        return RunOutcome(run.mode, [SiteOutcome(name, math.nan, math.nan, math.nan) for name in run.sites])
    return judge(run.config, run.sites, run.lines[-1], ended=run.state == "finished")


def _advise(config: Config, sites: Sequence[SiteOutcome], line: Mapping[str, Any], *, tested: bool) -> str:
    steps, budget = line["step"], to_number(line.get("expected"))
    if tested:
        if not steps < budget:
            return ""
        ended = f"the run ended after {steps:,} of {budget:,.0f} expected steps, before ACE could decide; "
        if steps < FEWEST_TO_DECIDE:
            return ended + f"a decision needs at least {FEWEST_TO_DECIDE} steps: train longer"
        return ended + f"set budget = {steps} if runs have this length"
    largest = max(abs(site.gamma) for site in sites)
    still = f"|gamma| is still up to {largest:.2g}: "
    if config.paced and steps < (1 if config.lands else 0.9) * budget:
        above = max(abs(site.gamma) - (0.0 if config.lands else site.u) for site in sites)
        if above < 0.01 * config.gamma_unit:
            return ""
        landing = 0 if config.mode == "scheduled" else round(LANDING_STEPS / (1 - config.share))
        fewest = max(FEWEST_STEPS, landing)
        still += f"the run made {steps:,} of {budget:,.0f} expected steps; "
        if steps < fewest:
            return still + f"gamma needs {fewest} steps: train longer, with budget = {fewest}"
        return still + f"set budget = {steps} if runs have this length, so that gamma reaches its final value"
    if config.paced or config.mode != "strict" or largest <= NEAR:
        return ""
    still += "model.eval() leaves out the branches that the model was trained with, so its outputs differ; "
    still += "early stopping or a falling learning rate can stop gamma before it reaches 0; "
    if config.land_at:
        return still + f"land_at = {config.land_at:,} was not reached in {steps:,} steps"
    return still + "preset 'fit' paces gamma by the length of the run"
