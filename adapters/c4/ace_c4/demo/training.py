"""What the demo trains: C4Net as it is and under ACE, from the same start and on the same images.

The training loop is an ordinary one. ACE has no line in it: it acts through the model and its optimizer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from ace_plugins import attach, equivariance_error, use_branches

from ..net import C4Net
from .shapes import Images, draw

LR = 1e-2
BATCH = 8
TRAIN, HELD = 256, 64
"""Images to train on, and to validate and to test on."""
EVERY = 4
"""Steps between two records of gamma."""


@dataclass(frozen=True)
class Data:
    """The images of one target and seed."""

    train: Images
    validation: Images
    test: Images


@dataclass
class Run:
    """One model under way."""

    name: str
    seed: int
    data: Data
    model: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler
    step: int = 0
    curve: list[float] = field(default_factory=list)
    """Validation error of the deployed model, epoch by epoch."""
    gammas: list[tuple[int, list[float]]] = field(default_factory=list)
    """(step, one number per layer); empty for upstream."""

    @property
    def ace(self) -> Any:
        return getattr(self.model, "ace", None)

    def record(self) -> None:
        if self.ace is not None:
            self.gammas.append((self.step, self.ace.gamma.tolist()))


@dataclass(frozen=True)
class Result:
    """A run at its end. Errors are mean squared ones of a pixel."""

    name: str
    seed: int
    test: float
    """Of what the mode deploys: f_eq for upstream, f_eq + gamma f_neq for resilient."""
    test_f_eq: float
    floor: float
    """Of the test images: what no C_4-equivariant model gets below."""
    gamma: list[float]
    equivariance: float
    """Relative, of the deployed model."""


def data_for(target: str, seed: int) -> Data:
    first = 3 * seed
    return Data(draw(TRAIN, target, first), draw(HELD, target, first + 1), draw(HELD, target, first + 2))


def steps_of(epochs: int) -> int:
    return epochs * (TRAIN // BATCH)


def start(name: str, settings: Mapping[str, Any], target: str, epochs: int, seed: int) -> Run:
    """A model with upstream's initial weights for this seed, and ACE on it if there are settings."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = C4Net()
        if settings:
            attach(model, adapter="c4", trace=False, tell=False, budget=steps_of(epochs), **settings)
    optimizer = torch.optim.Adam(model.parameters(), lr=LR)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps_of(epochs))
    return Run(name, seed, data_for(target, seed), model, optimizer, schedule)


def train(runs: Sequence[Run], epochs: int) -> Iterator[int]:
    """All runs, epoch by epoch side by side. Gives the number of every epoch that is done, counted from 1."""
    for number in range(1, epochs + 1):
        for run in runs:
            epoch(run, torch.Generator().manual_seed(1000 * run.seed + number))
            run.curve.append(error(run.model, run.data.validation))
        yield number


def epoch(run: Run, order: torch.Generator) -> None:
    """One pass over the training images."""
    run.model.train()
    images = run.data.train
    for chosen in torch.randperm(len(images), generator=order).view(-1, BATCH):
        if run.step % EVERY == 0:
            run.record()
        loss = mse_loss(run.model(images.inputs[chosen]), images.targets[chosen])
        run.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        run.optimizer.step()
        run.schedule.step()
        run.step += 1


@torch.no_grad()
def error(model: nn.Module, images: Images) -> float:
    """Mean squared error of what ``model.eval()`` is in its mode."""
    return float(mse_loss(model.eval()(images.inputs), images.targets))


def judge(run: Run) -> Result:
    run.record()
    test = run.data.test
    deployed = error(run.model, test)
    plain = deployed
    if run.ace is not None:
        with use_branches(run.model, on=False):
            plain = error(run.model, test)
    return Result(
        run.name,
        run.seed,
        deployed,
        plain,
        test.floor,
        run.gammas[-1][1] if run.gammas else [],
        equivariance_error(run.model, (test.inputs,)).relative,
    )


@torch.no_grad()
def outputs(run: Run) -> tuple[Tensor, Tensor]:
    """f_eq and what the mode deploys, [SIDE, SIDE] each, of the first test image."""
    image = run.data.test.inputs[:1]
    deployed = run.model.eval()(image)
    if run.ace is None:
        return deployed[0, 0], deployed[0, 0]
    with use_branches(run.model, on=False):
        return run.model(image)[0, 0], deployed[0, 0]
