"""What the demo trains: the task, the three runs side by side, and what is measured at the end.

The training loop is an ordinary one. ACE has no line in it: it acts through the model and its optimizer.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import l1_loss

from ace_plugins import attach, equivariance_error, use_branches

from ..example import paper_model
from .qm9 import Molecules

LR = 4e-3
BATCH = 16
RECORDS = 500
"""About how often gamma, lambda and u are recorded in a run."""


@dataclass(frozen=True)
class Task:
    """The molecules, their target standardised, and which of them train, validate and test."""

    data: Molecules
    scale: float
    """One unit of the standardised target in the target's own unit."""
    train: Tensor
    validation: Tensor
    test: Tensor

    @property
    def batches(self) -> int:
        """Steps in an epoch."""
        return math.ceil(len(self.train) / BATCH)


@dataclass
class Run:
    """One model under way: its errors so far, what its dual loop did, and its best epoch."""

    name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler
    settings: Mapping[str, Any]
    """ACE's; empty for upstream."""
    step: int = 0
    seconds: float = 0.0
    curve: list[float] = field(default_factory=list)
    """Validation MAE of the deployed model, epoch by epoch."""
    records: list[tuple[int, list[list[float]]]] = field(default_factory=list)
    """(step, [gamma, lambda, u]), each with one number per site."""
    best: dict[str, Tensor] = field(default_factory=dict)

    @property
    def ace(self) -> Any:
        return getattr(self.model, "ace", None)

    @property
    def landing(self) -> int:
        """The step by which every gamma had landed; 0 if not all have."""
        return self.ace.duals.count if self.ace is not None and self.ace.landed else 0

    @property
    def best_epoch(self) -> int:
        """Counted from 1. An epoch whose error is not a number comes last."""
        errors = [error if math.isfinite(error) else math.inf for error in self.curve]
        return 1 + errors.index(min(errors))

    def record(self) -> None:
        """gamma, lambda and u after the steps made so far."""
        ace = self.ace
        if ace is not None and (not self.records or self.records[-1][0] != self.step):
            self.records.append((self.step, ace.duals.snapshot(ace.gamma).tolist()))


@dataclass(frozen=True)
class Result:
    """A run at its best epoch. Errors are in the target's unit."""

    name: str
    best_epoch: int
    validation: tuple[float, float | None]
    """MAE of f_eq and of f_eq + gamma f_neq; upstream only has the first."""
    test: tuple[float, float | None]
    deployed: int
    """Which of the two the mode deploys."""
    seconds: float
    """Training time of an epoch."""
    equivariance: float

    @property
    def test_deployed(self) -> float:
        value = self.test[self.deployed]
        assert value is not None
        return value


def standardised(data: Molecules, device: torch.device) -> Task:
    """Take off what the composition explains and divide by the spread of the rest, by the training data alone.

    The composition's part is a least-squares fit of one number per element and a constant. All runs have it
    alike, and it cancels in every error.
    """
    held = len(data) // 6
    molecules = torch.arange(len(data))
    train, validation, test = torch.tensor_split(molecules, [len(data) - 2 * held, len(data) - held])
    counts = torch.zeros(len(data), int(data.z.max()) + 1, dtype=torch.float64)
    one = torch.ones((), dtype=torch.float64)
    counts.index_put_((molecules.repeat_interleave(data.sizes), data.z), one, accumulate=True)
    counts[:, 0] = 1.0  # no element has the number 0: the constant's column
    rest = data.y - counts @ (torch.linalg.pinv(counts[train]) @ data.y[train])
    scale = float(rest[train].std())
    ready = replace(data, y=(rest / scale).to(torch.float32)).to(device)
    return Task(ready, scale, train.to(device), validation.to(device), test.to(device))


def start(name: str, settings: Mapping[str, Any], steps: int, seed: int, device: torch.device) -> Run:
    """A model with upstream's initial weights for this seed, and ACE on it if there are settings."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = paper_model().to(device)
        if settings:
            attach(model, adapter="schnet", trace=False, tell=False, **settings)
    optimizer = torch.optim.Adam(model.parameters(), lr=LR)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    return Run(name, model, optimizer, schedule, settings)


def train(runs: Sequence[Run], task: Task, epochs: int, seed: int, tell: Callable[[Run], None]) -> None:
    """All runs, epoch by epoch side by side, on the same batches. ``tell`` hears of every epoch."""
    order = torch.Generator().manual_seed(seed)
    every = max(1, epochs * task.batches // RECORDS)
    for _ in range(epochs):
        shuffled = task.train[torch.randperm(len(task.train), generator=order).to(task.train.device)]
        batches = torch.tensor_split(shuffled, list(range(BATCH, len(shuffled), BATCH)))
        for run in runs:
            epoch(run, task, batches, every)
            run.curve.append(evaluate(run.model, task, task.validation))
            if run.best_epoch == len(run.curve):
                run.best = {key: value.clone() for key, value in run.model.state_dict().items()}
            tell(run)


def epoch(run: Run, task: Task, batches: Sequence[Tensor], every: int) -> None:
    """One pass over the training data."""
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
    """MAE in the target's unit, of what ``model.eval()`` is in its mode."""
    model.eval()
    total = 0.0
    for chosen in torch.tensor_split(indices, list(range(8 * BATCH, len(indices), 8 * BATCH))):
        z, pos, batch, y = task.data.batch(chosen)
        total += float((model(z, pos, batch).squeeze(-1) - y).abs().sum())
    return task.scale * total / len(indices)


def judge(run: Run, task: Task) -> Result:
    """The run's best epoch, put back, with and without its branches."""
    run.model.load_state_dict(run.best)

    def errors(indices: Tensor) -> tuple[float, float | None]:
        if run.ace is None:
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
        deployed=int(run.ace is not None and run.ace.config.branches_in_eval),
        seconds=run.seconds / len(run.curve),
        equivariance=task.scale * equivariance_error(run.model, (z, pos, batch)).absolute,
    )
