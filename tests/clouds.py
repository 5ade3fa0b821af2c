"""Synthetic regression on point clouds: symmetric under rotations, or broken with a given strength.

A run takes a few seconds. The branches are MLPs that read the whole cloud, so with few samples they can memorise
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ace_plugins import attach
from ace_plugins.adapter import (
    E3,
    O3,
    Example,
    GroupAction,
    Invariant,
    Node,
    Positions,
    Site,
    Tap,
    Upstream,
    Vectors,
    hookimpl,
)

POINTS, NOISE, BATCH = 4, 0.1, 32


class Cloud(nn.Module):
    """Invariants of four points, x [n, 4, 3] -> [n], through residual layers. With ``centred``, those under E(3)."""

    def __init__(self, width: int = 16, layers: int = 3, *, centred: bool = False) -> None:
        super().__init__()
        self.centred = centred
        self.lift = nn.Linear(POINTS**2, width)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width)) for _ in range(layers)
        )
        self.head = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        inner = centre(x) if self.centred else x
        h = self.lift((inner @ inner.mT).flatten(1))
        for layer in self.layers:
            h = h + layer(h)
        out: Tensor = self.head(h)[:, 0]
        return out


def centre(x: Tensor) -> Tensor:
    """Return the points of every cloud relative to their mean."""
    return x - x.mean(1, keepdim=True)


class CloudAdapter:
    @hookimpl
    def ace_upstream(self) -> Upstream:
        return Upstream("Cloud", models=(f"{Cloud.__module__}:Cloud",))

    @hookimpl
    def ace_layers(self, model: Any) -> Sequence[Node]:
        width = model.head.in_features
        return [
            Site(f"layers.{i}", shape_in=(POINTS, 3), shape_out=(width,), reads=Tap("x", ""))
            for i in range(len(model.layers))
        ]

    @hookimpl
    def ace_group_action(self, model: Any) -> GroupAction:
        if model.centred:
            return GroupAction(E3, {"x": Positions()}, outputs=Invariant())
        return GroupAction(O3, {"x": Vectors()}, outputs=Invariant())

    @hookimpl
    def ace_example(self, seed: int) -> Example:
        generator = torch.Generator().manual_seed(seed)
        return Example(Cloud(), (torch.randn(5, POINTS, 3, generator=generator),))


@dataclass(frozen=True)
class Task:
    """Training and test samples."""

    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor


def draw_task(samples: int, strength: float, seed: int, *, centred: bool = False) -> Task:
    """Draw a task. With ``strength`` 0 the target is invariant; else a function of the z-coordinates is added.

    With ``centred`` the clouds have different centres, on which the invariant part does not depend.
    """
    fixed = torch.Generator().manual_seed(777)
    weight, readout = torch.randn(POINTS**2, 8, generator=fixed) / 3, torch.randn(8, generator=fixed)
    generator = torch.Generator().manual_seed(seed + 5000)
    x = torch.randn(samples + 1000, POINTS, 3, generator=generator)
    inner = centre(x) if centred else x
    y = torch.tanh((inner @ inner.mT).flatten(1) @ weight) @ readout / 2
    y = y + strength * 1.3 * torch.tanh(x[:, 0, 2] + 0.5 * x[:, 1, 2])
    y = y + NOISE * torch.randn(samples + 1000, generator=generator)
    if centred:
        x = inner + torch.randn(samples + 1000, 1, 3, generator=generator)
    return Task(x[:samples], y[:samples], x[samples:], y[samples:])


# What `break_symmetry` leaves: all of O(3); the rotations about an axis; one mirror; nothing; of E(3), what gravity and
# a floor leave: the rotations about the vertical and the horizontal translations.
KINDS = ("none", "axis", "mirror", "nothing", "floor")


def break_symmetry(task: Task, kind: str, seed: int) -> tuple[Task, Tensor]:
    """Add a function to an invariant task that leaves only a subgroup. Returns its axis or mirror's normal, too."""
    generator = torch.Generator().manual_seed(seed)
    axis, other, v, w = torch.randn(4, 3, generator=generator)
    axis = axis / axis.norm()
    m = torch.randn(3, 3, generator=generator)
    across = torch.nn.functional.normalize(torch.linalg.cross(axis, other), dim=0)
    third = torch.linalg.cross(axis, across)

    def extra(x: Tensor) -> Tensor:
        p, q = x[:, 0], x[:, 1]
        inside = {
            "none": 0 * p[:, 0],
            "axis": p @ axis + 0.5 * q @ axis,
            "mirror": p @ across + 0.6 * q @ third + 0.8 * (p @ third) * (q @ across),
            "nothing": p @ v + 0.7 * ((p @ m) * q).sum(1) + 0.5 * q @ w,
            "floor": (p - q) @ axis + x.mean(1) @ axis,
        }
        return 1.3 * torch.tanh(inside[kind])

    return Task(task.x, task.y + extra(task.x), task.x_test, task.y_test + extra(task.x_test)), axis


@dataclass
class Run:
    """A model in training."""

    task: Task
    seed: int
    steps: int
    model: Cloud
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler
    done: int = 0

    def train(self, until: int | None = None, *, scale: float = 1.0) -> Run:
        """Train until this many steps are done, by default to the end, on ``scale`` times the mean squared error."""
        self.model.train()
        count = len(self.task.x)
        per_epoch = -(-count // BATCH)
        while self.done < (self.steps if until is None else until):
            epoch, batch = divmod(self.done, per_epoch)
            order = torch.randperm(count, generator=torch.Generator().manual_seed(1000 * self.seed + epoch))
            chosen = order.split(BATCH)[batch]
            self.optimizer.zero_grad()
            loss = scale * (self.model(self.task.x[chosen]) - self.task.y[chosen]).square().mean()
            loss.backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
            self.schedule.step()
            self.done += 1
        return self

    @torch.no_grad()
    def test(self) -> float:
        """Return the mean squared error of the model in eval mode on the test samples."""
        return float((self.model.eval()(self.task.x_test) - self.task.y_test).square().mean())


def start(
    samples: int, strength: float, seed: int, steps: int = 1000, *, centred: bool = False, **settings: Any
) -> Run:
    """Build a run of the cloud network; without settings it is plain. The adapter must be registered as "cloud"."""
    torch.manual_seed(seed)
    model = Cloud(centred=centred)
    if settings:
        attach(model, adapter="cloud", **{"budget": steps, "trace": False, "tell": False, **settings})
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    return Run(draw_task(samples, strength, seed, centred=centred), seed, steps, model, optimizer, schedule)
