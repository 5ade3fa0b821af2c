"""The paced loop: the run's budget sets the pace of gamma, and lambda is measured in units of the loss's gradient.

In the paper's loop the script's optimizer moves gamma, so the learning rate sets the pace, and lambda is compared with
a loss of unknown scale. Here the loop moves gamma itself. Let m be the running mean of the loss's gradient at gamma, s
the gradient's running root mean square, and H the horizon: the steps within which gamma reaches its target. One step is

    lambda / s += GROWTH * slack / H                         slack: gamma (strict), |gamma| - bound (other modes)
    gamma      -= SPEED * clip((m + lambda) / s, -1, 1) / H
    u          += GROWTH * (lambda / rho - u) / H            in modes resilient and auto only

So the result depends neither on the loss's scale nor on the optimizer, its learning rate or schedule. |m| is at most s,
so lambda exceeds the gradient of any branch after a sixth of the horizon. In strict mode gamma is measured in units of
its initial value. It reaches 0 after 0.8 to 1 horizons, later if its branch is useful, and stays at 0. In the other
modes DAMPING * slack is added to lambda / s, and lambda is constant while the clip limits the step of gamma, so that
gamma settles at its bound instead of oscillating about it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from .duals import Duals
from .evidence import cycle
from .loop import Loop, skip_unless_finite

SPEED = 1.2  # largest change of gamma over one horizon; in strict mode as a multiple of gamma's initial value
GROWTH = 12.0  # growth of lambda / s over one horizon if the slack is constantly 1; u follows lambda / rho at this rate
DAMPING = 4.0  # factor of the slack that is added to lambda / s in all modes but strict, to damp oscillations
MOST = 2.0  # limit of |lambda| / s: twice the largest possible mean gradient
MEMORY = 0.04  # number of steps over which gradients are averaged, as a fraction of the horizon
EARLIEST = 1 / 3  # share of the horizon after which mode auto may remove branches that raise the loss of the judges
FLOOR = 0.1  # smallest gamma of an undecided site in mode auto, as a share of its initial value
SHORTEST = 5.0  # smallest number of steps over which gradients are averaged, however short the horizon is


@torch.no_grad()
def advance(duals: Duals, gamma: Tensor, gradient: Tensor, horizon: float | None) -> Tensor:
    """Return the next gamma, [sites], given gamma and the loss's gradient at it. Updates lambda and u in ``duals``.

    While the horizon is None, because the length of the run is not known yet, gradients are only averaged.
    """
    config, waited, square = duals.config, duals.waited, duals.square
    duals.tick()
    size_before = square.sqrt()
    # A site that has landed has no gradient, so its averages do not change. In a probe, a site's averages do not
    # change either: its gradient is that at 0, not at gamma.
    live = (1 - duals.site_landed) * (1 - duals.evidence.probing)
    usual = live / min(duals.count, averaging_steps(horizon or 0.0))
    square.lerp_(gradient.square(), usual)
    # When gamma reaches 0, a new mean begins: lambda has to balance the mean gradient at gamma = 0.
    waiting = waited * live
    duals.mean.lerp_(gradient, torch.where(waiting > 0, 1 / waiting.clamp_min(1), usual))
    size = square.sqrt()
    if horizon is None:
        duals.lambda_.mul_(_ratio(size, size_before))
        return gamma
    drive, push = _ratio(duals.mean, size), _ratio(duals.lambda_, size_before)
    if config.mode == "strict":
        push = (push + GROWTH / horizon * gamma / config.gamma_unit).clamp(-MOST, MOST)
        force = drive + push
    else:
        slack = duals.slack(gamma)
        hold = push + DAMPING * slack
        force = drive + hold * gamma.sign()
        # lambda is constant while the clip limits the step of gamma; otherwise gamma would overshoot.
        push = torch.where(force.abs() >= 1, push, push + GROWTH / horizon * slack).clamp(0, MOST)
        # gamma leaves 0 only if the gradient of the loss exceeds lambda (the subgradient of lambda |gamma| at 0).
        away = drive.sign() * (drive.abs() - hold.clamp_min(0)).clamp_min(0)
        force = torch.where(gamma == 0, away, force)
    # A branch without a gradient does not reduce the loss, so its gamma moves to 0.
    force = torch.where(size == 0, gamma.sign(), force)
    moved = gamma - SPEED * config.gamma_unit / horizon * force.clamp(-1, 1)
    moved = torch.where(moved * gamma < 0, 0.0, moved)
    duals.lambda_.copy_(push * size)
    if config.mode == "strict":
        arrived = ((moved == 0) & (gamma != 0)) | (waited != 0)
        moved = torch.where(arrived, 0.0, moved)
        waited.add_(arrived)
    elif config.mode in ("resilient", "auto"):
        # One price (rho) for all sites makes their u comparable. It is computed from all gradients of the run,
        # because late gradients alone are close to 0: a larger u would then cost nothing.
        duals.run_square.lerp_(gradient.square(), live / duals.count)
        duals.u.lerp_(_ratio(duals.lambda_, torch.as_tensor(duals.price())), min(1.0, GROWTH / horizon))
    if config.mode == "auto":
        # Above 0, so that the branch goes on learning until its site is decided.
        moved = moved.clamp_min(FLOOR * abs(config.gamma_start))
    return torch.where(duals.site_landed > 0, 0.0, moved)


@torch.no_grad()
def explore(duals: Duals, horizon: float | None) -> bool:
    """Keep sites with enough evidence, land the others when the horizon ends, and plan the next step (mode auto).

    The others land earlier if the undecided branches raise the loss of the judges.
    Returns whether sites were kept or have landed in this step.
    """
    evidence, changed, undecided = duals.evidence, False, duals.undecided
    if undecided and horizon is not None:
        ends = duals.count >= horizon
        if ends or duals.count % cycle(horizon) == 0:
            changed = evidence.decide()
            ends = ends or (duals.count >= EARLIEST * horizon and evidence.is_hopeless())
        if ends:
            duals.site_landed.copy_(1 - evidence.kept)
            duals.note_landed()
            changed = True
    evidence.plan(duals.count, undecided, horizon, duals.site_landed)
    return changed


@torch.no_grad()
def land(duals: Duals, horizon: float) -> bool:
    """Mark sites as landed if their gamma has stayed at 0 long enough. Returns whether there are any.

    Their lambda is set to minus the mean gradient at gamma = 0, so that it balances the loss.
    """
    if duals.config.mode != "strict" or duals.count % max(1, round(MEMORY * horizon / 4)):
        return False  # checked only from time to time, since reading the result waits for the device
    ready = (duals.waited > averaging_steps(horizon)) & (duals.site_landed == 0)
    if not bool(ready.any()):
        return False
    duals.lambda_.copy_(torch.where(ready, -duals.mean, duals.lambda_))
    duals.site_landed.add_(ready)
    duals.note_landed()
    return True


def averaging_steps(horizon: float) -> float:
    """Return the number of steps over which gradients are averaged, and after which a site with gamma = 0 lands."""
    return max(SHORTEST, MEMORY * horizon)


def _ratio(one: Tensor, other: Tensor) -> Tensor:
    """Return one / other, and 0 where ``other`` is 0 because no gradient has reached that branch."""
    return torch.where(other == 0, 0.0, one / other)


@dataclass
class PacedLoop(Loop):
    """A loop that moves gamma itself. gamma has no gradient during the optimizer's step, so the optimizer skips it."""

    def prepare(self, optimizer: Optimizer) -> None:
        self.ace.gamma.grad = None

    def undo(self, optimizer: Optimizer, *, stepped: bool) -> None:
        if self.ace.gamma.grad is None:  # otherwise the script has computed a new gradient, which is kept
            self.ace.gamma.grad = self.gradient

    def advance(self, optimizer: Optimizer, before: Tensor, gradient: Tensor) -> None:
        ace, duals = self.ace, self.ace.duals
        gradient = gradient / self.factor(optimizer)
        ace.budget.inspect(optimizer, ace.root, duals.count + 1)
        horizon = ace.budget.horizon(duals.count)
        auto, kept = duals.config.mode == "auto", duals.evidence.kept_sites
        with skip_unless_finite(duals, ace.gamma, before, gradient):
            # In mode auto gamma moves three times as fast, so that it has settled long before the decision.
            ace.gamma.copy_(advance(duals, before, gradient, horizon / 3 if auto and horizon is not None else horizon))
            if auto and duals.undecided:
                duals.evidence.add(before, gradient, ace.session.observed.loss)
        if auto:
            settled = duals.evidence.settle()
            changed = explore(duals, horizon) or settled
        else:
            changed = horizon is not None and land(duals, horizon)
            if duals.evidence.holdout:
                duals.evidence.plan(duals.count, False, None, duals.site_landed)
        if changed:
            ace.gamma.masked_fill_(duals.site_landed > 0, 0.0)
            # A branch that helps gets at least its initial gamma; from now on it is trained as in resilient mode.
            for number in duals.evidence.kept_sites - kept:
                ace.gamma[number].clamp_(min=abs(duals.config.gamma_start))
            ace.sync()
