"""Which part the branches have in the training forwards of a step: whether they sit one out, and in which frame."""

from __future__ import annotations

import random

import torch

from ..symmetry.groups import Element


class Part:
    """The training forwards since the last optimizer step. Nothing of it outlives a step, so none of it is saved."""

    def __init__(self) -> None:
        self.forwards = 0
        """How many there were."""
        self.resting = False
        """The branches sit out the forward under way."""
        self.taken = False
        """They were in one of them."""
        self.frame: Element | None = None
        """The frame of the forward under way."""

    @property
    def none(self) -> bool:
        """There were forwards, and the branches were in none of them."""
        return bool(self.forwards) and not self.taken

    def pause(self) -> None:
        """Between two forwards."""
        self.resting, self.frame = False, None

    def begin(self, share: float, count: int) -> bool:
        """A training forward begins. Says whether the branches sit it out, as they do in this share of them.

        Nothing but the step decides, so that processes that train together agree, whatever their seeds.
        """
        self.forwards += 1
        self.resting = bool(share) and random.Random(f"{count} {self.forwards}").random() < share
        self.taken = self.taken or not self.resting
        return self.resting

    def seed(self, count: int, salt: int) -> int:
        """A seed for this forward, the same whenever it is made again. The script's own stream is left alone."""
        return random.Random(f"{torch.initial_seed()} {count} {self.forwards} {salt}").getrandbits(63)
