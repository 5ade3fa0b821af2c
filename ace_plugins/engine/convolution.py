"""The branch of a layer on images: one affine map of the patch around every pixel, which knows up from down."""

from __future__ import annotations

import math

from torch import Tensor, nn
from torch.nn import functional

from ..errors import AdapterError
from .bounded import Bounded


class Convolution(nn.Linear):
    """[B, C, H, W] -> [B, C', H', W']: a plain convolution, as a linear map of patches [C, kernel, kernel].

    It adds itself (`AddsItself`), since the height and the width of what it reads are known in a forward only. Its site
    has shapes (C,) and (C',), and reads a `Tap` that names a module.
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

    def prepare(self, x: Tensor) -> Tensor:
        """Nothing is to be done."""
        return x

    def add_to(self, output: Tensor, gamma: Tensor, x: Tensor) -> Tensor:
        value = self(x)
        if value.shape != output.shape:
            raise AdapterError(
                f"{type(self).__name__}: gives shape {list(value.shape)}, expected {list(output.shape)} as its layer "
                "gives; its kernel, stride, padding and dilation are to be the layer's"
            )
        return output.addcmul(value, gamma)

    def restore(self, output: Tensor) -> Tensor:
        """Nothing was reordered."""
        return output

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
