"""The training forwards of one step, counted, so that each has a random frame of its own that can be drawn again."""

from __future__ import annotations

import random

import torch

from ..symmetry.groups import Element


class Turns:
    """The training forwards since the last optimizer step. Nothing of it outlives a step, so none of it is saved."""

    def __init__(self) -> None:
        self.forwards = 0
        self.frame: Element | None = None
        """The frame of the forward under way."""

    def seed(self, count: int, salt: int) -> int:
        """A seed for one more forward of this step, the same whenever the run is made again.

        The script's own random stream is left alone.
        """
        self.forwards += 1
        return random.Random(f"{torch.initial_seed()} {count} {self.forwards} {salt}").getrandbits(63)
