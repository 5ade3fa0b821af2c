"""The branch of a vector neuron: one affine map of all channels of a point, at as little cost as can be.

Measured on a CPU, passes over the points cost as much as products. So gamma is in the weights, not in a pass of its
own; the points are brought into the order of upstream's outputs once, for both branches of a layer, which read one
input; and the products are added up in upstream's output itself. Half of what some layers read is the same for all neighbours
of a point, or for all points of a cloud: upstream repeats the centre, or the mean, beside each of them. That half is
mapped once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Points:
    """What a layer reads, in the order of upstream's outputs."""

    each: Tensor
    """A row for each point: [B, k, N, 3 C], [B, N, 3 C] or [B, 3 C]."""
    once: Tensor | None = None
    """What is repeated along the dimension after B, without that dimension; then ``each`` has only the other half."""


class VectorLinear(nn.Linear):
    """[B, C, 3, *points] -> C' vectors per point, laid out as upstream's linear maps give them: dimensions 1 and -1 of
    [B, C', 3, *points] swapped. Rows and columns of the weight run over the channels and, within one, over x, y, z."""

    def __init__(self, width_in: int, width_out: int, *, repeats: bool = False) -> None:
        super().__init__(width_in, width_out)
        self.repeats = repeats
        """The second half of the channels is made by repeating, along the last dimension."""

    def forward(self, x: Tensor) -> Tensor:
        points = (*reversed(x.shape[3:]), 3)  # [k, N, 3], of which upstream has [k, 3, N]
        shape = (*points[:-2], *reversed(points[-2:])) if len(points) == 3 else points
        return self.add_to(x.new_zeros(x.shape[0], *shape, self.out_features // 3), x.new_ones(()), self.prepare(x))

    def prepare(self, x: Tensor) -> Points:
        """For all branches that read this."""
        return Points(*_Halves.apply(x)) if self.repeats and _repeats(x) else Points(_rows(x))  # type: ignore[no-untyped-call]

    def add_to(self, output: Tensor, gamma: Tensor, points: Points) -> Tensor:
        """Add gamma times the map of the points to upstream's output, in place."""
        weight, bias = gamma * _outwards(self.weight), gamma * _outwards(self.bias)
        if points.once is not None:
            weight, other = weight.chunk(2, dim=1)
            bias = nn.functional.linear(points.once, other, bias).unsqueeze(1)
        added: Tensor = _Add.apply(output.contiguous(), points.each, weight, bias)  # type: ignore[no-untyped-call]
        return added


def _outwards(parameter: Tensor) -> Tensor:
    """A weight [3 C', 3 C] or bias [3 C'] whose rows run over x, y, z first, as upstream's outputs do."""
    return parameter.view(-1, 3, *parameter.shape[1:]).transpose(0, 1).reshape(parameter.shape)


def _rows(x: Tensor) -> Tensor:
    """[B, C, 3, N, k] -> [B, k, N, 3 C]."""
    return x.permute(0, *range(x.dim() - 1, 2, -1), 1, 2).flatten(-2).contiguous()


def _from_rows(rows: Tensor) -> Tensor:
    """And back."""
    x = rows.reshape(*rows.shape[:-1], rows.shape[-1] // 3, 3)
    return x.permute(0, x.dim() - 2, x.dim() - 1, *range(x.dim() - 3, 0, -1))


def _repeats(x: Tensor) -> bool:
    """Whether the second half of the channels is one and the same along the last dimension.

    Looked at, not taken on trust, where looking is cheap beside the product: elsewhere it would be a wait."""
    if x.dim() < 4 or x.shape[1] % 2 or x.shape[-1] == 1 or x.device.type != "cpu":
        return False
    second = x.detach()[:, x.shape[1] // 2 :]
    return torch.equal(second, second[..., :1].expand_as(second))


class _Halves(torch.autograd.Function):
    """Rows of the first half of the channels, and of the second half what is repeated.

    The gradient of the latter goes to the first of the repetitions: upstream, which repeated it, sums over them.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.shape = x.shape
        first, second = x.chunk(2, dim=1)
        return _rows(first), _rows(second[..., 0])

    @staticmethod
    def backward(ctx: Any, each: Tensor, once: Tensor) -> Tensor:
        half = ctx.shape[1] // 2
        grad = each.new_empty(ctx.shape)
        grad[:, :half] = _from_rows(each)
        grad[:, half:] = 0
        grad[:, half:, ..., 0] = _from_rows(once)
        return grad


class _Add(torch.autograd.Function):
    """output += rows @ weight.T + bias, in place.

    Where the rows are [B, k, N, 3 C], upstream's output has x, y and z apart, [B, k, 3, N, C']: three products.
    ``bias`` is [3 C'], or has a value for every row but for those that the dimension after B repeats.
    """

    @staticmethod
    def forward(ctx: Any, output: Tensor, rows: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.mark_dirty(output)
        ctx.save_for_backward(rows, weight)
        ctx.bias = bias.shape
        for target, part in _parts(output, weight):
            _accumulate(target, rows, part.T)
        output += _as_output(bias, output.dim())
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        rows, weight = ctx.saved_tensors
        grad = grad.contiguous()
        parts = _parts(grad, weight)
        into_rows = parts[0][0] @ parts[0][1]
        for part_grad, part in parts[1:]:
            _accumulate(into_rows, part_grad, part)
        into_weight = [_inner(part_grad, rows) for part_grad, _ in parts]
        return (
            grad,
            into_rows,
            into_weight[0] if len(into_weight) == 1 else torch.cat(into_weight),
            _into_bias(grad, ctx.bias),
        )


def _parts(output: Tensor, weight: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Parts of the output as rows, each with its rows of the weight."""
    if output.dim() < 5:
        return [(output.flatten(-2), weight)]
    return [(output[:, :, axis], part) for axis, part in enumerate(weight.chunk(3))]


def _as_output(bias: Tensor, dim: int) -> Tensor:
    vectors = bias.view(*bias.shape[:-1], 3, -1)
    if dim < 5:
        return vectors
    return vectors.unsqueeze(-2) if bias.dim() == 1 else vectors.transpose(-3, -2)


def _into_bias(grad: Tensor, shape: torch.Size) -> Tensor:
    if len(shape) > 1:
        grad = grad.sum(1, keepdim=True)
    vectors = grad.transpose(2, 3) if grad.dim() == 5 else grad
    return vectors.flatten(-2) if len(shape) > 1 else vectors.sum(tuple(range(vectors.dim() - 2))).flatten()


def _accumulate(into: Tensor, rows: Tensor, matrix: Tensor) -> None:
    """into += rows @ matrix, without another tensor of that size."""
    if into.dim() == 4:
        into, rows = into.flatten(0, 1), rows.flatten(0, 1)
        into.baddbmm_(rows, matrix.expand(len(rows), -1, -1))
    else:
        into.view(-1, into.shape[-1]).addmm_(rows.reshape(-1, rows.shape[-1]), matrix)


def _inner(grad: Tensor, rows: Tensor) -> Tensor:
    """grad.T @ rows, over all rows."""
    if grad.dim() == 4:
        return torch.bmm(grad.flatten(0, 1).mT, rows.flatten(0, 1)).sum(0)
    return grad.reshape(-1, grad.shape[-1]).T @ rows.reshape(-1, rows.shape[-1])
