"""Non-equivariant branches: linear maps, MLPs, branches that read another branch, and convolutions of images."""

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
from .holdout import FIT, scale
from .spectral_norm import Bounded


class Flat(nn.Module):
    """Applies a module to flattened features, [..., *shape_in] -> [..., *shape_out], or only to dimension ``axis``."""

    def __init__(self, inner: nn.Module, node: Node) -> None:
        super().__init__()
        self.inner = inner
        self.shape_in, self.shape_out, self.axis = node.shape_in, node.shape_out, node.axis

    def forward(self, x: Tensor) -> Tensor:
        if self.axis != -1:
            moved: Tensor = self.inner(x.movedim(self.axis, -1))
            return moved.movedim(-1, self.axis)
        result: Tensor = self.inner(x.flatten(-len(self.shape_in)))
        return torch.unflatten(result, -1, self.shape_out)


class Norm(nn.BatchNorm1d):
    """Batch normalisation of the last dimension, [..., width]; a batch of one row uses the running statistics.

    Args:
        width: Size of the last dimension.
    """

    num_batches_tracked: Tensor
    fits_rows = True
    statistics: str = "batch"
    """Statistics used in training. "batch": those of the batch, which also update the running statistics. "next": those
    of the batch, which also replace the running statistics. "constant": the running statistics, unchanged."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        # A float that is not saved, because scripts that average checkpoints expect floats.
        self.register_buffer("num_batches_tracked", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
        # torch.optim.swa_utils.update_bn, which sets momentum to None, replaces constant statistics too.
        constant = self.statistics == "constant" and self.momentum is not None
        training = self.training and rows.shape[0] > 1 and not constant
        factor = 1.0 if self.statistics == "next" else self.momentum
        if factor is None:
            # Cumulative average, used by torch.optim.swa_utils.update_bn. Batches are counted only here, because
            # torch.compile treats the count as a constant and would compile again for every batch.
            self.num_batches_tracked += training
            factor = 1 / max(float(self.num_batches_tracked), 1.0)
        together = FIT.rows is None  # otherwise only some of the rows train weight and bias
        weight, bias = (self.weight, self.bias) if together else (None, None)
        mean, variance = self.running_mean, self.running_var
        result = functional.batch_norm(rows, mean, variance, weight, bias, training, factor, self.eps).reshape(x.shape)
        if training and self.statistics == "next":
            # torch stores the unbiased variance, but normalises with the biased one. Not changed in place, because
            # the backward pass uses the stored tensor.
            self.running_var = variance.detach() * (1 - 1 / rows.shape[0])  # type: ignore[union-attr]
        return result if together else scale(result, self.weight, self.bias)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        state_dict.pop(prefix + "num_batches_tracked", None)
        # BatchNorm's own method would add the counter to the state_dict again.
        nn.Module._load_from_state_dict(self, state_dict, prefix, *rest)


def _adapt_shape(inner: nn.Module, node: Node) -> nn.Module:
    plain = len(node.shape_in) == len(node.shape_out) == 1 and node.axis == -1
    return inner if plain else Flat(inner, node)


def linear(node: Node) -> nn.Module:
    """Return one affine map of the whole feature vector.

    Args:
        node: The site or stem, with the shapes of the map's input and output, and ``axis`` for channels-first layers.

    Returns:
        A module that maps [..., *shape_in] to [..., *shape_out].
    """
    return _adapt_shape(nn.Linear(node.width_in, node.width_out), node)


def mlp(node: Node) -> nn.Module:
    """Return the default branch: Linear(d_in, 2d), GELU, Linear(2d, d), GELU, Linear(d, d); d is the output's width.

    Args:
        node: The site or stem, as for `linear`.

    Returns:
        A module [..., *shape_in] -> [..., *shape_out].
    """
    d = node.width_out
    layers = (nn.Linear(node.width_in, 2 * d), nn.GELU(), nn.Linear(2 * d, d), nn.GELU(), nn.Linear(d, d))
    return _adapt_shape(nn.Sequential(*layers), node)


def norm_linear(node: Node) -> nn.Module:
    """Return a branch that reads another branch: BatchNorm(d_in), then Linear(d_in, d); d is the output's width.

    Args:
        node: The site or stem, as for `linear`.

    Returns:
        A module [..., *shape_in] -> [..., *shape_out].
    """
    return _adapt_shape(nn.Sequential(Norm(node.width_in), nn.Linear(node.width_in, node.width_out)), node)


@contextmanager
def fork_random_stream() -> Iterator[None]:
    """Use a random stream seeded from the script's inside a ``with`` block. The script's stream stays unchanged."""
    state = torch.random.get_rng_state()
    seed = int.from_bytes(hashlib.sha256(state.numpy().tobytes()).digest()[:8], "little") >> 1
    with torch.random.fork_rng(devices=[]):
        # Branches are made on the CPU. torch.manual_seed would reseed every accelerator as well.
        torch.default_generator.manual_seed(seed)
        yield


class Convolution(nn.Linear):
    """A plain convolution from [B, C, H, W] to [B, C', H', W'], stored as a linear map of patches [C, kernel, kernel].

    Its site has ``shape_in=(C,)``, ``shape_out=(C',)`` and ``axis=1``.

    Args:
        channels_in: Number of input channels, C.
        channels_out: Number of output channels, C'.
        kernel: Height and width of a patch.
        stride: Distance between neighbouring patches, in pixels.
        padding: Pixels added (above and below, left and right); one number for both directions.
        dilation: Distance between neighbouring pixels of a patch.
        circular: Pad by continuing the image periodically; by default the added pixels are 0.
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

    def matrix(self) -> Tensor:
        """Return the weight that multiplies a patch, [C', C * kernel^2]."""
        return self.weight

    def forward(self, x: Tensor) -> Tensor:
        weight = self.matrix().view(self.out_features, self.channels, self.kernel, self.kernel)
        (high, wide), mode = self.padding, "circular" if self.circular else "constant"
        x = functional.pad(x, (wide, wide, high, high), mode=mode)
        return functional.conv2d(x, weight, self.bias, self.stride, 0, self.dilation)

    def bounded(self) -> SNConvolution:
        """Return this convolution, divided so that its spectral norm is at most 1."""
        return SNConvolution(self)


class SNConvolution(Bounded, Convolution):
    """A convolution whose spectral norm is at most 1."""

    def matrix(self) -> Tensor:
        # Along one axis, at most ``overlap`` patches share a pixel. So the patches of an image, taken as one vector,
        # have at most ``overlap`` times the norm of the image.
        overlap = math.ceil(self.kernel * math.gcd(self.stride, self.dilation) / self.stride)
        return super().matrix() / overlap
