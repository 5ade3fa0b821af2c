import math

import torch
from torch import nn


def get_timestep_embedding(timesteps, embedding_dim, max_positions=10000):
    """Return sines and cosines of the time steps at embedding_dim / 2 frequencies: [T, embedding_dim]."""
    half = embedding_dim // 2
    exponents = torch.arange(half, device=timesteps.device, dtype=torch.float32) / max(half - 1, 1)
    angles = timesteps.float()[:, None] * torch.exp(-math.log(max_positions) * exponents)
    embedding = torch.cat((angles.sin(), angles.cos()), dim=1)
    return nn.functional.pad(embedding, (0, embedding_dim - 2 * half))


class SpectralConv1d(nn.Module):
    """Convolution over time of scalars [T, N, C]. Mixes the lowest frequencies and drops the others."""

    def __init__(self, in_ch, out_ch, modes1):
        super().__init__()
        self.modes1 = modes1
        self.weights1 = nn.Parameter(torch.rand(in_ch, out_ch, modes1, 2) / (in_ch * out_ch))

    def forward(self, x):
        with torch.cuda.amp.autocast(enabled=False):
            low = torch.fft.rfft(x, dim=0)[: self.modes1]
            mixed = torch.einsum("mni,iom->mno", low, torch.view_as_complex(self.weights1))
            return torch.fft.irfft(mixed, n=len(x), dim=0)


class TimeConv(nn.Module):
    def __init__(self, in_ch, out_ch, modes, act, with_nin=False):
        super().__init__()
        self.with_nin = with_nin
        self.t_conv = SpectralConv1d(in_ch, out_ch, modes)
        self.act = nn.LeakyReLU()

    def forward(self, x):
        return x + self.act(self.t_conv(x))


class SpectralConv1d_x(nn.Module):
    """Convolution over time of vectors [T, N, 3, C]. Mixes only channels, so it is equivariant."""

    def __init__(self, in_ch, out_ch, modes1):
        super().__init__()
        self.modes1 = modes1
        self.weights1 = nn.Parameter(0.1 * torch.rand(in_ch, out_ch, modes1, 2))

    def forward(self, x):
        with torch.cuda.amp.autocast(enabled=False):
            low = torch.fft.rfft(x, dim=0)[: self.modes1]
            mixed = torch.einsum("mndi,iom->mndo", low, torch.view_as_complex(self.weights1))
            return torch.fft.irfft(mixed, n=len(x), dim=0)


class TimeConv_x(nn.Module):
    def __init__(self, in_ch, out_ch, modes, act, with_nin=False):
        super().__init__()
        self.with_nin = with_nin
        self.t_conv = SpectralConv1d_x(in_ch, out_ch, modes)

    def forward(self, x):
        return x + self.t_conv(x)
