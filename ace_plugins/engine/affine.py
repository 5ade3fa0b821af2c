"""Values of branches that are still affine in what a stem read, kept as the map instead of its rows.

A chain of BatchNorm and Linear, as the branches of SchNet and EGNO are, has no nonlinearity: with z the few numbers
that its stem reads for a node, every link is M z + c, and the mean and variance that BatchNorm needs follow from
those of z. So links multiply small matrices, whatever the number of nodes, and rows are made once, where they are
added to the model. Only modules that are known to take such a value get one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from .bounded import SNLinear
from .branches import Norm

KNOWN = {nn.Linear, SNLinear, nn.BatchNorm1d, Norm, nn.Identity, nn.Sequential}


class Read:
    """What a stem read, rows [n, k], and its moments."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows

    @cached_property
    def mean(self) -> Tensor:
        return self.rows.mean(0)

    @cached_property
    def covariance(self) -> Tensor:
        """Over n, as BatchNorm normalises by."""
        centred = self.rows - self.mean
        return centred.T @ centred / len(self.rows)

    @cached_property
    def with_ones(self) -> Tensor:
        return torch.cat([self.rows, self.rows.new_ones(len(self.rows), 1)], 1)


class Affine:
    """Rows read.rows @ matrix.T + offset [n, d]."""

    def __init__(self, read: Read, matrix: Tensor | None = None, offset: Tensor | None = None) -> None:
        self.read = read
        self.matrix = matrix
        """[d, k]; None is the identity, what was read as it is."""
        self.offset = offset
        """[d]; None is none."""

    @property
    def shape(self) -> torch.Size:
        wide = self.read.rows.shape[1] if self.matrix is None else self.matrix.shape[0]
        return torch.Size([len(self.read.rows), wide])

    def dim(self) -> int:
        return 2

    def tensor(self) -> Tensor:
        if self.matrix is None:
            return self.read.rows
        return functional.linear(self.read.rows, self.matrix, self.offset)

    def added_to(self, other: Tensor, gamma: Tensor) -> Tensor:
        """other + gamma * rows, in one product."""
        if self.matrix is None:
            return other + gamma * self.read.rows
        offset = self.matrix.new_zeros(len(self.matrix)) if self.offset is None else self.offset
        scaled = gamma * torch.cat([self.matrix, offset[:, None]], 1)
        return torch.addmm(other, self.read.with_ones, scaled.T)

    def mapped(self, weight: Tensor, bias: Tensor | None = None) -> Affine:
        if self.matrix is None:
            return Affine(self.read, weight, bias)
        if self.offset is None:
            return Affine(self.read, weight @ self.matrix, bias)
        return Affine(self.read, weight @ self.matrix, functional.linear(self.offset, weight, bias))

    def normalised(
        self,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Affine:
        """Batch normalisation, with the arguments of torch's."""
        assert self.matrix is not None
        if training or running_mean is None or running_var is None:
            mean = self.matrix @ self.read.mean
            if self.offset is not None:
                mean = mean + self.offset
            var = ((self.matrix @ self.read.covariance) * self.matrix).sum(1).clamp_min(0)
            if training and running_mean is not None and running_var is not None:
                n = len(self.read.rows)
                with torch.no_grad():
                    running_mean.lerp_(mean.to(running_mean), momentum)
                    running_var.lerp_(var.to(running_var) * (n / (n - 1)), momentum)
        else:
            mean, var = running_mean, running_var
        scale = (var + eps).rsqrt()
        if weight is not None:
            scale = scale * weight
        offset = (-mean if self.offset is None else self.offset - mean) * scale
        return Affine(self.read, scale[:, None] * self.matrix, offset if bias is None else offset + bias)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, Affine):
            if func is functional.linear:
                return first.mapped(*args[1:], **kwargs)
            if func is functional.batch_norm and first.matrix is not None and len(first.read.rows) > 1:
                return first.normalised(*args[1:], **kwargs)
        made = (arg.tensor() if isinstance(arg, Affine) else arg for arg in args)
        return func(*made, **{name: arg.tensor() if isinstance(arg, Affine) else arg for name, arg in kwargs.items()})

    def __getattr__(self, name: str) -> Any:
        """Whatever else a tensor has, of the rows."""
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.tensor(), name)


def takes_affine(branch: nn.Module) -> bool:
    """Whether it is made of maps alone that are known to leave such a value one, or to make its rows."""
    return all(type(module) in KNOWN for module in branch.modules())


def affine(read: Tensor, width: int) -> Tensor | Affine:
    """A value to start from, where keeping the map pays: rows of fewer numbers than the stem makes of them."""
    pays = read.dim() == 2 and read.shape[1] < width and read.dtype in (torch.float32, torch.float64)
    if not pays or read.is_meta or torch.is_autocast_enabled(read.device.type) or torch.compiler.is_compiling():
        return read
    return Affine(Read(read))
