"""Relaxation by schedule (Pertigkiozoglou et al., NeurIPS 2024): gamma follows a schedule instead of being learned.

At step t of T, gamma is 2 t / T in the first half of the run and 2 - 2 t / T in the second, at all sites. Branches
start close to 0, and two penalties keep them small and close to equivariant. With W the matrix of a branch, x its
input, and A and A' the generators of the group on its input and on its output, the penalties

    WEIGHT * (sqrt(sum |W A x - A' W x|^2) + sqrt(sum |W x|^2))

are minimised along with the loss, at every site whose branch is one linear map. The first penalty needs the site's
actions (`Site.acts`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, distributed, nn
from torch.optim import Optimizer

from ..contract.sites import AddsItself, Node, Site, Tap
from ..symmetry.actions import find_generators
from .distributed import is_distributed
from .paced_loop import PacedLoop

WEIGHT = 0.01
INITIAL = 1e-4  # standard deviation of a branch's initial weights


def gamma_at(step: int, length: int) -> float:
    """Return gamma after ``step`` steps of a run that has ``length`` steps."""
    return max(0.0, min(2 * step / length, 2 - 2 * step / length))


def relax(site: Node, branch: nn.Module) -> nn.Module:
    """Return one linear map in place of a site's branch, except for `AddsItself` branches and convolutions."""
    # A chain of maps that all start near 0 would have vanishing gradients.
    if not isinstance(site, Site) or not isinstance(site.reads, Tap) or site.through:
        return branch
    return branch if site.axis != -1 or isinstance(branch, AddsItself) else PenalisedLinear(site)


class PenalisedLinear(nn.Linear):
    """One linear map of a site's whole feature vector, which also computes its penalty."""

    def __init__(self, site: Site) -> None:
        super().__init__(site.width_in, site.width_out, bias=False)
        nn.init.normal_(self.weight, std=INITIAL)
        self.shapes = site.shape_in, site.shape_out
        self.read: Tensor | None = None  # input of the map in the last training forward pass, [rows, width], detached
        # Generators of the group on the map's input and output, in pairs; empty if the site has no actions.
        sides = map(find_generators, site.acts or (), self.shapes)
        self.generators = list(zip(*sides, strict=True))

    def forward(self, x: Tensor) -> Tensor:
        shape_in, shape_out = self.shapes
        flat = x.flatten(-len(shape_in))
        if self.training and torch.is_grad_enabled():
            self.read = flat.detach().reshape(-1, self.in_features)
        return torch.unflatten(super().forward(flat), -1, shape_out)

    def penalty(self) -> Tensor:
        """Return the penalty, a scalar, for the last input, which is then forgotten."""
        x, self.read = self.read, None
        assert x is not None
        weight = self.weight
        found = _norm(x @ weight.T)
        if self.generators:
            commutators = [weight @ a.to(weight) - b.to(weight) @ weight for a, b in self.generators]
            found = found + _norm(x @ torch.cat(commutators).T)
        return WEIGHT * found


def _norm(x: Tensor) -> Tensor:
    return (x.square().sum() + torch.finfo(x.dtype).tiny).sqrt()  # without ``tiny``, the gradient at 0 is infinite


@dataclass
class ScheduledLoop(PacedLoop):
    """A loop that sets gamma by schedule, and adds the penalties' gradients to the weights' before each step."""

    def prepare(self, optimizer: Optimizer) -> None:
        super().prepare(optimizer)
        modules = self.ace.branches.modules()
        maps = [module for module in modules if isinstance(module, PenalisedLinear) and module.read is not None]
        if not maps:
            return
        with torch.enable_grad():
            total = torch.stack([module.penalty() for module in maps]).sum()
        gradients = torch.autograd.grad(total, [module.weight for module in maps])
        for module, gradient in zip(maps, gradients, strict=True):
            if is_distributed():  # each rank has its own part of the batch
                distributed.all_reduce(gradient)
                gradient /= distributed.get_world_size()
            if module.weight.grad is not None:
                module.weight.grad.add_(self.factor(optimizer) * gradient)

    def advance(self, optimizer: Optimizer, before: Tensor, gradient: Tensor) -> None:
        ace, duals = self.ace, self.ace.duals
        ace.budget.inspect(optimizer, ace.root, duals.count + 1)
        length = ace.budget.length(duals.count)
        duals.tick()
        if length is None:
            return
        ace.gamma.fill_(gamma_at(duals.count, length))
        if duals.count >= length:
            duals.site_landed.fill_(1.0)
            duals.note_landed()
            ace.sync()
