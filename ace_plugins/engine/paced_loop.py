"""The loop that fits the run: its pace comes from the budget, and its units from the loss's own gradient.

Under the paper's loop the script's optimizer moves gamma, so the learning rate decides how fast, and lambda is compared
with a loss of unknown scale. Here gamma moves by itself. With g the loss's gradient at gamma, m its running mean, s its
running root mean square, and H the horizon in steps, one step is

    lambda / s += GROWTH * slack / H                         slack: gamma (strict), |gamma| - u (the others)
    gamma      -= SPEED * clip((m + lambda) / s, -1, 1) / H  in strict mode in units of where gamma started
    u          += GROWTH * (lambda / rho - u) / H            resilient

So the scale of the loss drops out, and so do optimizer, learning rate and schedule. |m| is at most s: lambda outweighs
any branch after a sixth of the horizon, and strict gammas arrive between 0.8 and 1 horizons, those of useful branches
last. A gamma that arrives at 0 stays there. In the other modes DAMPING * slack is added to lambda / s, and lambda waits
while gamma goes at full speed, so that gamma comes to rest at its bound instead of swinging about it.

A step of the loops in which gamma moves by itself: at the run's pace, or by a schedule.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from .duals import Duals
from .loop import Guard, Owned

SPEED = 1.2
"""How far gamma goes in a horizon, at most."""
GROWTH = 12.0
"""How much lambda / s grows in a horizon at a slack of 1, and how often u could follow it in that time."""
DAMPING = 4.0
"""How much slack itself adds to lambda / s, outside of strict mode."""
MOST = 2.0
"""|lambda| / s is at most this: twice what can stand against it."""
MEMORY = 0.04
"""The share of the horizon over which gradients are averaged."""
SHORTEST = 5.0
"""Steps over which they are averaged at least."""


@torch.no_grad()
def advance(duals: Duals, gamma: Tensor, gradient: Tensor, horizon: float | None) -> Tensor:
    """The next gamma [sites], from this one and the loss's gradient at it. Moves lambda and u too.

    Without a horizon, gradients are averaged and nothing moves: it is not yet known how long the run is.
    """
    config = duals.config
    duals.tick()
    size_before = duals.square.sqrt()
    memory = averaged_over(horizon or 0.0)
    strict = config.mode == "strict"
    waited = duals.error if strict else torch.zeros_like(gamma)  # steps that a gamma has been at 0
    # Of a site that has landed there is no gradient, and what it was held with stays.
    usual = (waited >= 0).to(gamma.dtype) / min(duals.count, memory)
    duals.square.lerp_(gradient.square(), usual)
    # At 0 the mean begins anew: it is what lambda has to hold against.
    duals.mean.lerp_(gradient, torch.where(waited > 0, 1 / waited.clamp_min(1), usual))
    if horizon is None:
        duals.lambda_.mul_(_ratio(duals.square.sqrt(), size_before))
        return gamma
    size = duals.square.sqrt()
    drive, push = _ratio(duals.mean, size), _ratio(duals.lambda_, size_before)
    if strict:
        push = (push + GROWTH / horizon * gamma / config.gamma_unit).clamp(-MOST, MOST)
        force = drive + push
    else:
        slack = duals.slack(gamma)
        hold = push + DAMPING * slack
        # lambda waits while gamma goes as fast as it can anyway: it would only carry it too far.
        waits = (drive + hold * gamma.sign()).abs() >= 1
        push = torch.where(waits, push, push + GROWTH / horizon * slack).clamp(0, MOST)
        # A gamma at 0 leaves it only if the loss pulls harder than lambda: that is the subgradient of |gamma|.
        away = drive.sign() * (drive.abs() - hold.clamp_min(0)).clamp_min(0)
        force = torch.where(gamma == 0, away, drive + hold * gamma.sign())
    # A branch that no gradient reaches is of no use to the loss.
    force = torch.where(size == 0, gamma.sign(), force)
    moved = gamma - SPEED * config.gamma_unit / horizon * force.clamp(-1, 1)
    moved = torch.where(moved * gamma < 0, 0.0, moved)
    duals.lambda_.copy_(push * size)
    if strict:
        arrived = ((moved == 0) & (gamma != 0)) | (waited != 0)
        moved = torch.where(arrived, 0.0, moved)
        waited.add_((arrived & (waited >= 0)).to(waited.dtype))
    elif config.mode == "resilient":
        # One price for all sites, so that their slacks can be compared; from all gradients of the run, since those of
        # late in training vanish, and slack would cost nothing.
        duals.error.lerp_(gradient.square(), 1 / duals.count)
        duals.u.lerp_(_ratio(duals.lambda_, torch.as_tensor(duals.price())), min(1.0, GROWTH / horizon))
    return moved


@torch.no_grad()
def land(duals: Duals, horizon: float) -> bool:
    """Sites whose gamma has stayed at 0 long enough are upstream's from here on. Says whether there are new ones.

    Their lambda becomes what would hold gamma there, the mean of the gradient at 0 turned round.
    """
    if duals.config.mode != "strict" or duals.count % max(1, round(MEMORY * horizon / 4)):
        return False  # looked at now and then: asking the device is waiting for it
    ready = duals.error > averaged_over(horizon)
    if not bool(ready.any()):
        return False
    duals.lambda_.copy_(torch.where(ready, -duals.mean, duals.lambda_))
    duals.error.copy_(torch.where(ready, -1.0, duals.error))
    duals.note_landed()
    return True


def averaged_over(horizon: float) -> float:
    """Steps over which gradients are averaged, and that a gamma waits at 0 before its site lands."""
    return max(SHORTEST, MEMORY * horizon)


def _ratio(one: Tensor, other: Tensor) -> Tensor:
    """one / other, and 0 where there is nothing to divide by: a branch that no loss has reached."""
    return torch.where(other == 0, 0.0, one / other)


@dataclass
class PacedLoop(Owned):
    """gamma at a pace that follows from the run's budget: the optimizer passes over it."""

    def take(self, optimizer: Optimizer) -> None:
        self.ace.gamma.grad = None

    def give_back(self, optimizer: Optimizer, *, stepped: bool) -> None:
        if self.ace.gamma.grad is None:  # otherwise the script has computed another since
            self.ace.gamma.grad = self.grad

    def move(self, optimizer: Optimizer, before: Tensor, gradient: Tensor) -> None:
        ace = self.ace
        scale = getattr(optimizer, "grad_scale", None)
        if scale is not None:
            gradient = gradient / scale  # a fused optimizer divides by it inside its kernel
        if optimizer.param_groups[self.group].get("maximize"):
            gradient = -gradient
        ace.budget.look_at(optimizer, ace.duals.count + 1)
        horizon = ace.budget.horizon(ace.duals.count)
        guard = Guard(ace.duals, ace.gamma, before, gradient)
        ace.gamma.copy_(advance(ace.duals, before, gradient, horizon))
        guard.put_back()
        if horizon is not None and land(ace.duals, horizon):
            ace.sync()
