"""The branch of a vector neuron: one affine map of all channels of a point.

The branch adds its output to upstream's itself (`AddsItself`). On a CPU a separate pass over the points would cost as
much as the matrix product, and in an unfavourable memory order several times as much. Upstream's linear maps return
tensors with the channels innermost in memory. The branch copies such an output once into an order with the points
innermost and adds its products there, with gamma multiplied into the weights. The rest of upstream's layer then runs on
the reordered tensor. ``restore`` puts the layer's output back into upstream's order, so that later sums keep their
order of terms.

In some layers half of the input is the same for all neighbours of a point, or for all points of a cloud: upstream
repeats the centre for each neighbour, or the mean for each point. The branch maps that half only once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ace_plugins.adapter import Bounded


@dataclass(frozen=True)
class Points:
    """The input of a layer, prepared for the branches that read it."""

    x: Tensor
    """The input [B, C, 3, *points] as a contiguous tensor."""
    repeats: bool
    """True if the second half of the channels is constant along the last dimension."""


class VectorLinear(nn.Linear):
    """An affine map of points [B, C, 3, *points] to C' vectors per point.

    The output is [B, C', 3, *points] with dimensions 1 and -1 swapped, as in upstream's linear maps. Rows and columns
    of the weight run over the channels and, within a channel, over x, y and z.
    """

    def __init__(self, width_in: int, width_out: int, *, repeats: bool = False) -> None:
        super().__init__(width_in, width_out)
        self.repeats = repeats
        """True if upstream makes the second half of the channels by repeating along the last dimension."""

    def forward(self, x: Tensor) -> Tensor:
        nothing = x.new_zeros(x.shape[0], self.out_features // 3, 3, *x.shape[3:]).transpose(1, -1)
        return self.add_to(nothing, x.new_ones(()), self.prepare(x))

    def prepare(self, x: Tensor) -> Points:
        """Prepare the input, once for all branches that read it."""
        return Points(x.contiguous(), self.repeats and _repeats(x))

    def add_to(self, output: Tensor, gamma: Tensor, points: Points, fit: Tensor | None = None) -> Tensor:
        """Return upstream's output plus gamma times the map of the points."""
        x = points.x.to(output.dtype)
        if fit is None:
            # Under autocast upstream's output has half precision; the result gets the same precision.
            weight, bias = ((gamma * t).to(output.dtype) for t in (self.matrix(), self.bias))
        else:
            # The weights of each sample: gamma is constant where it trains the map, the map where it judges gamma.
            both = [[(gamma[0] * t).to(output.dtype), (gamma[1] * t.detach()).to(output.dtype)] for t in self.maps()]
            weight, bias = (torch.stack(pair)[1 - fit.long()] for pair in both)
        if fit is not None or torch.compiler.is_compiling():
            made = torch.matmul(weight, _columns(x)) + bias[..., None]
            return output + made.view(len(x), -1, *x.shape[2:]).transpose(1, -1)
        added: Tensor = _Add.apply(output, x, weight, bias, points.repeats)  # type: ignore[no-untyped-call]
        return added

    def maps(self) -> tuple[Tensor, Tensor]:
        """Return the matrix and the bias of the map."""
        return self.matrix(), self.bias

    def matrix(self) -> Tensor:
        return self.weight

    def bounded(self) -> SNVectorLinear:
        """Return this map, divided by its spectral norm."""
        return SNVectorLinear(self)

    def restore(self, output: Tensor) -> Tensor:
        """Return the layer's output in upstream's memory order."""
        return output.transpose(1, -1).contiguous().transpose(1, -1)


class SNVectorLinear(Bounded, VectorLinear):
    """A `VectorLinear` with spectral norm 1."""


def _repeats(x: Tensor) -> bool:
    """Return whether the second half of the channels is constant along the last dimension; always False off the CPU."""
    if x.dim() < 4 or x.shape[1] % 2 or x.shape[-1] == 1 or x.device.type != "cpu" or torch.compiler.is_compiling():
        return False
    second = x.detach()[:, x.shape[1] // 2 :]
    return torch.equal(second, second[..., :1].expand_as(second))


class _Add(torch.autograd.Function):
    """Computes output + weight @ x + bias for the channels [3 C] of every point.

    Of repeated values only the first is read, and only the first gets a gradient: the sum for all of them.
    """

    @staticmethod
    def forward(ctx: Any, output: Tensor, x: Tensor, weight: Tensor, bias: Tensor, repeats: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.repeats = repeats
        # This is always a copy, because upstream's tensor must not change.
        made = output.transpose(1, -1).clone(memory_format=torch.contiguous_format)
        columns = made.view(len(x), len(weight), -1)
        if repeats:
            each, once = _halves(x)
            first, second = weight.chunk(2, dim=1)
            columns.baddbmm_(first.expand(len(x), -1, -1), each)
            columns.view(*columns.shape[:2], -1, x.shape[-1]).add_((second @ once + bias[:, None])[..., None])
        else:
            columns.baddbmm_(weight.expand(len(x), -1, -1), _columns(x)).add_(bias[:, None])
        return made.transpose(1, -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        columns = grad.transpose(1, -1).contiguous().view(len(x), len(weight), -1)
        into_x = torch.empty_like(x) if ctx.needs_input_grad[1] else None
        if ctx.repeats:
            each, once = _halves(x)
            first, second = weight.chunk(2, dim=1)
            summed = columns.view(*columns.shape[:2], -1, x.shape[-1]).sum(-1)
            if into_x is not None:
                into_each, into_once = into_x.chunk(2, dim=1)
                torch.bmm(first.T.expand(len(x), -1, -1), columns, out=_columns(into_each))
                into_once.zero_()
                into_once[..., 0] = (second.T @ summed).view(into_once.shape[:-1])
            into_weight = torch.cat([_inner(columns, each), _inner(summed, once)], 1)
            return grad, into_x, into_weight, summed.sum((0, 2)), None
        if into_x is not None:
            torch.bmm(weight.T.expand(len(x), -1, -1), columns, out=_columns(into_x))
        return grad, into_x, _inner(columns, _columns(x)), columns.sum((0, 2)), None


def _columns(x: Tensor) -> Tensor:
    """Return [B, C, 3, *points] as [B, 3 C, all points]."""
    return x.view(x.shape[0], 3 * x.shape[1], -1)


def _halves(x: Tensor) -> tuple[Tensor, Tensor]:
    each, repeated = x.chunk(2, dim=1)
    return _columns(each), _columns(repeated[..., 0].contiguous())


def _inner(grad: Tensor, columns: Tensor) -> Tensor:
    """Return the sum of grad @ columns.T over the batch, without storing one matrix per sample."""
    found = grad.new_zeros(grad.shape[1], columns.shape[1])
    for one, two in zip(grad, columns, strict=True):
        found.addmm_(one, two.T)
    return found
