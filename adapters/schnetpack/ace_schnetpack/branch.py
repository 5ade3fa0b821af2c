"""The branch of a site: two linear maps with a smooth nonlinearity between them, and no biases.

Of nothing it makes nothing, so an atom without neighbours keeps the energy that SchNetPack gives it, branches or not.
It narrows to the width of a scalar feature: a step on forces goes through it four times (forward, forces, and the
gradient of both), and vectors are three times as wide.
"""

from __future__ import annotations

from torch import nn

from ace_plugins import Node


def branch(site: Node) -> nn.Module:
    """Linear(components x F, F) SiLU Linear(F, components x F), for features of F channels."""
    channels = site.shape_out[-1]
    first = nn.Linear(site.width_in, channels, bias=False)
    second = nn.Linear(channels, site.width_out, bias=False)
    apart = -len(site.shape_in)
    return nn.Sequential(nn.Flatten(apart), first, nn.SiLU(), second, nn.Unflatten(-1, site.shape_out))
