"""Where ACE goes into a TorchMD-NET model: wherever a layer reads vectors or tensors, never positions.

Equivariant Transformer: an attention layer, and a gated block of the output network, takes scalars x [n, F] and vectors
[n, 3, F] and gives both. Its two branches, one for each of them, read the vectors: of the scalars every function is
invariant. The first attention layer has no sites, since the vectors it is given are zero; of the output network, the
first block has. TensorNet: a layer takes and gives tensors [n, 3, 3, F], which its branch reads and is added to.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from ace_plugins import adapter as ace

from .actions import TensorFeatures

SCALARS, VECTORS = ace.Invariant(), ace.Vectors(axis=-2)
INVARIANT = ("TorchMD_GN", "TorchMD_T")


def sites(model: Any) -> list[ace.Node]:
    kind = type(model.representation_model).__name__
    if kind == "TorchMD_ET":
        return list(_of_vectors(model))
    if kind in ("TensorNet", "TensorNet2"):
        return list(_of_tensors(model))
    works = "ACE goes into model: equivariant-transformer, tensornet and tensornet2"
    if kind in INVARIANT:
        raise ace.AdapterError(
            f"{kind} has no features but scalars, which stay invariant whatever branches make of them; {works}"
        )
    raise ace.AdapterError(f"representation_model: {kind} is not known to this adapter; {works}")


def _of_vectors(model: Any) -> Iterator[ace.Node]:
    width = model.representation_model.hidden_channels
    network = getattr(model.output_model, "output_network", None)
    # None where it reads scalars alone.
    blocks: list[Any] = list(network) if isinstance(network, nn.ModuleList) else []
    last = len(model.representation_model.attention_layers) - 1
    for number in range(1, last + 1):
        pair = _pair(f"layer{number}", f"representation_model.attention_layers.{number}", width, width)
        yield from pair if blocks or number < last else pair[:1]
    if blocks:
        yield from _pair("output", "output_model.output_network.0", width, blocks[0].out_channels)


def _pair(name: str, path: str, width: int, out: int) -> tuple[ace.Node, ace.Node]:
    reads = ace.Tap(1)
    return (
        ace.Site(f"{name}.x", path, (3, width), (out,), reads=reads, output=0, acts=(VECTORS, SCALARS)),
        ace.Site(f"{name}.vec", path, (3, width), (3, out), reads=reads, output=1, acts=(VECTORS, VECTORS)),
    )


def _of_tensors(model: Any) -> Iterator[ace.Node]:
    shape = (3, 3, model.representation_model.hidden_channels)
    acts = TensorFeatures(), TensorFeatures()
    for number in range(len(model.representation_model.layers)):
        yield ace.Site(f"layer{number}", f"representation_model.layers.{number}", shape, shape, acts=acts)


def branch(site: ace.Node) -> nn.Module:
    """Linear(d_in, F) SiLU Linear(F, d_out) on the whole feature vector, F the channels that it reads.

    SiLU is smooth, as energies must be. Without biases it makes nothing of nothing: of an atom that has no neighbours,
    and so no vectors, the energy stays what it is.
    """
    channels = site.shape_in[-1]
    inner = nn.Linear(site.width_in, channels, bias=False), nn.SiLU(), nn.Linear(channels, site.width_out, bias=False)
    parts = [nn.Flatten(-len(site.shape_in)), *inner]
    if len(site.shape_out) > 1:
        parts.append(nn.Unflatten(-1, site.shape_out))
    return nn.Sequential(*parts)
