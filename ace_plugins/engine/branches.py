"""Non-equivariant branches: linear maps, MLPs, links of a chain, and convolutions for layers on images."""

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
from .spectral_norm import Bounded


class Flat(nn.Module):
    """Wrapper that gives a module all features of a node in the last dimension.

    The features of the node are its trailing dimensions, (..., *shape_in) -> (..., *shape_out), or dimension ``axis``.
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
    """Batch normalisation of the last dimension over all others, [..., width] -> [..., width].

    A single row is normalised with the running statistics. ``num_batches_tracked`` is a float and not saved, because
    scripts that average checkpoints expect floats.

    Args:
        width: Size of the last dimension.
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
            # Cumulative average, used by torch.optim.swa_utils.update_bn. Batches are counted only here, because
            # torch.compile treats the count as a constant and would compile again for every batch.
            self.num_batches_tracked += training
            factor = 1 / max(float(self.num_batches_tracked), 1.0)
        result = nn.functional.batch_norm(
            rows, self.running_mean, self.running_var, self.weight, self.bias, training, factor, self.eps
        )
        return result if x.dim() == 2 else result.reshape(x.shape)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        state_dict.pop(prefix + "num_batches_tracked", None)
        # BatchNorm's own method would put the counter back.
        nn.Module._load_from_state_dict(self, state_dict, prefix, *rest)


class SyncNorm(nn.SyncBatchNorm):
    """A `Norm` with the statistics of all ranks, made by ``convert_sync_batchnorm``."""

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


def convert_norm(convert: Any, cls: Any, module: nn.Module, process_group: Any = None) -> Any:
    """Wrap ``SyncBatchNorm.convert_sync_batchnorm``, which would normalise dimension 1 instead of the last."""
    return SyncNorm(module, process_group) if isinstance(module, Norm) else convert(cls, module, process_group)


def _adapt_shape(inner: nn.Module, node: Node) -> nn.Module:
    plain = len(node.shape_in) == len(node.shape_out) == 1 and node.axis == -1
    return inner if plain else Flat(inner, node)


def linear(node: Node) -> nn.Module:
    """Return one affine map of the whole feature vector.

    Args:
        node: The site or stem; the map goes from ``shape_in`` to ``shape_out``, on ``axis`` for channels-first layers.

    Returns:
        A module [..., *shape_in] -> [..., *shape_out].
    """
    return _adapt_shape(nn.Linear(node.width_in, node.width_out), node)


def mlp(node: Node) -> nn.Module:
    """Return the default branch: Linear(d_in, 2d) GELU Linear(2d, d) GELU Linear(d, d), with d the output's width.

    Args:
        node: The site or stem, as for `linear`.

    Returns:
        A module [..., *shape_in] -> [..., *shape_out].
    """
    d = node.width_out
    layers = (nn.Linear(node.width_in, 2 * d), nn.GELU(), nn.Linear(2 * d, d), nn.GELU(), nn.Linear(d, d))
    return _adapt_shape(nn.Sequential(*layers), node)


def norm_linear(node: Node) -> nn.Module:
    """Return one link of a chain of branches: BatchNorm(d_in) Linear(d_in, d).

    Args:
        node: The site or stem, as for `linear`.

    Returns:
        A module [..., *shape_in] -> [..., *shape_out].
    """
    return _adapt_shape(nn.Sequential(Norm(node.width_in), nn.Linear(node.width_in, node.width_out)), node)


@contextmanager
def fork_random_stream() -> Iterator[None]:
    """Draw initial weights without moving the script's random stream.

    The fork is seeded from the stream's state: the same script seed gives the same branches.
    """
    state = torch.random.get_rng_state()
    seed = int.from_bytes(hashlib.sha256(state.numpy().tobytes()).digest()[:8], "little") >> 1
    with torch.random.fork_rng(devices=[]):
        # Branches are made on the CPU. torch.manual_seed would reseed every accelerator as well.
        torch.default_generator.manual_seed(seed)
        yield


class Convolution(nn.Linear):
    """A plain convolution [B, C, H, W] -> [B, C', H', W'], stored as a linear map of patches [C, kernel, kernel].

    Its site has ``shape_in=(C,)``, ``shape_out=(C',)`` and ``axis=1``.

    Args:
        channels_in: C.
        channels_out: C'.
        kernel: Height and width of a patch.
        stride: Distance between neighbouring patches, in pixels.
        padding: Pixels added above and below, and to the left and right; one number for both.
        dilation: Distance between neighbouring pixels of a patch.
        circular: Continue the image periodically; by default padding is zero.
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

    @property
    def overlap(self) -> int:
        """Largest number of patches that share a pixel, along one axis."""
        return math.ceil(self.kernel * math.gcd(self.stride, self.dilation) / self.stride)

    def matrix(self) -> Tensor:
        """Return the weight that multiplies a patch, [C', C * kernel^2]."""
        return self.weight

    def forward(self, x: Tensor) -> Tensor:
        weight = self.matrix().view(self.out_features, self.channels, self.kernel, self.kernel)
        (high, wide), mode = self.padding, "circular" if self.circular else "constant"
        x = functional.pad(x, (wide, wide, high, high), mode=mode)
        return functional.conv2d(x, weight, self.bias, self.stride, 0, self.dilation)

    def bounded(self) -> SNConvolution:
        """Return the same map with spectral norm 1 or less."""
        return SNConvolution(self)


class SNConvolution(Bounded, Convolution):
    """A convolution of spectral norm 1 or less.

    The patches of an image, as one vector, have at most ``overlap`` times the norm of the image, so the map of one
    patch is divided by ``overlap`` as well as by its spectral norm.
    """

    def matrix(self) -> Tensor:
        return super().matrix() / self.overlap
