"""Sites and branches of TorchMD-NET models: the layers that read vectors or tensors. Branches never read positions.

Equivariant Transformer: an attention layer, like a gated block of the output network, maps scalars x [n, F] and vectors
[n, 3, F] to new scalars and vectors. Each of the two outputs has a branch, which reads the vectors, since every
function of the scalars is invariant. The first attention layer has no sites, because the vectors that enter it are
zero. The first block of the output network has sites. TensorNet: a layer maps tensors [n, 3, 3, F] to new tensors, and
its branch reads the tensors that enter the layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from ace_plugins import adapter as ace

from .actions import TensorFeatures

SCALARS, VECTORS = ace.Invariant(), ace.Vectors(axis=-2)
INVARIANT = ("TorchMD_GN", "TorchMD_T")


def find_sites(model: Any) -> list[ace.Node]:
    """Return the sites of a model, or raise an AdapterError if it has none."""
    kind = type(model.representation_model).__name__
    if kind == "TorchMD_ET":
        return list(_vector_sites(model))
    if kind in ("TensorNet", "TensorNet2"):
        return list(_tensor_sites(model))
    expected = "expected the model equivariant-transformer, tensornet or tensornet2"
    if kind in INVARIANT:
        raise ace.AdapterError(f"{kind} only has scalar features, and every function of them is invariant; {expected}")
    raise ace.AdapterError(f"representation_model: {kind} is unknown to this adapter; {expected}")


def _vector_sites(model: Any) -> Iterator[ace.Node]:
    width = model.representation_model.hidden_channels
    network = getattr(model.output_model, "output_network", None)
    # Output networks without blocks read scalars only.
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


def _tensor_sites(model: Any) -> Iterator[ace.Node]:
    shape = (3, 3, model.representation_model.hidden_channels)
    acts = TensorFeatures(), TensorFeatures()
    for number in range(len(model.representation_model.layers)):
        yield ace.Site(f"layer{number}", f"representation_model.layers.{number}", shape, shape, acts=acts)


def make_branch(site: ace.Node) -> nn.Module:
    """Return Linear(d_in, F) SiLU Linear(F, d_out) without biases, with F the number of input channels.

    SiLU is smooth, as energies must be. Without biases the output is zero for zero input, so an atom without
    neighbours keeps its energy.
    """
    channels = site.shape_in[-1]
    inner = nn.Linear(site.width_in, channels, bias=False), nn.SiLU(), nn.Linear(channels, site.width_out, bias=False)
    parts = [nn.Flatten(-len(site.shape_in)), *inner]
    if len(site.shape_out) > 1:
        parts.append(nn.Unflatten(-1, site.shape_out))
    return nn.Sequential(*parts)
