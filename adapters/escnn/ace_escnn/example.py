"""A small image network of escnn. Importing this module needs escnn."""

from __future__ import annotations

from typing import Any

import torch
from escnn import gspaces
from escnn import nn as enn
from torch import Tensor, nn

from ace_plugins.adapter import Example


class Network(nn.Module):
    """A network from plain image tensors [B, 1, H, W] to the same, which uses escnn's wrapped tensors only inside."""

    def __init__(self, space: Any, fields: int = 2) -> None:
        super().__init__()
        self.image = enn.FieldType(space, [space.trivial_repr])
        hidden = enn.FieldType(space, fields * [space.regular_repr])
        self.layers = enn.SequentialModule(
            enn.R2Conv(self.image, hidden, kernel_size=3, padding=1),
            enn.ReLU(hidden),
            enn.R2Conv(hidden, hidden, kernel_size=3, padding=1),
            enn.ReLU(hidden),
            enn.R2Conv(hidden, self.image, kernel_size=3, padding=1),
        )

    def forward(self, image: Tensor) -> Tensor:
        made: Tensor = self.layers(self.image(image)).tensor
        return made


def rotations_example(seed: int) -> Example:
    """Return a network that is equivariant under quarter turns, and random images."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        # escnn computes the bases of its kernels in single precision.
        return Example(Network(gspaces.rot2dOnR2(4)), (torch.randn(3, 1, 9, 9),), single=True)
