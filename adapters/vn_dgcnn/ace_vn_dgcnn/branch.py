"""The branch of a vector neuron: one affine map of all channels of a point, without a copy of the points."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional


class VectorLinear(nn.Linear):
    """[B, C, 3, *points] -> C' vectors per point, laid out as upstream's linear maps give them: dimensions 1 and -1 of
    [B, C', 3, *points] swapped. Rows and columns of the weight run over the channels and, within one, over x, y, z."""

    def forward(self, x: Tensor) -> Tensor:
        return self.joint([self], x)[0]

    @staticmethod
    def joint(maps: Sequence[nn.Linear], x: Tensor) -> list[Tensor]:
        """The values of several maps of one input, from one product."""
        batch, channels, _, *points = x.shape
        # As upstream's features lie in memory after a linear map: then the weights are turned, not the points.
        turned = len(points) == 1 and not x.is_contiguous() and x.transpose(1, -1).is_contiguous()
        weight, bias = _stacked(maps, channels, turned=turned)
        if turned:
            rows = x.transpose(1, -1).flatten(2)
        else:
            rows = x.reshape(batch, 3 * channels, -1).transpose(1, 2)
        if rows.is_contiguous():
            made = functional.linear(rows, weight, bias)
        else:
            made = torch.baddbmm(bias, rows, weight.T.expand(batch, -1, -1))
        values = torch.split(made, [m.out_features for m in maps], dim=2)
        return [_as_upstream(value, points) for value in values]


def _stacked(maps: Sequence[nn.Linear], channels: int, *, turned: bool) -> tuple[Tensor, Tensor]:
    """Weights and biases with x, y, z before the channels in what comes out; in what goes in only if ``turned``."""
    weights, biases = [], []
    for m in maps:
        weight = m.weight.view(-1, 3, channels, 3).transpose(0, 1)
        weights.append((weight.transpose(2, 3) if turned else weight).reshape(m.weight.shape))
        biases.append(m.bias.view(-1, 3).T.reshape(-1))
    return torch.cat(weights), torch.cat(biases)


def _as_upstream(made: Tensor, points: Sequence[int]) -> Tensor:
    """[B, all points, 3 C'] with the dimensions that upstream has."""
    batch, _, wide = made.shape
    vectors = made.reshape(batch, *points, 3, wide // 3)
    return vectors if len(points) < 2 else vectors.movedim(2, 1).transpose(2, 3)
