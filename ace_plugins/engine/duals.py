"""The duals of all sites, lambda and the bound u, and the paper's update of them, computed for all sites at once.

One step of the paper's loop is

    gamma's gradient += duals.pull(gamma)          before the script's optimizer steps
    duals.ascend(gamma_before, eta_p)              after the optimizer's step

where ``gamma_before`` is the gamma at which the gradient was computed, and ``eta_p`` the learning rate of gamma's
parameter group. The paced loop is in ``paced_loop``.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import torch
from torch import Tensor, nn

from ..settings.config import PRICE, Config
from .evidence import Evidence

ADAM_EPS = 1e-8
DIVERGED_AFTER = 3  # number of steps in a row, with a non-finite gradient, after which a run counts as diverged


class Duals(nn.Module):
    """lambda and u of every site, with averages and counters for updates, as buffers of shape [sites] in all modes."""

    lambda_: Tensor
    u: Tensor
    steps: Tensor  # number of steps made, a scalar
    mean: Tensor  # running mean of the constraint (paper's loop, adam), or of the loss's gradient at gamma (paced)
    square: Tensor  # running mean of the square of the quantity that ``mean`` averages
    run_square: Tensor  # mean of the squared gradient since the run began; scales rho (paced loop)
    waited: Tensor  # number of steps for which gamma has stayed at 0 (paced loop, strict mode)
    site_landed: Tensor  # 1 for sites that have landed: their gamma stays 0 (paced loop); else 0
    skipped: Tensor | None = None  # [2]: steps with a non-finite gradient, in total and in a row at the end
    warned: bool = False  # true once the user was warned of steps with a non-finite gradient

    def __init__(self, sites: int, config: Config, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.config = config
        zeros = torch.zeros(sites, dtype=dtype, device=device)
        self.register_buffer("lambda_", zeros.clone())
        self.register_buffer("u", zeros + (config.u_init if config.mode == "resilient" else 0.0))
        self.register_buffer("steps", torch.zeros((), device=device))
        for name in ("mean", "square", "run_square", "waited", "site_landed"):
            self.register_buffer(name, zeros.clone())
        self.evidence = Evidence(sites, config.held_out, dtype=dtype, device=device)
        self.count = 0  # ``steps`` as a Python number, which can be read without waiting for the device
        self.landed_sites: frozenset[int] = frozenset()  # indices, read without waiting for the device
        self.landed = False  # true if all sites have landed

    def moving(self) -> list[Tensor]:
        """Return the buffers that a step changes under the current settings."""
        config, found = self.config, [self.lambda_]
        if config.paced or config.dual_optimizer == "adam":
            found += [self.mean, self.square]
        if config.paced and config.mode == "strict":
            found.append(self.waited)
        if config.mode in ("resilient", "auto"):
            found += [self.u, self.run_square]
        return found + self.evidence.sums() if config.mode == "auto" else found

    def tick(self) -> None:
        """Count one more step."""
        self.count += 1
        self.steps.fill_(self.count)

    def count_skipped(self, skipped: Tensor) -> None:
        """Count the current step as skipped if ``skipped``, a scalar tensor, is true."""
        one = skipped.float()
        if self.skipped is None or self.skipped.device != one.device:
            self.skipped = torch.zeros(2, device=one.device)
        self.skipped[1] *= one
        self.skipped += one

    def note_landed(self) -> None:
        """Set ``landed_sites`` and ``landed`` from the buffers and the number of steps."""
        if self.config.paced and self.config.may_land:
            self.landed_sites = frozenset(self.site_landed.nonzero().flatten().tolist())
        else:
            self.landed_sites = frozenset(range(len(self.lambda_)) if self.config.has_landed(self.count) else ())
        self.landed = len(self.landed_sites) == len(self.lambda_)

    @property
    def undecided(self) -> bool:
        """True if mode auto has not yet decided on every site."""
        return len(self.landed_sites | self.evidence.kept_sites) < len(self.lambda_)

    def snapshot(self, gamma: Tensor) -> Tensor:
        """Return gamma, lambda and `bound` of every site, [3, sites], without waiting for the device."""
        return torch.stack([gamma.detach(), self.lambda_, self.bound])

    def price(self) -> Any:
        """Return rho, the weight of the penalty on u, in units of the loss."""
        return PRICE.times(self.config.rho, self.run_square.mean().sqrt() if self.config.loop == "paced" else 1.0)

    @property
    def diverged(self) -> bool:
        """True if the last `DIVERGED_AFTER` steps had a non-finite gradient. Waits for the device."""
        # In a run that is shorter than twice DIVERGED_AFTER, half of its steps are enough.
        return self.skipped is not None and bool(self.skipped[1] >= min(DIVERGED_AFTER, (self.count + 1) // 2))

    @property
    def bound(self) -> Tensor:
        """The bound on |gamma|, [sites]: epsilon in bounded mode (a setting, not saved in checkpoints), otherwise u."""
        return torch.full_like(self.u, self.config.epsilon) if self.config.mode == "bounded" else self.u

    def slack(self, gamma: Tensor) -> Tensor:
        """Return the constraint's value, [sites]. It holds if this is 0 (strict mode) or at most 0 (other modes)."""
        return gamma if self.config.mode == "strict" else gamma.abs() - self.bound

    @torch.no_grad()
    def pull(self, gamma: Tensor) -> Tensor:
        """Return the gradient of the constraints at gamma, [sites], which is added to that of the loss."""
        c, slack = self.config.augmented, self.slack(gamma)
        if self.config.mode == "strict":
            return self.lambda_ + 2 * c * slack
        # An inequality that holds is not penalised: only the violated part is squared.
        return (self.lambda_ + 2 * c * slack.clamp_min(0)) * gamma.sign()

    @torch.no_grad()
    def ascend(self, gamma: Tensor, eta_p: float | Tensor) -> None:
        """Update lambda, and u in resilient mode, given gamma before the step and its group's current learning rate."""
        self.tick()
        self.note_landed()
        config, slack, lambda_before = self.config, self.slack(gamma), self.lambda_.clone()
        rate = config.dual_rate(eta_p)
        if config.dual_optimizer == "sgd":
            self.lambda_ += rate * slack
        else:
            beta1, beta2 = config.adam_beta1, config.adam_beta2
            self.mean.lerp_(slack, 1 - beta1)
            self.square.mul_(beta2).addcmul_(slack, slack, value=1 - beta2)
            corrected = (self.square / (1 - beta2**self.count)).sqrt_().add_(ADAM_EPS)
            self.lambda_ += rate / (1 - beta1**self.count) * (self.mean / corrected)
        if config.mode != "strict":
            self.lambda_.clamp_(min=0)
        if config.mode == "resilient":
            descent = self.price() * self.u - lambda_before - 2 * config.augmented * slack.clamp_min(0)
            self.u.sub_(eta_p * descent).clamp_(min=0)

    def migrate(self, state: MutableMapping[str, Any], prefix: str) -> None:
        """Convert a checkpoint of version 0.1.0 in place.

        Such a checkpoint has no evidence, and stores three quantities in one buffer, ``error``. Checkpoints of
        development versions lack some of these buffers.
        """
        if f"{prefix}lambda_" in state:
            state.pop(f"{prefix}evidence.benefit_square", None)
            for name, buffer in self.evidence.named_buffers(prefix=f"{prefix}evidence"):
                state.setdefault(name, torch.zeros_like(buffer))
        error = state.pop(f"{prefix}error", None)
        if not isinstance(error, Tensor):
            return
        known = error if self.config.paced else torch.zeros_like(error)
        meaning = "waited" if self.config.lands else "run_square"
        # ``error`` was -1 at landed sites, so the number of steps for which their gamma was 0 before is unknown.
        found = {"run_square": torch.zeros_like(error), "waited": torch.zeros_like(error), meaning: known.abs()}
        found["site_landed"] = (known < 0).to(error.dtype)
        state.update({prefix + name: value for name, value in found.items()})

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        self.migrate(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *rest)
        self.read_buffers()

    def read_buffers(self) -> None:
        """Update the values derived from the buffers, after they were loaded or copied from another rank."""
        if not self.steps.is_meta:
            steps = float(self.steps)
            self.count = round(steps) if 0 <= steps < 2**53 else 2**16  # overflows in half-precision checkpoints
            self.steps.fill_(self.count)
            if self.config.paced and not self.config.may_land:  # sites that landed in strict mode train again
                self.run_square.copy_(torch.where(self.site_landed > 0, self.square, self.run_square))
                self.site_landed.zero_()
                self.waited.zero_()
            self.evidence.read_buffers()
            self.note_landed()
