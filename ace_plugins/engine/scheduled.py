"""Relaxation by schedule (Pertigkiozoglou and others, NeurIPS 2024), the rival of a gamma that is learned.

gamma is the same at all sites, 2 t / T in the first half of the run and 2 - 2 t / T in the second. Branches begin at
almost nothing, and two penalties keep them small and close to equivariant: with W a branch's matrix, x what it reads,
and A, A' the generators of the group on what it reads and on what it is added to,

    WEIGHT * (sqrt(sum |W A x - A' W x|^2) + sqrt(sum |W x|^2))

at every site whose branch is one linear map. The first of them needs the site's actions (`Site.acts`).

A step under a schedule: gamma's next value is known beforehand, and the branches are penalised.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, distributed, nn
from torch.optim import Optimizer

from ..contract.sites import AddsItself, Node, Site, Tap
from ..errors import AdapterError
from ..symmetry.actions import Action
from ..symmetry.groups import Rigid
from .distributed import is_distributed
from .paced_loop import PacedLoop

WEIGHT = 0.01
INITIAL = 1e-4
"""The standard deviation of a branch's weights when training begins."""
TURN = 1e-4
"""The angle from whose rotations a generator is read off: the error, TURN^2 / 6, is beyond float32."""


def gamma_at(step: int, length: int) -> float:
    """gamma after so many of the run's steps."""
    return max(0.0, min(2 * step / length, 2 - 2 * step / length))


def relaxed(site: Node, branch: nn.Module) -> nn.Module:
    """The branch that this site has under a schedule, where ACE would have the given one.

    It is one linear map without a bias wherever the site reads the model's own features. The links of a chain, and
    branches that add themselves, stay what they are: the map of a map that begins at nothing would stay nothing.
    """
    if not isinstance(site, Site) or not isinstance(site.reads, Tap) or site.through or isinstance(branch, AddsItself):
        return branch
    if site.axis != -1:  # a convolution, which is no map of one feature vector
        return branch
    made = Map(site)
    nn.init.normal_(made.weight, std=INITIAL)
    return made


class Map(nn.Linear):
    """One linear map of a site's whole feature vector, and what it is penalised for."""

    def __init__(self, site: Site) -> None:
        super().__init__(site.width_in, site.width_out, bias=False)
        self.shapes = site.shape_in, site.shape_out
        self.read: Tensor | None = None
        """What it read in the last training forward, [rows, width], without its history."""
        self.generators: list[tuple[Tensor, Tensor]] = []
        """Of the group on what it reads and on what it is added to; none where the adapter does not tell."""
        if site.acts is not None:
            action_in, action_out = site.acts
            sides = _generators(action_in, site.shape_in), _generators(action_out, site.shape_out)
            self.generators = list(zip(*sides, strict=True))

    def forward(self, x: Tensor) -> Tensor:
        shape_in, shape_out = self.shapes
        flat = x.flatten(-len(shape_in))
        if self.training and torch.is_grad_enabled():
            self.read = flat.detach().reshape(-1, flat.shape[-1])
        return super().forward(flat).reshape(*flat.shape[:-1], *shape_out)

    def penalty(self) -> Tensor | None:
        """For what it has read since the last time; None if that was nothing."""
        x, self.read = self.read, None
        if x is None:
            return None
        weight = self.weight
        found = _norm(x @ weight.T)
        if self.generators:
            turned = [weight @ a.to(weight) - b.to(weight) @ weight for a, b in self.generators]
            found = found + _norm(x @ torch.cat(turned).T)
        return WEIGHT * found


def _norm(x: Tensor) -> Tensor:
    # At 0 a root has no slope; nothing is to be pushed there either.
    return (x.square().sum() + torch.finfo(x.dtype).tiny).sqrt()


def _generators(action: Action, shape: tuple[int, ...]) -> list[Tensor]:
    """The three generators of rotations, as matrices [width, width] in float64."""
    if not isinstance(action, Action):
        raise AdapterError(f"Site.acts: expected two actions, found {type(action).__name__}")
    basis = torch.eye(int(torch.Size(shape).numel()), dtype=torch.float64)
    found = []
    for axis in range(3):
        there, back = (action(_rotation(axis, sign * TURN), basis.view(-1, *shape)).flatten(1) for sign in (1, -1))
        found.append(((there - back) / (2 * TURN)).T)  # rows of the basis go to columns of the matrix
    return found


def _rotation(axis: int, angle: float) -> Rigid:
    cross = torch.zeros(3, 3, dtype=torch.float64)
    one, two = (axis + 1) % 3, (axis + 2) % 3
    cross[one, two], cross[two, one] = -angle, angle
    return Rigid(torch.linalg.matrix_exp(cross), torch.zeros(3, dtype=torch.float64))


@dataclass
class Scheduled(PacedLoop):
    """gamma by the clock. The penalties' gradients join those of the script's loss before its optimizer steps."""

    def take(self, optimizer: Optimizer) -> None:
        super().take(optimizer)
        found = [module for module in self.ace.branches.modules() if isinstance(module, Map)]
        with torch.enable_grad():
            told = [(module.weight, penalty) for module in found if (penalty := module.penalty()) is not None]
            if not told:
                return
            weights, penalties = zip(*told, strict=True)
            gradients = torch.autograd.grad(torch.stack(penalties).sum(), weights)
        scale = getattr(optimizer, "grad_scale", None)  # a fused optimizer divides by it inside its kernel
        sign = -1 if optimizer.param_groups[self.group].get("maximize") else 1
        for weight, gradient in zip(weights, gradients, strict=True):
            if is_distributed():  # each process has read another part of the batch
                distributed.all_reduce(gradient)
                gradient /= distributed.get_world_size()
            if weight.grad is not None:
                weight.grad.add_(sign * gradient if scale is None else sign * scale * gradient)

    def move(self, optimizer: Optimizer, before: Tensor, gradient: Tensor) -> None:
        ace, duals = self.ace, self.ace.duals
        ace.budget.look_at(optimizer, duals.count + 1)
        length = ace.budget.length(duals.count)
        duals.tick()
        if length is None:
            return
        ace.gamma.fill_(gamma_at(duals.count, length))
        if duals.count >= length:
            duals.error.fill_(-1.0)
            duals.note_landed()
            ace.sync()
