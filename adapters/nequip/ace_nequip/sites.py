"""Sites and branches of a NequIP model: the second linear map of every convolution.

A convolution computes ``linear_2(messages(linear_1(x)))``, with the messages summed over neighbours. Its branch reads
the summed messages. In the last convolution these are scalars only, and every function of scalars is invariant, so
there the branch reads the features that enter the layer. Branches never read positions, so the energy stays invariant
under translations. Forces are minus the gradient of the energy, which includes the branches.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

import ace_plugins
from ace_plugins import adapter as ace


def find_sites(model: Any) -> list[ace.Node]:
    """Return the sites of a model. A compiled model is an error."""
    if getattr(model, "is_compile_graph_model", False):
        raise ace_plugins.AceError(
            "compile_mode 'compile': NequIP would trace the branches into the model, and ACE could not remove them "
            "later; set compile_mode: eager in the config (for nequip-package build add --mode ace)"
        )
    found: list[ace.Node] = []
    for number, (path, convolution) in enumerate(_convolutions(model)):
        first, second = convolution.linear_1, convolution.linear_2
        into, out, reads = second.irreps_in, second.irreps_out, ace.Tap(0, f"{path}.linear_2")
        if _are_scalars(into):
            if _are_scalars(first.irreps_in):
                continue  # a function of scalars cannot break the symmetry
            into, reads = first.irreps_in, ace.Tap(0, f"{path}.linear_1")
        acts = ace.Irreps(into), ace.Irreps(out)
        shapes = (int(into.dim),), (int(out.dim),)
        found.append(ace.Site(f"layer{number}", f"{path}.linear_2", *shapes, reads=reads, acts=acts))
    return found


def make_branch(site: ace.Node) -> nn.Module:
    """Return Linear(d_in, d) SiLU Linear(d, d) without biases, with d the width of the output.

    SiLU is smooth, as energies must be. Without biases the output is zero for zero input, so an atom without
    neighbours keeps the energy that NequIP gives it. The branch is shallow, because a training step on forces passes
    through it four times (forward, forces, and the gradients of both).
    """
    d = site.width_out
    return nn.Sequential(nn.Linear(site.width_in, d, bias=False), nn.SiLU(), nn.Linear(d, d, bias=False))


def _convolutions(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield the convolutions in the order of the forward pass."""
    for path, module in model.named_modules():
        if type(module).__name__ == "InteractionBlock":
            yield path, module


def _are_scalars(irreps: Any) -> bool:
    return all(irrep.l == 0 and irrep.p == 1 for _, irrep in irreps)
