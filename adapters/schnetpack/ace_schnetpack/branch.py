"""The branch of a site: two linear maps with a smooth nonlinearity between them, and no biases.

Of nothing it makes nothing, so an atom without neighbours keeps the energy that SchNetPack gives it, branches or not.
It is narrow: a step on forces goes through it four times (forward, forces, and the gradient of both), and it reads and
writes vectors, three times as wide as scalars.
"""

from __future__ import annotations

from torch import nn

from ace_plugins.adapter import Node


def branch(site: Node) -> nn.Module:
    """Linear(d_in, F/2) SiLU Linear(F/2, d_out), for features [components, F] that are read and written as a whole."""
    width = max(1, site.shape_out[-1] // 2)
    first = nn.Linear(site.width_in, width, bias=False)
    second = nn.Linear(width, site.width_out, bias=False)
    apart = -len(site.shape_in)
    return nn.Sequential(nn.Flatten(apart), first, nn.SiLU(), second, nn.Unflatten(-1, site.shape_out))
