"""Determines the length of a run from the user's setting, the script, Lightning or a learning-rate scheduler.

Steps per epoch are counted between calls of ``model.train()``, which scripts make when an epoch begins. If the length
cannot be found, `ASSUMED` steps are assumed.
"""

from __future__ import annotations

import gc
import math
import sys
import warnings
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, SequentialLR

from ..contract.upstreams import Script
from ..errors import AceWarning
from ..settings.config import BUDGET, Config
from ..symmetry.parts import iterate_tensors

ASSUMED = 2000  # number of steps assumed for a run of unknown length
LONG = 1000  # number of steps after which the length is estimated even if the first epoch has not ended
LIGHTNING = frozenset({"lightning.pytorch", "pytorch_lightning"})  # names of Lightning's package
LOOKED = 5  # number of steps after which ACE checks if schedulers advance in every optimizer step or once per epoch


class Budget:
    """The length of one model's run, in optimizer steps."""

    def __init__(self, config: Config, script: Script | None = None) -> None:
        self.config = config
        self.steps, self.epochs = BUDGET.split(config.budget)
        self.source = "the setting budget"  # origin of ``steps`` or ``epochs``, for messages
        if self.steps is None and self.epochs is None and script is not None and script.epochs:
            self.epochs, self.source = script.epochs, script.source
        self.epoch_steps: int | None = None
        self.begun: int | None = None  # number of steps in the checkpoint that this process resumed from, or 0
        self.watching = True  # False while ACE evaluates the model, which does not end the script's epoch
        self._first: int | None = None  # step count when the first epoch began; None before that
        self._last = 0  # step count when the latest epoch began
        self._evaluated = False
        self._trains_every_step = False  # True if the script calls train() before each step: only eval() shows epochs
        self._single = 0  # number of times that an evaluation followed a single step
        self._batches: list[float] = []  # sums of squares of the batches that follow the first two of these evaluations
        self._calls = 0  # number of calls of `note_mode`; the first one is by ``attach``
        self._warned = False
        self._schedules: dict[int, int] = {}  # from a scheduler's ``id`` to its number of steps before the first step
        self.agreed: list[int | None] | None = None  # the `facts` of rank 0, which all ranks use

    @property
    def facts(self) -> list[int | None]:
        """The numbers from which this rank computes the length of the run, in a fixed order; None where unknown."""
        return [self.steps, self.epochs, self.epoch_steps, self.begun, self._first]

    @property
    def total(self) -> int | None:
        """Number of steps in the whole run; None if unknown."""
        steps, epochs, epoch_steps, _, _ = self.agreed or self.facts
        return epochs * epoch_steps if steps is None and epochs and epoch_steps else steps

    @property
    def expected_steps(self) -> int:
        """Number of steps in the whole run; `ASSUMED` if unknown."""
        return self.total or ASSUMED

    def horizon(self, count: int) -> float | None:
        """Return the horizon in steps, as known after ``count`` steps; None while `length` is None."""
        length = self.length(count)
        if length is None:
            return None
        steps, epoch_steps = self.config.share * length, (self.agreed or self.facts)[2]
        if self.config.horizon == "auto" and self.config.mode == "strict" and epoch_steps is not None:
            steps = min(steps, max(100 * epoch_steps, 1000))  # later the model would overfit with its branches
        return max(1.0, steps)

    def length(self, count: int) -> int | None:
        """Return the run's length in steps, as known after ``count`` steps; None while it may still be found."""
        if self.begun is None:
            self.begun = count
        known = self.total
        _, epochs, _, begun, first = self.agreed or self.facts
        begun = self.begun if begun is None else begun
        if known is None and epochs:
            if count - begun < LONG:
                return None
            if self._calls < 2:
                self.epoch_steps = LONG  # the script does not show its epochs
            known = epochs * (self.epoch_steps or count - (first or begun))  # a lower bound, until an epoch ends
            if not self._warned:
                self._warned = True
                text = f"no epoch has ended after {LONG:,} steps (ACE counts calls of model.train() and model.eval())"
                assumed = f"so the length of the run, {epochs:,} epochs, is taken for {known:,} steps or more"
                warnings.warn(f"{text}, {assumed}; set budget to a number of steps", AceWarning, stacklevel=2)
        return known or ASSUMED

    def note_mode(self, training: bool, count: int) -> None:
        """Record a call of ``model.train()`` or ``model.eval()`` after ``count`` steps."""
        if self.epoch_steps is not None or not self.watching:
            return
        self._calls += 1
        if not training:
            self._evaluated = True
            if self._trains_every_step and self._first is not None:
                self.epoch_steps = count - self._first
            return
        if self._first is None:
            self._first = count
        elif count - self._last > 1:
            self.epoch_steps = count - self._last
        elif count > self._last and self._evaluated:
            self._single += 1
            # A script that evaluates after every step looks like epochs of one step. Only such epochs repeat a batch.
            same = len(self._batches) == 2 and math.isclose(*self._batches, rel_tol=1e-5)
            self.epoch_steps = 1 if self._single == 3 and same else None
        elif count > self._last:
            self._trains_every_step = True
        self._last, self._evaluated = count, False

    def note_batch(self, args: Any, kwargs: Any) -> None:
        """Record the sum of squares of a training batch, to detect repetition. Waits for the device twice in a run."""
        if self.watching and self.epochs and self.epoch_steps is None and 0 < self._single < 3:
            total = sum(float(x.detach().float().square().sum()) for _, x in iterate_tensors((args, kwargs)))
            self._batches[self._single - 1 :] = [total]

    def inspect(self, optimizer: Optimizer, model: nn.Module | None, count: int) -> None:
        """Look for the length in Lightning or a scheduler, if neither the user nor the script gives it.

        Called in every step before the script's schedulers, with the number of steps including this one.
        """
        if self.steps is not None:
            return
        if self.begun is None:
            self.begun = count - 1
        made = count - self.begun  # steps made in this process
        if made == 1 and not sys.modules.keys().isdisjoint(LIGHTNING):
            self._read_lightning(model)
        if self.steps is None and self.epochs is None and (made in (1, LOOKED) or count == LOOKED):
            self._read_schedulers(optimizer, made, count)

    def _read_lightning(self, model: nn.Module | None) -> None:
        """Read the length and the steps per epoch from Lightning, whose calls of ``train()`` do not show epochs."""
        packages = [sys.modules[name] for name in LIGHTNING if name in sys.modules]
        for task in find_instances(*(package.LightningModule for package in packages)):
            trainer = vars(task).get("_trainer")  # the last one that has trained this LightningModule
            if trainer is not None and any(part is model for part in task.modules()):
                steps = getattr(trainer, "estimated_stepping_batches", math.inf)  # may set up the data first
                batches = getattr(trainer, "num_training_batches", math.inf)
                if math.isfinite(batches) and batches > 0:
                    self.epoch_steps = math.ceil(batches / getattr(trainer, "accumulate_grad_batches", 1))
                if self.epochs is None and math.isfinite(steps) and steps > 0:
                    self.steps, self.source = int(steps), "Lightning's trainer"

    def _read_schedulers(self, optimizer: Optimizer, made: int, count: int) -> None:
        """Read the length from a scheduler, and determine if it steps once per optimizer step or once per epoch."""
        for scheduler, length in _find_schedulers(optimizer):
            done = scheduler.last_epoch
            if made == 1:
                self._schedules[id(scheduler)] = done
                # A run that was resumed must have the same length as the whole run from its first step on.
                rate = done / (count - 1) if count >= LOOKED and done % (count - 1) == 0 else 0.0
            else:
                rate = (done - self._schedules.get(id(scheduler), 0)) / (made - 1)
            if made > 1 or rate >= 1:
                self.source = f"the script's {type(scheduler).__name__}"
            if rate >= 1:
                self.steps = round((length - done) / rate) + count - 1
            elif made > 1:
                self.epochs = length

    def is_settled(self, count: int) -> bool:
        """Return whether the search for the length is over after ``count`` steps, successful or not."""
        return self.total is not None or (self.epochs is None and count >= (self.begun or 0) + LOOKED)

    def __str__(self) -> str:
        """Describe the length and its origin."""
        total = self.total
        if total is None and self.epochs:
            return f"{self.epochs:,} epochs ({self.source}); steps are counted in the first one"
        if total is None:
            return f"unknown, {ASSUMED:,} steps assumed; set budget"
        if self.epochs:
            return f"{total:,} steps: {self.epochs:,} epochs ({self.source}) of {self.epoch_steps:,} steps"
        return f"{total:,} steps ({self.source})"


def find_instances(*kinds: type) -> list[Any]:
    """Return all objects of these classes and their subclasses. Slow, since it visits all objects.

    An instance refers to its class. ``gc.get_objects`` would also return tuples that other threads are still building,
    which then fail.
    """
    classes = list(kinds)
    for each in classes:  # grows
        classes += type.__subclasses__(each)
    return [thing for thing in gc.get_referrers(*classes) if issubclass(type(thing), kinds)]


def _find_schedulers(optimizer: Optimizer) -> Iterator[tuple[Any, int]]:
    """Yield an optimizer's schedulers with their lengths, except parts of a SequentialLR and unknown lengths."""
    found = find_instances(LRScheduler)
    parts = {id(part) for each in found if isinstance(each, SequentialLR) for part in each._schedulers}
    for scheduler in found:
        before, last = 0, scheduler
        while isinstance(last, SequentialLR):
            before, last = before + last._milestones[-1], last._schedulers[-1]
        length = getattr(last, "total_steps", None) or getattr(last, "T_max", None)
        own = getattr(scheduler, "optimizer", None) is optimizer and id(scheduler) not in parts
        if own and isinstance(length, int) and length > 0:
            yield scheduler, before + length
