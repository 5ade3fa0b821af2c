"""Non-equivariant branches: the shapes the literature uses, and the host's default.

The branch of a layer on images: one affine map of the patch around every pixel, which knows up from down.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..contract.sites import Node
from ..errors import AdapterError
from .spectral_norm import Bounded


class Flat(nn.Module):
    """A module applied to feature vectors that are not the last dimension.

    The features are the trailing dimensions, (..., *shape_in) -> (..., *shape_out), or the dimension ``axis``.
    """

    def __init__(self, inner: nn.Module, node: Node) -> None:
        super().__init__()
        self.inner = inner
        self.shape_in, self.shape_out, self.axis = node.shape_in, node.shape_out, node.axis

    def forward(self, x: Tensor) -> Tensor:
        if self.axis != -1:
            moved: Tensor = self.inner(x.movedim(self.axis, -1))
            return moved.movedim(-1, self.axis)
        lead = x.shape[: x.dim() - len(self.shape_in)]
        result: Tensor = self.inner(x.flatten(-len(self.shape_in)))
        return result.reshape(*lead, *self.shape_out)


class Norm(nn.BatchNorm1d):
    """Batch normalisation of the last dimension over all others, which a script's habits cannot trip over.

    A single row, which has no spread, is normalised by the running statistics. The number of batches is no part of
    its state_dict, and no integer: with a fixed momentum nothing reads it, and averaging checkpoints chokes on them.
    """

    num_batches_tracked: Tensor

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.register_buffer("num_batches_tracked", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
        training = self.training and rows.shape[0] > 1
        factor = self.momentum
        if factor is None:
            # As torch.optim.swa_utils.update_bn has it: the statistics are averages. Only then batches are counted:
            # to a compiler a number is a constant, and it would compile anew for every batch.
            self.num_batches_tracked += training
            factor = 1 / max(float(self.num_batches_tracked), 1.0)
        result = nn.functional.batch_norm(
            rows, self.running_mean, self.running_var, self.weight, self.bias, training, factor, self.eps
        )
        return result if x.dim() == 2 else result.reshape(x.shape)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        state_dict.pop(prefix + "num_batches_tracked", None)
        # Not BatchNorm's own, which would put the counter back.
        nn.Module._load_from_state_dict(self, state_dict, prefix, *rest)


class SyncNorm(nn.SyncBatchNorm):
    """A `Norm` whose statistics are those of all processes: what ``convert_sync_batchnorm`` makes of it."""

    def __init__(self, norm: Norm, group: Any) -> None:
        super().__init__(norm.num_features, norm.eps, norm.momentum, process_group=group)
        self.weight, self.bias = norm.weight, norm.bias
        self.running_mean, self.running_var = norm.running_mean, norm.running_var
        self.register_buffer("num_batches_tracked", norm.num_batches_tracked, persistent=False)
        self.train(norm.training)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = super().forward(x.reshape(-1, x.shape[-1]))
        return result.reshape(x.shape)

    _load_from_state_dict = Norm._load_from_state_dict  # type: ignore[assignment]


def converting(convert: Any, cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Around ``SyncBatchNorm.convert_sync_batchnorm``, which would normalise another dimension than the last."""
    module = args[0] if args else kwargs.get("module")
    if not isinstance(module, Norm):
        return convert(*args, **kwargs)
    return SyncNorm(module, args[1] if len(args) > 1 else kwargs.get("process_group"))


def _shaped(inner: nn.Module, node: Node) -> nn.Module:
    plain = len(node.shape_in) == len(node.shape_out) == 1 and node.axis == -1
    return inner if plain else Flat(inner, node)


def linear(node: Node) -> nn.Module:
    """One affine map of the whole feature vector."""
    return _shaped(nn.Linear(node.width_in, node.width_out), node)


def mlp(node: Node) -> nn.Module:
    """Linear(d_in, 2d) GELU Linear(2d, d) GELU Linear(d, d), with d the width of the output: the default."""
    d = node.width_out
    layers = (nn.Linear(node.width_in, 2 * d), nn.GELU(), nn.Linear(2 * d, d), nn.GELU(), nn.Linear(d, d))
    return _shaped(nn.Sequential(*layers), node)


def norm_linear(node: Node) -> nn.Module:
    """BatchNorm(d_in) Linear(d_in, d): one link of a chain."""
    return _shaped(nn.Sequential(Norm(node.width_in), nn.Linear(node.width_in, node.width_out)), node)


@contextmanager
def forked_random_stream() -> Iterator[None]:
    """Draw initial weights without moving the script's random stream.

    The fork is seeded from the stream's state: the same script seed gives the same branches, and the numbers
    are not the ones the script draws next.
    """
    state = torch.random.get_rng_state()
    seed = int.from_bytes(hashlib.sha256(state.numpy().tobytes()).digest()[:8], "little") >> 1
    with torch.random.fork_rng(devices=[]):
        # Only the CPU stream: branches are made on CPU, wherever the model is. Not torch.manual_seed, which
        # would reseed every accelerator as well.
        torch.default_generator.manual_seed(seed)
        yield


class Convolution(nn.Linear):
    """A plain convolution [B, C, H, W] -> [B, C', H', W'], stored as a linear map of patches [C, kernel, kernel].

    Its site has ``shape_in=(C,)``, ``shape_out=(C',)`` and ``axis=1``.
    """

    def __init__(
        self,
        channels_in: int,
        channels_out: int,
        kernel: int,
        *,
        stride: int = 1,
        padding: int | tuple[int, int] = 0,
        dilation: int = 1,
        circular: bool = False,
    ) -> None:
        super().__init__(channels_in * kernel**2, channels_out)
        self.channels, self.kernel = channels_in, kernel
        self.stride, self.dilation, self.circular = stride, dilation, circular
        self.padding = (padding, padding) if isinstance(padding, int) else padding
        """Above and below, and to the left and right."""

    @property
    def overlap(self) -> int:
        """In how many patches a pixel is, along one axis, at most."""
        return math.ceil(self.kernel * math.gcd(self.stride, self.dilation) / self.stride)

    def matrix(self) -> Tensor:
        """What multiplies a patch, [C', C * kernel^2]."""
        return self.weight

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() != 4 or x.shape[1] != self.channels:
            raise AdapterError(
                f"{type(self).__name__}: expected images [B, {self.channels}, H, W], found shape {list(x.shape)}"
            )
        weight = self.matrix().view(self.out_features, self.channels, self.kernel, self.kernel)
        (high, wide), mode = self.padding, "circular" if self.circular else "constant"
        x = functional.pad(x, (wide, wide, high, high), mode=mode)
        return functional.conv2d(x, weight, self.bias, self.stride, 0, self.dilation)

    def bounded(self) -> SNConvolution:
        """The same map, with an output that is no longer than its input."""
        return SNConvolution(self)


class SNConvolution(Bounded, Convolution):
    """A convolution of spectral norm 1 or less.

    All patches of an image together are longer than the image by ``overlap`` at most: so many times along each axis a
    pixel is in them. What the spectral norm of the map of one patch is divided by, besides itself, is that.
    """

    def __init__(self, plain: Convolution) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = plain.in_features, plain.out_features
        self.channels, self.kernel = plain.channels, plain.kernel
        self.stride, self.padding, self.dilation = plain.stride, plain.padding, plain.dilation
        self.circular = plain.circular
        self.weight, self.bias = plain.weight, plain.bias
        self.begin()

    def matrix(self) -> Tensor:
        return super().matrix() / self.overlap
