"""How long the run is: what the user says, or else what the script, Lightning or a scheduler lets us know.

Epochs become steps by watching ``model.train()``: scripts call it when an epoch begins. Where nothing is known the run
is taken for one of `ASSUMED` steps. That cannot hurt: from the landing on the model is plain upstream, so what is left
of a longer run is upstream's own training, and a shorter run is told that it was cut short.
"""

from __future__ import annotations

import gc
import math
import sys
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ..contract.upstreams import Script
from ..settings.config import BUDGET, Config

ASSUMED = 2000
"""Steps of a run of which nothing is known."""
LONG = 1000
"""Steps of a first epoch after which gamma no longer waits for its end."""
LOOKED = 5
"""Steps of this process after which it is clear whether a scheduler steps with the optimizer."""


class Budget:
    """The length of one model's run in optimizer steps, as far as it is known."""

    def __init__(self, config: Config, script: Script | None = None) -> None:
        self.config = config
        self.steps, self.epochs = BUDGET.split(config.budget)
        self.source = "the setting budget"
        """Where steps or epochs come from."""
        if self.steps is None and self.epochs is None:
            self.source = ""
            if script is not None and script.epochs:
                self.epochs, self.source = script.epochs, script.source
        self.epoch_steps: int | None = None
        self.begun: int | None = None
        """The step at which this process began: 0, or where a checkpoint left off."""
        self.watching = True
        """Off while the host itself calls ``model.eval()``."""
        self._first: int | None = None
        """The step at which the first epoch began."""
        self._last = 0
        self._evaluated = False
        self._every_step = False
        """The script calls ``model.train()`` before every step, so that only evaluations tell epochs apart."""
        self._single = 0
        """Epochs of one step that were evaluated."""
        self._agreed: list[int | None] | None = None
        """The facts that processes which train together have agreed on."""

    def facts(self) -> list[int]:
        """What is known here, as numbers that can be sent; -1 for what is not."""
        known = self.steps, self.epochs, self.epoch_steps, self.begun, self._first
        return [-1 if fact is None else fact for fact in known]

    def agree(self, facts: list[int]) -> None:
        """Go by these from now on, whatever else becomes known here."""
        self._agreed = [None if fact < 0 else fact for fact in facts]

    def _facts(self) -> list[int | None]:
        own = [self.steps, self.epochs, self.epoch_steps, self.begun, self._first]
        return own if self._agreed is None else self._agreed

    @property
    def total(self) -> int | None:
        """Steps of the whole run, once they are known."""
        steps, epochs, epoch_steps, _, _ = self._facts()
        if steps is not None:
            return steps
        return epochs * epoch_steps if epochs and epoch_steps else None

    def horizon(self, count: int) -> float | None:
        """Steps in which gamma is to arrive; None while it is worth waiting to know."""
        length = self.length(count)
        if length is None:
            return None
        return self._horizon_of(length)

    def _horizon_of(self, length: int) -> float:
        return max(1.0, min(self.config.share * length, self.config.latest(self._facts()[2])))

    def length(self, count: int) -> int | None:
        """Steps that the run is taken for after so many of them; None while it is worth waiting to know."""
        if self.begun is None:
            self.begun = count
        known = self.total
        _, epochs, _, begun, first = self._facts()
        begun = self.begun if begun is None else begun
        if known is None and epochs:
            if count - begun < LONG:
                return None
            known = epochs * (count - (first or begun))  # at least
        return known or ASSUMED

    def switched(self, training: bool, count: int) -> None:
        """``model.train()`` or ``model.eval()`` was called after so many steps."""
        if self.epoch_steps is not None or not self.watching:
            return
        if not training:
            self._evaluated = True
            if self._every_step and self._first is not None:
                self.epoch_steps = count - self._first
            return
        if self._first is None:
            self._first = count
        elif count - self._last > 1:
            self.epoch_steps = count - self._last
        elif count > self._last and self._evaluated:
            self._single += 1
            self.epoch_steps = 1 if self._single == 3 else None
        elif count > self._last:
            self._every_step = True
        self._last, self._evaluated = count, False

    def look_at(self, optimizer: Optimizer, count: int) -> None:
        """Ask Lightning and schedulers, where neither the user nor the script has said anything.

        Lightning also knows the steps of an epoch: it does not call ``model.train()``.
        """
        made = 1 if self.begun is None else count - self.begun  # in this process
        if self.steps is not None or made not in (1, LOOKED):
            return
        if made == 1:
            self._ask_lightning()
        elif self.epochs is None:
            self._ask_schedulers(optimizer, count)

    def _ask_lightning(self) -> None:
        if not any(name in sys.modules for name in ("lightning.pytorch", "pytorch_lightning")):
            return
        for thing in gc.get_objects():
            kind = type(thing)
            if kind.__name__ == "Trainer" and kind.__module__.partition(".")[0] in ("lightning", "pytorch_lightning"):
                steps = getattr(thing, "estimated_stepping_batches", math.inf)  # sets the data up, where need be
                batches = getattr(thing, "num_training_batches", math.inf)
                if math.isfinite(batches) and batches > 0:
                    self.epoch_steps = math.ceil(batches / getattr(thing, "accumulate_grad_batches", 1))
                if self.epochs is None and math.isfinite(steps) and steps > 0:
                    self.steps, self.source = int(steps), "Lightning's trainer"

    def _ask_schedulers(self, optimizer: Optimizer, count: int) -> None:
        for thing in gc.get_objects():
            if issubclass(type(thing), LRScheduler) and getattr(thing, "optimizer", None) is optimizer:
                scheduler: Any = thing
                length = getattr(scheduler, "total_steps", None) or getattr(scheduler, "T_max", None)
                if not isinstance(length, int) or length < 1:
                    continue
                self.source = f"the script's {type(scheduler).__name__}"
                if scheduler.last_epoch >= count - 1:  # it steps with the optimizer
                    self.steps = length
                else:
                    self.epochs = length

    @property
    def taken_for(self) -> int:
        """Steps that the run is taken for, known or not."""
        return self.total or ASSUMED

    @property
    def planned(self) -> float:
        """Steps in which gamma is to arrive, known or not."""
        return self._horizon_of(self.taken_for)

    def settled(self, count: int) -> bool:
        """Whether after so many steps no more will be known."""
        return self.total is not None or (self.epochs is None and count >= (self.begun or 0) + LOOKED)

    def __str__(self) -> str:
        """For people: what was found, and from where."""
        total = self.total
        if total is None and self.epochs:
            return f"{self.epochs:,} epochs ({self.source}); steps are counted in the first one"
        if total is None:
            return f"unknown, taken for {ASSUMED:,} steps; set budget"
        if self.epochs:
            return f"{total:,} steps: {self.epochs:,} epochs ({self.source}) of {self.epoch_steps:,} steps"
        return f"{total:,} steps ({self.source})"
