"""A small image network that is equivariant under quarter turns, in plain PyTorch.

Features [B, 4 C, H, W] are C regular fields of C_4: channel 4 c + r is field c, computed with the kernel rotated by r
quarter turns. If the image is rotated by a quarter turn, every channel is rotated too, and moves from r to r + 1.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

TURNS = 4


class C4Conv(nn.Module):
    """C_4-equivariant convolution to regular fields [B, 4 fields_out, H, W].

    The input consists of regular fields [B, 4 fields_in, H, W]; if ``lifts``, of plain images [B, fields_in, H, W].
    """

    def __init__(self, fields_in: int, fields_out: int, kernel_size: int, *, lifts: bool = False) -> None:
        super().__init__()
        if kernel_size % 2 == 0:
            raise ValueError(f"kernel_size: expected an odd number, so that it has a centre, found {kernel_size}")
        self.fields_in, self.fields_out, self.kernel_size, self.lifts = fields_in, fields_out, kernel_size, lifts
        before = 1 if lifts else TURNS
        self.weight = nn.Parameter(torch.empty(fields_out, fields_in, before, kernel_size, kernel_size))
        self.bias = nn.Parameter(torch.zeros(fields_out))
        bound = math.sqrt(6 / (fields_in * before * kernel_size**2))
        nn.init.uniform_(self.weight, -bound, bound)

    @property
    def channels_in(self) -> int:
        return self.fields_in * (1 if self.lifts else TURNS)

    @property
    def channels_out(self) -> int:
        return self.fields_out * TURNS

    def kernel(self) -> Tensor:
        """Return the kernel in all four rotations, as one tensor [4 fields_out, channels_in, k, k]."""
        rotated = [torch.rot90(self.weight.roll(r, dims=2), r, (-2, -1)) for r in range(TURNS)]
        return torch.stack(rotated, dim=1).reshape(self.channels_out, self.channels_in, *self.weight.shape[-2:])

    def forward(self, x: Tensor) -> Tensor:
        bias = self.bias.repeat_interleave(TURNS)
        return functional.conv2d(x, self.kernel(), bias, padding=self.kernel_size // 2)


class C4Net(nn.Module):
    """C_4-equivariant network from images [B, 1, H, W] to images [B, out, H, W].

    It lifts the image to regular fields, applies ``depth`` more convolutions with SiLU between them, and averages each
    of the last fields over its four rotations.
    """

    def __init__(self, fields: int = 4, depth: int = 2, kernel_size: int = 5, out: int = 1) -> None:
        super().__init__()
        layers = [C4Conv(1, fields, kernel_size, lifts=True)]
        layers += [C4Conv(fields, fields, kernel_size) for _ in range(depth - 1)]
        self.layers = nn.ModuleList([*layers, C4Conv(fields, out, kernel_size)])

    def forward(self, image: Tensor) -> Tensor:
        x = image
        for layer in self.layers[:-1]:
            x = functional.silu(layer(x))
        return torch.unflatten(self.layers[-1](x), 1, (-1, TURNS)).mean(2)
