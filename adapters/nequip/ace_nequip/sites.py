"""Where ACE goes into a NequIP model: the second linear map of every convolution.

A convolution computes ``linear_2(messages(linear_1(x)))``, with the messages summed over neighbours. Its branch reads
the summed messages. In the last convolution these are scalars alone, of which every function is invariant, so there it
reads the features that enter the layer. Branches never see positions: translations change nothing, and what is
differentiated for the forces is one energy, branches included.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ace_plugins
from ace_plugins import adapter as ace


def sites(model: Any) -> list[ace.Node]:
    if getattr(model, "is_compile_graph_model", False):
        raise ace_plugins.AceError(
            "model with compile_mode 'compile': it is traced once, branches and all, and would neither land nor be "
            "evaluated without them; set compile_mode: eager in the config (for nequip-package build add --mode ace)"
        )
    found: list[ace.Node] = []
    for number, (path, convolution) in enumerate(_convolutions(model)):
        into, first, out = (
            convolution.linear_2.irreps_in,
            convolution.linear_1.irreps_in,
            convolution.linear_2.irreps_out,
        )
        reads = ace.Tap(0, f"{path}.linear_2")
        if _scalars(into):
            if _scalars(first):
                continue  # nothing here that a branch could break the symmetry with
            into, reads = first, ace.Tap(0, f"{path}.linear_1")
        acts = ace.Irreps(into), ace.Irreps(out)
        shapes = (int(into.dim),), (int(out.dim),)
        found.append(ace.Site(f"layer{number}", f"{path}.linear_2", *shapes, reads=reads, acts=acts))
    return found


def _convolutions(model: Any) -> Iterator[tuple[str, Any]]:
    """In the order of the forward, wherever the layers are nested."""
    for path, module in model.named_modules():
        if type(module).__name__ == "InteractionBlock":
            yield path, module


def _scalars(irreps: Any) -> bool:
    return all(irrep.l == 0 and irrep.p == 1 for _, irrep in irreps)
