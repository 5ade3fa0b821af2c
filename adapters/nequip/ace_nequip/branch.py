"""The branch of a NequIP site: two linear maps with NequIP's own nonlinearity between them, and no biases.

Of nothing it makes nothing, so an atom without neighbours keeps the energy that NequIP gives it, branches or not.
A step on forces goes through it four times (forward, forces, and the gradient of both): that is why it is not deeper.
"""

from __future__ import annotations

from torch import nn

from ace_plugins.adapter import Node


def branch(site: Node) -> nn.Module:
    """Linear(d_in, d) SiLU Linear(d, d), d the width of the output. SiLU is smooth, as energies must be."""
    d = site.width_out
    return nn.Sequential(nn.Linear(site.width_in, d, bias=False), nn.SiLU(), nn.Linear(d, d, bias=False))
