"""Training and evaluation of the demo's three runs.

The training loop is an ordinary one. It has no line about ACE, which acts through the model and its optimizer.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import l1_loss

from ace_plugins import attach, equivariance_error, status, use_branches

from ..example import paper_model
from .qm9 import Molecules

LR = 4e-3
BATCH = 16
RECORDS = 500
"""Approximate number of times gamma, lambda and u are recorded in a run."""


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
    """A model in training, with its validation curve, dual variables and best weights."""

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
    records: list[tuple[int, list[list[float]]]] = field(default_factory=list)
    """(step, [gamma, lambda, u]), each with one number per site."""
    best: dict[str, Tensor] = field(default_factory=dict)
    """state_dict of the best epoch."""

    @property
    def sites(self) -> list[str]:
        """Names of the sites; empty for upstream."""
        return [site.name for site in status(self.model).sites]

    @property
    def landing(self) -> int:
        """Step at which the last gamma reached 0 for good; 0 if some have not."""
        now = status(self.model)
        return now.steps if now.landed else 0

    @property
    def best_epoch(self) -> int:
        """Epoch with the lowest validation error, counted from 1. An error of nan counts as the highest."""
        errors = [error if math.isfinite(error) else math.inf for error in self.curve]
        return 1 + errors.index(min(errors))

    def record(self) -> None:
        """Record gamma, lambda and u, once per step."""
        if self.settings and (not self.records or self.records[-1][0] != self.step):
            values = [(site.gamma, site.lambda_, site.u) for site in status(self.model).sites]
            self.records.append((self.step, [list(column) for column in zip(*values, strict=True)]))


@dataclass(frozen=True)
class Result:
    """A run at its best epoch. Errors are in the unit of the target."""

    name: str
    best_epoch: int
    validation: tuple[float, float | None]
    """MAE of f_eq and of f_eq + gamma f_neq. Upstream only has the first."""
    test: tuple[float, float | None]
    deployed: int
    """Index of the one that the mode deploys."""
    seconds: float
    """Training time per epoch."""
    equivariance: float
    """Mean change of the deployed model's prediction under the group."""

    @property
    def test_deployed(self) -> float:
        """Test MAE of the deployed model."""
        value = self.test[self.deployed]
        assert value is not None
        return value


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


def start(name: str, settings: Mapping[str, Any], steps: int, seed: int, device: torch.device) -> Run:
    """Build a model with upstream's initial weights for this seed, and attach ACE if there are settings."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = paper_model().to(device)
        if settings:
            attach(model, adapter="schnet", trace=False, tell=False, **settings)
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
    """Train one run for one epoch, recording its dual variables every so many steps."""
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
    """Return the MAE of the model in eval mode, in the unit of the target."""
    model.eval()
    total = 0.0
    for chosen in torch.tensor_split(indices, list(range(8 * BATCH, len(indices), 8 * BATCH))):
        z, pos, batch, y = task.data.batch(chosen)
        total += float((model(z, pos, batch).squeeze(-1) - y).abs().sum())
    return task.scale * total / len(indices)


def judge(run: Run, task: Task) -> Result:
    """Restore the best epoch of a run and measure it with and without its branches."""
    run.model.load_state_dict(run.best)

    def errors(indices: Tensor) -> tuple[float, float | None]:
        if not run.settings:
            return evaluate(run.model, task, indices), None
        with use_branches(run.model, on=False):
            plain = evaluate(run.model, task, indices)
        with use_branches(run.model, on=True):
            return plain, evaluate(run.model, task, indices)

    z, pos, batch, _ = task.data.batch(task.test[: 4 * BATCH])
    return Result(
        name=run.name,
        best_epoch=run.best_epoch,
        validation=errors(task.validation),
        test=errors(task.test),
        deployed=int(run.settings.get("mode") == "resilient"),
        seconds=run.seconds / len(run.curve),
        equivariance=task.scale * equivariance_error(run.model, (z, pos, batch)).absolute,
    )
