"""Training and evaluation of the demo's runs: SchNet on molecules in an electric field, or without one.

The training loop is an ordinary one. It has no line about ACE, which acts through the model and its optimizer.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import l1_loss

from ace_plugins import attach, equivariance_error, status

from ..example import paper_model
from .qm9 import Molecules, load

LR = 4e-3
BATCH = 16
RECORDS = 300
"""Approximate number of times gamma is recorded in a run."""
CHARGES = {1: 0.2, 6: -0.1, 7: -0.4, 8: -0.5, 9: -0.3}
"""Charge of an atom in the field, by atomic number, in elementary charges."""
RUNS: Mapping[str, Mapping[str, Any]] = {"upstream": {}, "ACE": {"mode": "auto"}}
"""ACE settings of each run; empty for upstream."""
DIRECTIONS = 100
"""Number of axes, spread evenly over the half sphere, about which molecules are rotated."""


@dataclass(frozen=True)
class Task:
    """Molecules with a standardised target, and their split."""

    data: Molecules
    scale: float
    """Size of one standardised unit in the unit of the target."""
    train: Tensor
    validation: Tensor
    test: Tensor

    @property
    def batches(self) -> int:
        """Training steps per epoch."""
        return math.ceil(len(self.train) / BATCH)


@dataclass
class Run:
    """A model in training, with its validation curve, gammas and best weights."""

    name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler
    settings: Mapping[str, Any]
    """ACE settings; empty for upstream."""
    step: int = 0
    seconds: float = 0.0
    curve: list[float] = field(default_factory=list)
    """Validation MAE of the deployed model, per epoch."""
    gammas: list[tuple[int, list[float]]] = field(default_factory=list)
    """(step, gamma of every site)."""
    best: dict[str, Tensor] = field(default_factory=dict)
    """state_dict of the best epoch."""

    @property
    def best_epoch(self) -> int:
        """Epoch with the lowest validation error, counted from 1. An error of nan counts as the highest."""
        errors = [error if math.isfinite(error) else math.inf for error in self.curve]
        return 1 + errors.index(min(errors))

    def record(self) -> None:
        """Record gamma, once per step."""
        if self.settings and (not self.gammas or self.gammas[-1][0] != self.step):
            self.gammas.append((self.step, [site.gamma for site in status(self.model).sites]))


@dataclass(frozen=True)
class Site:
    """The outcome of one layer at the end of a run with ACE."""

    name: str
    verdict: str
    gamma: float
    benefit: float
    """Share by which the branch lowers the loss of held-out molecules."""
    p: float


@dataclass(frozen=True)
class Result:
    """A run at its best epoch, as plain data. Errors are in standard deviations of the target without the field."""

    name: str
    field: float
    """Strength of the field."""
    molecules: tuple[int, int, int]
    """Number of molecules to train, validate and test on."""
    steps: int
    best_epoch: int
    validation: float
    test: float
    seconds: float
    """Training time per epoch."""
    equivariance: float
    """Mean change of the prediction under random rotations, reflections and translations of the molecules."""
    curve: list[float]
    """Validation MAE per epoch."""
    gammas: list[tuple[int, list[float]]]
    sites: list[Site]
    turns: list[tuple[float, float]]
    """For every axis tried: its angle to the field in degrees, and the mean change of the prediction under rotations
    about it."""

    @property
    def kept(self) -> int:
        """Number of branches that are part of the deployed model."""
        return sum(site.verdict == "breaks" for site in self.sites)


def standardise(data: Molecules, device: torch.device) -> Task:
    """Split the molecules, subtract the part of the target that the composition explains, and scale the rest.

    That part is a least-squares fit of one number per element and a constant, on the training molecules. It is the
    same for all runs and cancels in every error.
    """
    held = len(data) // 6
    molecules = torch.arange(len(data))
    train, validation, test = torch.tensor_split(molecules, [len(data) - 2 * held, len(data) - held])
    counts = torch.zeros(len(data), int(data.z.max()) + 1, dtype=torch.float64)
    one = torch.ones((), dtype=torch.float64)
    counts.index_put_((molecules.repeat_interleave(data.sizes), data.z), one, accumulate=True)
    counts[:, 0] = 1.0  # no element has the number 0, so its column is free for the constant
    rest = data.y - counts @ (torch.linalg.pinv(counts[train]) @ data.y[train])
    scale = float(rest[train].std())
    ready = replace(data, y=(rest / scale).to(torch.float32)).to(device)
    return Task(ready, scale, train.to(device), validation.to(device), test.to(device))


def add_field(task: Task, strength: float) -> Task:
    """Return the task with the energy of its molecules in a field along z added to the target.

    The energy of fixed charges, relative to the centroid of the molecule, is standardised and multiplied by the
    strength.
    """
    data = task.data
    charges = torch.tensor([CHARGES.get(number, 0.0) for number in range(10)], device=data.z.device)
    molecule = torch.arange(len(data), device=data.z.device).repeat_interleave(data.sizes)
    height = data.pos[:, 2] - _total(data, data.pos[:, 2:])[molecule, 0] / data.sizes[molecule]
    energy = _total(data, (charges[data.z] * height)[:, None])[:, 0]
    energy = (energy - energy[task.train].mean()) / energy[task.train].std()
    return replace(task, data=replace(data, y=data.y + strength * energy))


def _total(data: Molecules, values: Tensor) -> Tensor:
    """Return the sum of the atoms' values for each molecule, [molecules, columns]."""
    molecule = torch.arange(len(data), device=values.device).repeat_interleave(data.sizes)
    return values.new_zeros(len(data), values.shape[1]).index_add_(0, molecule, values)


def train_task(
    strength: float,
    molecules: int,
    target: str,
    epochs: int,
    seed: int,
    device: torch.device,
    report: Callable[[str], None],
) -> list[Result]:
    """Train upstream and ACE side by side on the molecules in a field, and report a line per epoch."""
    task = standardise(load(molecules, target, seed), device)
    task = replace(add_field(task, strength) if strength else task, scale=1.0)
    steps = epochs * task.batches
    runs = [start(name, settings, steps, seed, device) for name, settings in RUNS.items()]
    for epoch in train(runs, task, epochs, seed):
        errors = ", ".join(f"{run.name} {run.curve[-1]:.3f}" for run in runs)
        report(f"field {strength:g}, epoch {epoch}/{epochs}, validation error: {errors}")
    return [judge(run, task, strength) for run in runs]


def start(name: str, settings: Mapping[str, Any], steps: int, seed: int, device: torch.device) -> Run:
    """Build a model with upstream's initial weights for this seed, and attach ACE if there are settings."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = paper_model().to(device)
        if settings:
            attach(model, adapter="schnet", trace=False, tell=False, budget=steps, **settings)
    optimizer = torch.optim.Adam(model.parameters(), lr=LR)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    return Run(name, model, optimizer, schedule, settings)


def train(runs: Sequence[Run], task: Task, epochs: int, seed: int) -> Iterator[int]:
    """Train all runs side by side on the same batches, and yield the number of each finished epoch, from 1."""
    order = torch.Generator().manual_seed(seed)
    every = max(1, epochs * task.batches // RECORDS)
    for number in range(1, epochs + 1):
        shuffled = task.train[torch.randperm(len(task.train), generator=order).to(task.train.device)]
        batches = torch.tensor_split(shuffled, list(range(BATCH, len(shuffled), BATCH)))
        for run in runs:
            train_epoch(run, task, batches, every)
            run.curve.append(evaluate(run.model, task, task.validation))
            if run.best_epoch == number:
                run.best = {key: value.clone() for key, value in run.model.state_dict().items()}
        yield number


def train_epoch(run: Run, task: Task, batches: Sequence[Tensor], every: int) -> None:
    """Train one run for one epoch, and record its gammas from time to time."""
    run.record()
    run.model.train()
    begin = time.perf_counter()
    for indices in batches:
        z, pos, batch, y = task.data.batch(indices)
        loss = l1_loss(run.model(z, pos, batch).squeeze(-1), y)
        run.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        run.optimizer.step()
        run.schedule.step()
        run.step += 1
        if run.step % every == 0:
            run.record()
    run.seconds += time.perf_counter() - begin
    run.record()


@torch.no_grad()
def evaluate(model: nn.Module, task: Task, indices: Tensor) -> float:
    """Return the MAE of the model in eval mode, times the scale of the task."""
    model.eval()
    total = 0.0
    for chosen in torch.tensor_split(indices, list(range(8 * BATCH, len(indices), 8 * BATCH))):
        z, pos, batch, y = task.data.batch(chosen)
        total += float((model(z, pos, batch).squeeze(-1) - y).abs().sum())
    return task.scale * total / len(indices)


def judge(run: Run, task: Task, strength: float) -> Result:
    """Restore the best epoch of a run and measure the deployed model."""
    sites = [Site(site.name, site.verdict, site.gamma, site.benefit, site.p) for site in status(run.model).sites]
    run.model.load_state_dict(run.best)
    z, pos, batch, _ = task.data.batch(task.test[: 4 * BATCH])
    return Result(
        name=run.name,
        field=strength,
        molecules=(len(task.train), len(task.validation), len(task.test)),
        steps=run.step,
        best_epoch=run.best_epoch,
        validation=evaluate(run.model, task, task.validation),
        test=evaluate(run.model, task, task.test),
        seconds=run.seconds / len(run.curve),
        equivariance=task.scale * equivariance_error(run.model, (z, pos, batch)).absolute,
        curve=run.curve,
        gammas=run.gammas,
        sites=sites,
        turns=[(angle_to_field(axis), change) for axis, change in measure_turns(run.model, z, pos, batch)],
    )


def angle_to_field(axis: Tensor) -> float:
    """Return the angle between an axis and the field, which is along z, in degrees from 0 to 90."""
    return math.degrees(math.acos(min(1.0, abs(float(axis[2])))))


@torch.no_grad()
def measure_turns(model: nn.Module, z: Tensor, pos: Tensor, batch: Tensor) -> list[tuple[Tensor, float]]:
    """Return axes, and the mean absolute change of the prediction when molecules rotate about each of them.

    Molecules rotate about their centroids, by a quarter and by half a turn.
    """
    model.eval()
    sizes = batch.bincount()
    centre = (pos.new_zeros(len(sizes), 3).index_add_(0, batch, pos) / sizes[:, None])[batch]
    before = model(z, pos, batch)
    found = []
    for axis in spread_axes(DIRECTIONS).to(pos):
        changes = []
        for angle in (math.pi / 2, math.pi):
            cross = torch.linalg.cross(torch.eye(3).to(axis), axis.expand(3, 3))
            turned = (pos - centre) @ torch.linalg.matrix_exp(angle * cross) + centre
            changes.append(float((model(z, turned, batch) - before).abs().mean()))
        found.append((axis, sum(changes) / len(changes)))
    return found


def spread_axes(count: int) -> Tensor:
    """Return unit vectors that are spread evenly over the upper half sphere, [count, 3] (a Fibonacci lattice)."""
    index = torch.arange(count, dtype=torch.float64)
    height = 1 - (index + 0.5) / count
    turn = math.pi * (1 + math.sqrt(5)) * index
    radius = (1 - height.square()).sqrt()
    return torch.stack([radius * turn.cos(), radius * turn.sin(), height], 1)
