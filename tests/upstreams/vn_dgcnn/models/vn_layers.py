"""Layers on vector channels: features [B, C, 3], [B, C, 3, N] or [B, C, 3, N, k] (dim 3, 4 or 5)."""

import torch
from torch import nn

EPS = 1e-6


def on_channels(linear, x):
    """A linear map of the channels, the same for the three components of a vector."""
    return linear(x.transpose(1, -1)).transpose(1, -1)


def bend(p, d, negative_slope):
    """Leaky ReLU of vectors p: scales the part opposite to the direction d by the slope."""
    along = (p * d).sum(dim=2, keepdim=True)
    flat = p - along / ((d * d).sum(dim=2, keepdim=True) + EPS) * d
    return negative_slope * p + (1 - negative_slope) * torch.where(along >= 0, p, flat)


class VNLinear(nn.Module):
    """A linear map of the channels."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.map_to_feat = nn.Linear(in_channels, out_channels, bias=False)

    def forward(self, x):
        return on_channels(self.map_to_feat, x)


class VNLeakyReLU(nn.Module):
    """Leaky ReLU along learned directions, one per channel or one for all."""

    def __init__(self, in_channels, share_nonlinearity=False, negative_slope=0.2):
        super().__init__()
        self.map_to_dir = nn.Linear(in_channels, 1 if share_nonlinearity else in_channels, bias=False)
        self.negative_slope = negative_slope

    def forward(self, x):
        return bend(x, on_channels(self.map_to_dir, x), self.negative_slope)


class VNLinearLeakyReLU(nn.Module):
    """A linear map, batch normalisation and a leaky ReLU."""

    def __init__(self, in_channels, out_channels, dim=5, share_nonlinearity=False, negative_slope=0.2):
        super().__init__()
        self.dim = dim
        self.negative_slope = negative_slope
        self.map_to_feat = nn.Linear(in_channels, out_channels, bias=False)
        self.batchnorm = VNBatchNorm(out_channels, dim=dim)
        self.map_to_dir = nn.Linear(in_channels, 1 if share_nonlinearity else out_channels, bias=False)

    def forward(self, x):
        p = self.batchnorm(on_channels(self.map_to_feat, x))
        return bend(p, on_channels(self.map_to_dir, x), self.negative_slope)


class VNBatchNorm(nn.Module):
    """Batch normalisation of the lengths of vectors."""

    def __init__(self, num_features, dim):
        super().__init__()
        self.dim = dim
        self.bn = nn.BatchNorm2d(num_features) if dim == 5 else nn.BatchNorm1d(num_features)

    def forward(self, x):
        norm = torch.norm(x, dim=2) + EPS
        return x / norm.unsqueeze(2) * self.bn(norm).unsqueeze(2)


class VNMaxPool(nn.Module):
    """Max pooling over the last dim: per channel the vector that goes furthest along its learned direction."""

    def __init__(self, in_channels):
        super().__init__()
        self.map_to_dir = nn.Linear(in_channels, in_channels, bias=False)

    def forward(self, x):
        furthest = (x * on_channels(self.map_to_dir, x)).sum(dim=2, keepdim=True).argmax(dim=-1)
        kept = x.shape[:-1]
        grid = torch.meshgrid([torch.arange(size, device=x.device) for size in kept])
        return x[(*grid, furthest.expand(kept))]


def mean_pool(x, dim=-1, keepdim=False):
    """The mean along a dim."""
    return x.mean(dim=dim, keepdim=keepdim)


class VNStdFeature(nn.Module):
    """Invariant coordinates in a frame that rotates with the input, and that frame."""

    def __init__(self, in_channels, dim=4, normalize_frame=False, share_nonlinearity=False, negative_slope=0.2):
        super().__init__()
        self.dim = dim
        self.normalize_frame = normalize_frame
        same = {"dim": dim, "share_nonlinearity": share_nonlinearity, "negative_slope": negative_slope}
        self.vn1 = VNLinearLeakyReLU(in_channels, in_channels // 2, **same)
        self.vn2 = VNLinearLeakyReLU(in_channels // 2, in_channels // 4, **same)
        self.vn_lin = nn.Linear(in_channels // 4, 2 if normalize_frame else 3, bias=False)

    def forward(self, x):
        z0 = on_channels(self.vn_lin, self.vn2(self.vn1(x)))
        if self.normalize_frame:
            z0 = orthonormal(z0)
        z0 = z0.transpose(1, 2)
        equation = {3: "bij,bjk->bik", 4: "bijm,bjkm->bikm", 5: "bijmn,bjkmn->bikmn"}[self.dim]
        return torch.einsum(equation, x, z0), z0


def orthonormal(pair):
    """Orthonormalise two vectors [B, 2, 3, ...] and add their cross product: [B, 3, 3, ...]."""
    first, second = pair[:, 0], pair[:, 1]
    first = first / (first.norm(dim=1, keepdim=True) + EPS)
    second = second - (second * first).sum(dim=1, keepdim=True) * first
    second = second / (second.norm(dim=1, keepdim=True) + EPS)
    return torch.stack((first, second, torch.cross(first, second, dim=1)), dim=1)
