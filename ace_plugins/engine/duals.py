"""The dual loop's arithmetic, vectorised over sites: lambda, the slack u, and what moves them.

Nothing here knows of models, optimizers or hooks. One step of the paper's loop is

    gamma's gradient += duals.pull(gamma)          before the script's optimizer steps
    duals.ascend(gamma_before, eta_p)              after it

with ``gamma_before`` the gamma that the gradient was taken at. The loop that fits the run is in ``pace``.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from ..settings.config import Config

ADAM_EPS = 1e-8
DIVERGED_AFTER = 3
"""Steps in a row without a finite gradient after which a run has diverged; in a very short one, half of its steps."""
BEYOND_HALF = 65_505
"""The least number of steps that half precision cannot hold."""


class Duals(nn.Module):
    """lambda and u of every site, and the dual optimizer's state, all buffers of shape [sites].

    The buffers are the same whatever the mode and the dual optimizer, so that a checkpoint's keys never
    depend on settings.
    """

    lambda_: Tensor
    u: Tensor
    steps: Tensor
    mean: Tensor
    square: Tensor
    error: Tensor
    skipped: Tensor | None = None
    """Steps whose gradient was not finite, on the device: how many, and how many of them were the last ones."""
    skipped_told: bool = False

    def __init__(self, sites: int, config: Config, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.config = config
        zeros = torch.zeros(sites, dtype=dtype, device=device)
        self.register_buffer("lambda_", zeros.clone())
        self.register_buffer("u", zeros + (config.u_init if config.mode == "resilient" else 0.0))
        self.register_buffer("steps", torch.zeros((), device=device))
        self.register_buffer("mean", zeros.clone())
        self.register_buffer("square", zeros.clone())
        self.register_buffer("error", zeros.clone())
        self.count = 0
        """``steps`` as a Python number, so that no step has to wait for the device to know it."""
        self.landed_sites: frozenset[int] = frozenset()
        """Sites that are upstream's for good, likewise."""

    @property
    def landed(self) -> bool:
        """Every gamma is 0 for good."""
        return len(self.landed_sites) == len(self.lambda_)

    def tick(self) -> None:
        """One more step."""
        self.count += 1
        self.steps.fill_(self.count)

    def count_skipped(self, skipped: Tensor) -> None:
        """Whether the step that ends now was one whose gradient is not finite; a scalar."""
        one = skipped.float()
        if self.skipped is None or self.skipped.device != one.device:
            self.skipped = torch.zeros(2, device=one.device)
        self.skipped[1] *= one
        self.skipped += one

    def note_landed(self) -> None:
        """Which sites have landed, read off the buffers."""
        if self.config.paced and self.config.lands:
            self.landed_sites = frozenset((self.error < 0).nonzero().flatten().tolist())
        else:
            self.landed_sites = frozenset(range(len(self.lambda_)) if self.config.has_landed(self.count) else ())

    def snapshot(self, gamma: Tensor) -> Tensor:
        """gamma, lambda and u of every site, [3, sites], on their device: nothing waits for it."""
        return torch.stack([gamma.detach(), self.lambda_, self.bound])

    def price(self) -> Any:
        """rho, in units of the loss."""
        return self.config.price(self.error.mean().sqrt() if self.config.loop == "paced" else 1.0)

    def held(self) -> Tensor:
        """How hard lambda pulls at each site, in units of the loss's gradient there; 0 where there is none.

        NaN where that gradient has not been finite for a while.
        """
        held = torch.where(self.square == 0, 0.0, self.lambda_.abs() / self.square.sqrt())
        if self.skipped is None:
            return held
        return torch.where(self.skipped[1] >= min(DIVERGED_AFTER, (self.count + 1) // 2), torch.nan, held)

    @property
    def bound(self) -> Tensor:
        """What |gamma| may be, [sites]: u, which is learnt, or epsilon, which is a setting and no state."""
        return torch.full_like(self.u, self.config.epsilon) if self.config.mode == "bounded" else self.u

    def slack(self, gamma: Tensor) -> Tensor:
        """The constraint's value: 0 wanted in strict mode, at most 0 in the others."""
        if self.config.mode == "strict":
            return gamma
        return gamma.abs() - (self.config.epsilon if self.config.mode == "bounded" else self.u)

    @torch.no_grad()
    def pull(self, gamma: Tensor) -> Tensor:
        """What the constraints add to gamma's gradient, shape [sites]."""
        c = self.config.augmented
        if self.config.mode == "strict":
            return self.lambda_ + 2 * c * gamma if c else self.lambda_
        force = self.lambda_
        if c:
            # An inequality that holds is not penalised: only the violated part is squared.
            force = force + 2 * c * self.slack(gamma).clamp_min(0)
        return force * gamma.sign()

    @torch.no_grad()
    def ascend(self, gamma: Tensor, eta_p: float | Tensor) -> None:
        """Move lambda, and u in resilient mode, from the gamma before the step and the live primal rate."""
        self.tick()
        self.note_landed()
        slack = self.slack(gamma)
        lambda_before = self.lambda_.clone() if self.config.mode == "resilient" else self.lambda_
        self._move(slack, self.config.dual_rate(eta_p))
        if self.config.mode == "strict":
            return
        self.lambda_.clamp_(min=0)
        if self.config.mode == "resilient":
            descent = self.price() * self.u - lambda_before
            if self.config.augmented:
                descent -= 2 * self.config.augmented * slack.clamp_min(0)
            self.u.sub_(eta_p * descent).clamp_(min=0)

    def _move(self, slack: Tensor, rate: float | Tensor) -> None:
        if self.config.dual_optimizer == "sgd":
            self.lambda_ += rate * slack
        else:
            beta1, beta2 = self.config.adam_beta1, self.config.adam_beta2
            self.mean.lerp_(slack, 1 - beta1)
            self.square.mul_(beta2).addcmul_(slack, slack, value=1 - beta2)
            corrected = (self.square / (1 - beta2**self.count)).sqrt_().add_(ADAM_EPS)
            self.lambda_ += rate / (1 - beta1**self.count) * (self.mean / corrected)

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        self.read_buffers()

    def read_buffers(self) -> None:
        """The buffers come from a checkpoint or from another process: what is derived from them follows."""
        if not self.steps.is_meta:
            steps = float(self.steps)
            # Of a checkpoint in half precision that cannot hold them it is known how many they are at least.
            self.count = round(steps) if math.isfinite(steps) else BEYOND_HALF
            self.steps.fill_(self.count)
            if self.config.paced and not self.config.lands:  # what is told of a landing is no price of slack
                self.error.copy_(torch.where(self.error < 0, self.square, self.error))
            self.note_landed()
