"""Evidence that a branch lowers the loss on samples that did not train it, and the test that decides on each site.

The judges are the training samples that do not train the branches (see `holdout`). Some steps are probes: there the
model leaves out its undecided branches for the judges, but not for the other samples. Let g0 be the gradient of the
judges' loss with respect to gamma in a probe, without the branch. Let g1 be the mean of this gradient over the steps
since the previous probe, with the branch. By the trapezoidal rule

    b = -gamma (g0 + g1) / 2

is the amount by which a site's branch lowers the loss of the judges. It is exact if the loss is quadratic in gamma, and
the sum over the sites is the benefit of all branches together. The gradient g1 alone would be no evidence: it is 0 at
the best gamma, however much the branch helps.

Each b of a site is divided by the root mean square of the earlier ones, which gives x. With S = sum x and
V = sum x^2, the e-value

    M = 2 sqrt(r / (V + r)) exp(S^2 / (2 (V + r))) Phi(S / sqrt(V + r)),        r = PRIOR

ever exceeds 1 / p with probability at most p, provided that every x, given the earlier ones, is distributed
symmetrically about 0 or a lower value (de la Pena 1999; Ville's inequality). This is the case if the branch does not
help. So the test may be evaluated after every probe. Over all sites, the e-BH procedure (Wang and Ramdas 2022) keeps
the expected share of wrongly kept sites among the kept ones at most LEVEL, however the sites depend on each other.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from ..settings.config import LEVEL
from .holdout import BITS

PROBES = 128  # number of probes until mode auto must decide, for a run of any length
PRIOR = 4.0  # r in the e-value. The test is most sensitive when V is 10 to 20 times as large.
MEMORY = 8  # number of probes over which the size of b is averaged
FIRST = 16  # number of probes that only measure the size of b, in every second step at the start of the run
RECENT = 32  # number of probes over which the benefit of all branches together is averaged
DEVIATIONS = 2.33  # number of standard errors from the mean benefit to its upper confidence limit, of 99 %
LIMIT = 4.0  # limit of |x|, so that a single outlier decides nothing


class Evidence(nn.Module):
    """Evidence that each site's branch lowers the held-out loss, as running sums in buffers of shape [sites]."""

    cycle_sum: Tensor  # sum of -gamma times its gradient over the steps since the last probe
    cycle_steps: Tensor  # number of steps since the last probe
    size: Tensor  # running mean of b^2
    total: Tensor  # S, the sum of x
    square: Tensor  # V, the sum of x^2
    probes: Tensor  # number of completed probes
    benefit: Tensor  # sum of b, each divided by ``joint_loss``; 0 if the loss is unknown
    joint: Tensor  # running mean of the sum of b over all undecided sites, since the last decision
    joint_square: Tensor  # running mean of the square of this sum
    joint_loss: Tensor  # running mean of the loss of the judges without branches; 0 if the loss is unknown
    joint_probes: Tensor  # number of probes in these means
    kept: Tensor  # 1 for sites that the test has decided to keep, else 0
    settled: Tensor  # 1 for kept sites with constant statistics in batch normalisation; see `Ace.set_statistics`
    probing: Tensor  # 1 for sites that leave out their branch for the judges in the next step, else 0
    batch_draw: Tensor  # decides whether the next batch judges or trains as a whole, if samples are unknown; a scalar

    SUMS = (
        *("cycle_sum", "cycle_steps", "size", "total", "square", "probes", "benefit"),
        *("joint", "joint_square", "joint_loss", "joint_probes"),
    )

    def __init__(self, sites: int, holdout: float, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.holdout = holdout  # share of the training samples that judge gamma
        for name in (*self.SUMS, "kept", "settled", "probing"):
            self.register_buffer(name, torch.zeros(sites, dtype=dtype, device=device))
        self.register_buffer("batch_draw", torch.zeros((), device=device))
        self.kept_sites: frozenset[int] = frozenset()  # indices, read without waiting for the device
        self.settled_sites: frozenset[int] = frozenset()
        self._changes = _count_changes(self.kept)

    def sums(self) -> list[Tensor]:
        """Return the buffers that every step may change."""
        return [self._buffers[name] for name in self.SUMS]  # type: ignore[misc]

    @torch.no_grad()
    def add(self, gamma: Tensor, gradient: Tensor, loss: Tensor | None) -> None:
        """Add the gradient of a step. In a probe this completes one value of b for every undecided site."""
        lowered = -gamma * gradient
        probe = self.probing
        b = probe * (lowered + self.cycle_sum / self.cycle_steps.clamp_min(1)) / 2
        known = (self.probes >= FIRST) & (self.size > 0)
        x = torch.where(known, b / self.size.sqrt().clamp_min(torch.finfo(b.dtype).tiny), 0.0).clamp(-LIMIT, LIMIT)
        self.total.add_(x)
        self.square.add_(x.square())
        self.size.lerp_(b.square(), probe / (self.probes + 1).clamp_max(MEMORY))
        self.probes.add_(probe)
        self.joint_probes.add_(probe)
        weight = probe / self.joint_probes.clamp(1, RECENT)
        together = b.sum().expand_as(b)
        self.joint.lerp_(together, weight)
        self.joint_square.lerp_(together.square(), weight)
        if loss is not None and self.holdout:
            # The judges' loss without branches is their loss with branches plus the benefit of the branches.
            without = self.holdout * loss.to(b).abs() + together.clamp_min(0)
            self.joint_loss.lerp_(without, weight)
            # Divided by the mean loss. Division by the loss of the same step would give negative values more weight.
            self.benefit.add_((b / self.joint_loss).nan_to_num(0.0, 0.0, 0.0))
        self.cycle_sum.add_(lowered).mul_(1 - probe)
        self.cycle_steps.add_(1).mul_(1 - probe)

    def plan(self, count: int, explores: bool, horizon: float | None, landed: Tensor) -> None:
        """Decide whether step ``count`` + 1 is a probe. If samples are unknown, also draw the role of its batch."""
        steps = 2 if count < 2 * FIRST else 0 if horizon is None else cycle(horizon)
        probe = explores and steps > 0 and (count + 1) % steps == 0
        self.probing.copy_((1 - self.kept) * (1 - landed) if probe else torch.zeros_like(self.kept))
        self.batch_draw.fill_(math.floor(count * 0.6180339887498949 % 1 * 2**BITS))

    def log_e_values(self) -> Tensor:
        """Return the logarithm of the e-value of every site, [sites]."""
        width = self.square + PRIOR
        z = self.total / width.sqrt()
        found: Tensor = math.log(2) + 0.5 * (PRIOR / width).log() + z.square() / 2 + torch.special.log_ndtr(z)
        return found

    @torch.no_grad()
    def decide(self) -> bool:
        """Mark sites with enough evidence as kept. Returns True if any was not kept before. Waits for the device."""
        found = torch.where(self.kept > 0, torch.inf, self.log_e_values())
        values = sorted(found.tolist(), reverse=True)
        passed = [value for rank, value in enumerate(values, 1) if value >= math.log(len(values) / (rank * LEVEL))]
        before = self.kept_sites
        if passed:
            self.kept.copy_(found >= passed[-1])
            self.read_buffers()
        if changed := self.kept_sites != before:
            self.joint_probes.zero_()  # the kept branches no longer count: the means begin again
        return changed

    def settle(self) -> bool:
        """Mark the sites that were kept before this step as settled. Returns whether any of them are new."""
        changed = self.settled_sites != self.kept_sites
        if changed:
            self.settled.copy_(self.kept)
            self.settled_sites = self.kept_sites
        return changed

    def limits(self) -> Tensor:
        """Return the upper confidence limit of the benefit of all undecided branches together, [sites].

        The limit has the unit of the loss and covers the most recent probes. It is NaN for sites with too few probes
        since the last decision.
        """
        # A running mean with weight 1 / n is as precise as a plain mean of 2 n - 1 values.
        count = self.joint_probes.clamp_max(2 * RECENT - 1)
        error = ((self.joint_square - self.joint.square()).clamp_min(0) / (count - 1).clamp_min(1)).sqrt()
        return torch.where(count > FIRST, self.joint + DEVIATIONS * error, torch.nan)

    def is_hopeless(self) -> bool:
        """Return whether the undecided branches raise the loss of the judges. Waits for the device."""
        undecided = (self.kept == 0) & (self.joint_probes > 0)
        return bool(((self.limits() < 0) | ~undecided).all() & undecided.any())

    def summarise(self) -> dict[str, list[float]]:
        """Return the outcome of the test as numbers per site. Waits for the device.

        Returns:
            ``log_e``: logarithm of the e-value; ``benefit``: mean reduction of the judges' loss by the branch, as a
            share of their loss without branches, or NaN if unknown; ``limit``: upper confidence limit of this reduction
            by all undecided branches together, over the last probes, or NaN; ``kept``: 1 for kept sites; ``used``: 0
            for sites that never had a gradient, else 1; ``probes``: number of measurements.
        """
        known = self.joint_loss > 0
        limit = torch.where(known, self.limits() / self.joint_loss, torch.nan)
        mean = torch.where(known, self.benefit / self.probes.clamp_min(1), torch.nan)
        used = (self.size > 0) | (self.cycle_sum != 0) | (self.probes == 0)
        rows = {"log_e": self.log_e_values(), "benefit": mean, "limit": limit}
        rows |= {"kept": self.kept, "used": used, "probes": self.probes}
        return dict(zip(rows, torch.stack([row.to(mean) for row in rows.values()]).tolist(), strict=True))

    def read_buffers(self) -> None:
        """Update ``kept_sites`` from the buffer."""
        if not self.kept.is_meta:
            self.kept_sites = frozenset(self.kept.nonzero().flatten().tolist())
            self.settled_sites = frozenset(self.settled.nonzero().flatten().tolist())
            self._changes = _count_changes(self.kept)

    def notice_changes(self) -> None:
        """Update ``kept_sites`` if other code has changed the buffer in place, as AveragedModel does in each update."""
        if _count_changes(self.kept) != self._changes:
            self.read_buffers()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *rest)
        self.read_buffers()


def _count_changes(tensor: Tensor) -> int:
    """Return the number of changes of a tensor in place, which PyTorch counts except in inference mode."""
    return 0 if tensor.is_inference() else tensor._version


def cycle(horizon: float) -> int:
    """Return the number of steps from one probe to the next, given the horizon in steps."""
    return max(2, round(horizon / PROBES))
