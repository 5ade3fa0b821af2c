"""Training and evaluation of the demo's runs: C4Net with and without ACE, on the same images.

The training loop is an ordinary one. It has no line about ACE, which acts through the model and its optimizer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from ace_plugins import attach, equivariance_error, status, use_branches

from ..net import C4Net
from .shapes import Images, draw

LR = 1e-2
BATCH = 8
TRAIN, HELD = 256, 64
"""Numbers of images for training, and for validation and testing each."""
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
    """A model in training, with its validation curve and gammas."""

    name: str
    seed: int
    data: Data
    model: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler
    step: int = 0
    curve: list[float] = field(default_factory=list)
    """Validation error of the deployed model, per epoch."""
    gammas: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    """(step, gamma by site); empty for upstream."""

    def record(self) -> None:
        """Record gamma, if the model has ACE."""
        sites = status(self.model).sites
        if sites:
            self.gammas.append((self.step, {site.name: site.gamma for site in sites}))


@dataclass(frozen=True)
class Result:
    """A run at its end. Errors are mean squared errors per pixel."""

    name: str
    seed: int
    test: float
    """Error of the deployed model: f_eq for upstream, f_eq + gamma f_neq for resilient."""
    test_f_eq: float
    floor: float
    """Lowest error of any C_4-equivariant model on the test images."""
    gamma: list[float]
    equivariance: float
    """Relative equivariance error of the deployed model."""


def load(target: str, seed: int) -> Data:
    """Draw the images of a target; the three parts have different seeds."""
    first = 3 * seed
    return Data(draw(TRAIN, target, first), draw(HELD, target, first + 1), draw(HELD, target, first + 2))


def start(name: str, settings: Mapping[str, Any], target: str, epochs: int, seed: int) -> Run:
    """Build a model with the initial weights of this seed, and attach ACE if there are settings."""
    steps = epochs * (TRAIN // BATCH)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = C4Net()
        if settings:
            attach(model, adapter="c4", trace=False, tell=False, budget=steps, **settings)
    optimizer = torch.optim.Adam(model.parameters(), lr=LR)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    return Run(name, seed, load(target, seed), model, optimizer, schedule)


def train(runs: Sequence[Run], epochs: int) -> Iterator[int]:
    """Train all runs side by side, and yield the number of each finished epoch, from 1."""
    for number in range(1, epochs + 1):
        for run in runs:
            train_epoch(run, torch.Generator().manual_seed(1000 * run.seed + number))
            run.curve.append(evaluate(run.model, run.data.validation))
        yield number


def train_epoch(run: Run, order: torch.Generator) -> None:
    """Train one run for one epoch."""
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
def evaluate(model: nn.Module, images: Images) -> float:
    """Return the mean squared error of the model in eval mode."""
    return float(mse_loss(model.eval()(images.inputs), images.targets))


def judge(run: Run) -> Result:
    """Measure a finished run on the test images."""
    run.record()
    test = run.data.test
    deployed = plain = evaluate(run.model, test)
    if run.gammas:
        with use_branches(run.model, on=False):
            plain = evaluate(run.model, test)
    gamma = list(run.gammas[-1][1].values()) if run.gammas else []
    equivariance = equivariance_error(run.model, (test.inputs,)).relative
    return Result(run.name, run.seed, deployed, plain, test.floor, gamma, equivariance)


@torch.no_grad()
def outputs(run: Run) -> tuple[Tensor, Tensor]:
    """Return f_eq and the deployed model's output, [SIDE, SIDE] each, for the first test image."""
    image = run.data.test.inputs[:1]
    deployed = plain = run.model.eval()(image)
    if run.gammas:
        with use_branches(run.model, on=False):
            plain = run.model(image)
    return plain[0, 0], deployed[0, 0]
