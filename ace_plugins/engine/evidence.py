"""Evidence that a branch lowers the loss on samples that did not train it, and the test that decides on each site.

The judges are the training samples that do not train the branches (see `holdout`). From time to time a step is a probe:
the judges then see the model without its undecided branches. Let g0 be the gradient of the loss at gamma in a probe, and
g1 the mean gradient in the steps since the probe before. By the trapezoidal rule

    b = -gamma (g0 + g1) / 2

is the amount by which a site's branch lowers the loss of the judges. It is exact if the loss is quadratic in gamma, and
the sum over the sites is the benefit of all branches together. The gradient g1 alone would be no evidence: it is 0 at
the best gamma, however much the branch helps.

The values x = b / (size of the values before) of a site are tested one by one as they arrive. With S = sum x and
V = sum x^2, the e-value

    M = 2 sqrt(r / (V + r)) exp(S^2 / (2 (V + r))) Phi(S / sqrt(V + r)),        r = PRIOR

exceeds 1 / p at any time with probability at most p if every x is symmetric about a value of at most 0 (de la Pena 1999,
Ville). So the test may be looked at after every probe. Over all sites, the e-BH procedure (Wang and Ramdas 2022) keeps
the expected share of wrong decisions at most LEVEL, whatever the dependence between the sites.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

PROBES = 64
"""Number of probes in the exploration of a run, however long it is."""
PRIOR = 4.0
"""Value of V at which the test is most sensitive, divided by about ten."""
LEVEL = 0.001
"""Level of the test. It is strict because samples that return in every epoch are not independent."""
MEMORY = 8
"""Number of probes over which the size of b is averaged."""
FIRST = 2
"""Number of probes that only measure the size of b."""
LIMIT = 4.0
"""Limit of |x|, so that a single outlier decides nothing."""


class Evidence(nn.Module):
    """The evidence on every site, in buffers of shape [sites]."""

    cycle_sum: Tensor
    """Sum of -gamma g1 over the steps since the last probe."""
    cycle_steps: Tensor
    """Number of steps since the last probe."""
    size: Tensor
    """Running mean of b^2."""
    total: Tensor
    """S, the sum of x."""
    square: Tensor
    """V, the sum of x^2."""
    probes: Tensor
    """Number of values of b."""
    benefit: Tensor
    """Sum of b, each divided by the loss of all judges in its step."""
    benefit_square: Tensor
    """Sum of the squares of the terms of ``benefit``."""
    kept: Tensor
    """1 for sites that the test has decided to keep, else 0."""
    probing: Tensor
    """1 for sites whose branch the judges do not see in the next step, else 0."""
    batch_draw: Tensor
    """Draw of the next batch, which decides its part if samples are unknown. A scalar; see `holdout.draw`."""

    SUMS = ("cycle_sum", "cycle_steps", "size", "total", "square", "probes", "benefit", "benefit_square")

    def __init__(self, sites: int, holdout: float, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.holdout = holdout
        """Share of the training samples that judge gamma."""
        for name in (*self.SUMS, "kept", "probing"):
            self.register_buffer(name, torch.zeros(sites, dtype=dtype, device=device))
        self.register_buffer("batch_draw", torch.zeros((), device=device))
        self.kept_sites: frozenset[int] = frozenset()
        """Indices of the kept sites, readable without waiting for the device."""

    def sums(self) -> list[Tensor]:
        """Return the buffers that every step may change."""
        return [self._buffers[name] for name in self.SUMS]  # type: ignore[misc]

    @property
    def share(self) -> Tensor:
        """Share of the samples that judge each site, [sites]: 0 for kept sites, whose branch all samples train."""
        return self.holdout * (1 - self.kept)

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
        if loss is not None and self.holdout:
            relative = (b / (self.holdout * loss.to(b).abs())).nan_to_num(0.0, 0.0, 0.0)
            self.benefit.add_(relative)
            self.benefit_square.add_(relative.square())
        self.cycle_sum.add_(lowered).mul_(1 - probe)
        self.cycle_steps.add_(1).mul_(1 - probe)

    def plan(self, count: int, explores: bool, horizon: float | None, landed: Tensor) -> None:
        """Prepare the step after ``count`` steps: it may be a probe, and its batch may judge as a whole."""
        probe = explores and horizon is not None and (count + 1) % cycle(horizon) == 0
        self.probing.copy_((1 - self.kept) * (1 - landed) if probe else torch.zeros_like(self.kept))
        self.batch_draw.fill_(math.floor(count * 0.6180339887498949 % 1 * 2**20))

    def log_e_values(self) -> Tensor:
        """Return the logarithm of the e-value of every site, [sites]."""
        width = self.square + PRIOR
        z = self.total / width.sqrt()
        return math.log(2) + 0.5 * (PRIOR / width).log() + z.square() / 2 + torch.special.log_ndtr(z)

    @torch.no_grad()
    def decide(self) -> bool:
        """Keep the sites that have enough evidence now. Returns whether there are new ones. Waits for the device."""
        found = self.log_e_values()
        found = torch.where(self.kept > 0, torch.inf, found)
        count = len(found)
        ordered = found.sort(descending=True).values
        needed = math.log(count / LEVEL) - torch.arange(1, count + 1, device=found.device).log()
        passed = int(
            torch.cat([(ordered >= needed).nonzero().flatten() + 1, torch.zeros(1, device=found.device)]).max()
        )
        new = (found >= ordered[passed - 1]) & (self.kept == 0) if passed else torch.zeros_like(found, dtype=torch.bool)
        if not bool(new.any()):
            return False
        self.kept.add_(new)
        self.read_buffers()
        return True

    def read_buffers(self) -> None:
        """Update ``kept_sites`` from the buffer."""
        if not self.kept.is_meta:
            self.kept_sites = frozenset(self.kept.nonzero().flatten().tolist())

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        # Checkpoints of versions before 0.3 have no evidence.
        if not any(key.startswith(prefix) for key in state_dict):
            state_dict.update({prefix + name: torch.zeros_like(value) for name, value in self._buffers.items()})
        super()._load_from_state_dict(state_dict, prefix, *rest)
        self.read_buffers()


def cycle(horizon: float) -> int:
    """Return the number of steps from one probe to the next, given the length of the exploration in steps."""
    return max(2, round(horizon / PROBES))
