"""Chooses the sites of a model: e3nn modules that end a layer.

The signatures and irreps of e3nn's modules are known, in whatever model they are used. There are three kinds:

- A gate (`Gate`, `NormActivation`, `S2Activation`) ends a layer, so every gate is a site.
- A map (`Linear`, or a tensor product with internal weights) is a site if no other module ends its layer. It is not a
  site if its output is read by a gate, or by a product after it (then the map is the start of a convolution).
- A product is a tensor product without weights or with external ones. Of the maps after it that read its output, the
  widest ends the convolution and is a site. If there is a self-connection, a map with the same output but without a
  product, that map is the site instead, since it reads the input of the layer. A product with weights is a site if no
  module reads its output.

One module reads the output of another if the irreps are equal. "Before" and "after" refer to the order of registration
in the same parent module. Modules with only invariant scalars (0e) on both sides are left out, since a branch there
cannot break the symmetry, and so are maps that read the model's input, which may contain positions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from ace_plugins import adapter as ace

GATE, MAP, PRODUCT = "gate", "map", "product"
INPUTS = ("irreps_in", "irreps_node_input", "irreps_input", "irreps_node_in")
"""Attributes of models that may have the irreps of the input features; the first one found counts."""


@dataclass(frozen=True)
class Part:
    """An e3nn module of a model."""

    path: str
    kind: str
    reads: int
    """Index of the forward argument with the features."""
    takes: Any
    """Simplified irreps of that argument."""
    gives: Any
    """Simplified irreps of the output."""
    weighted: bool = True

    @property
    def parent(self) -> str:
        return self.path.rpartition(".")[0]

    @property
    def invariant(self) -> bool:
        return all(str(irrep) == "0e" for _, irrep in (*self.takes, *self.gives))


def is_e3nn(module: nn.Module) -> bool:
    """Return whether a module has the forward of a building block of e3nn. e3nn's ready-made models do not count."""
    home = next((base for base in type(module).__mro__ if "forward" in vars(base)), type(module))
    return home.__module__.startswith(("e3nn.o3.", "e3nn.nn._"))


def has_e3nn(model: nn.Module) -> bool:
    """Return whether a model is built of e3nn modules."""
    return not is_e3nn(model) and any(map(is_e3nn, model.modules()))


def find_sites(model: nn.Module) -> list[ace.Site]:
    """Return the sites in the order in which the modules were registered."""
    if not has_e3nn(model):
        found = "an e3nn module itself" if is_e3nn(model) else "none"
        raise ace.AdapterError(
            f"{type(model).__name__}: expected a model that contains e3nn modules (o3.Linear, o3.TensorProduct, "
            f"nn.Gate), found {found}"
        )
    parts = [part for part in _parts(model) if part.takes.dim and part.gives.dim]
    return [_site(part) for part in choose(parts, _own_input(model))]


def choose(parts: Sequence[Part], own_input: Any = None) -> list[Part]:
    """Return the parts that are sites. ``own_input`` has the irreps of the model's input features, if known."""
    gated = {part.takes for part in parts if part.kind == GATE}
    open_ended = [part for part in parts if part.kind == GATE or part.gives not in gated]
    for candidates in ([p for p in open_ended if p.kind == GATE or p.takes != own_input], open_ended):
        found = [p for p in candidates if not p.invariant and (p.kind == GATE or _ends_a_layer(p, candidates, parts))]
        if found:
            return found
    return []


def _ends_a_layer(part: Part, candidates: Sequence[Part], parts: Sequence[Part]) -> bool:
    """Return whether a map or product ends a layer, given the parts that may be sites."""
    if part.kind == PRODUCT:
        return part.weighted and not any(other.takes == part.gives for other in parts if other is not part)
    block = _Block([other for other in parts if other.parent == part.parent])
    if part in block.entering:
        return False
    if part not in block.after:
        return True
    beside = (other for other in candidates if other in block.maps and other not in (*block.after, *block.entering))
    return part in block.ends and all(other.gives != part.gives for other in beside)


class _Block:
    """The parts of one parent module, in the order of registration."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.maps = [part for part in parts if part.kind == MAP]
        self.entering: list[Part] = []
        """For each product, the map before it whose output it reads."""
        self.after: list[Part] = []
        """The maps that come after a product and read its output."""
        self.ends: list[Part] = []
        """For each product, the widest map in ``after``. A convolution may also have a narrow one, for a scale."""
        for place, product in enumerate(parts):
            if product.kind == PRODUCT:
                before = [part for part in parts[:place] if part.kind == MAP and part.gives == product.takes]
                behind = [part for part in parts[place:] if part.kind == MAP and part.takes == product.gives]
                self.entering += before[-1:]
                self.after += behind
                free = [part for part in behind if part not in self.ends]
                self.ends += [max(free, key=lambda part: part.gives.dim)] if free else []


def _parts(model: nn.Module, path: str = "", seen: set[int] | None = None) -> Iterator[Part]:
    """Yield the outermost e3nn modules, each once even if it is shared."""
    seen = set() if seen is None else seen
    for name, module in model.named_children():
        if id(module) in seen:
            continue
        seen.add(id(module))
        where = f"{path}.{name}" if path else name
        if not is_e3nn(module):
            yield from _parts(module, where, seen)
        elif (part := _part(where, module)) is not None:
            yield part


def _part(path: str, module: Any) -> Part | None:
    from e3nn import nn as e3nn_nn
    from e3nn import o3

    if isinstance(module, (e3nn_nn.Gate, e3nn_nn.NormActivation, e3nn_nn.S2Activation)):
        return Part(path, GATE, 0, *_simple(module.irreps_in, module.irreps_out))
    if isinstance(module, o3.Linear):
        mixes_channels = module.weight.dim() > 1  # Linear with f_in and f_out: its features have two dimensions
        return None if mixes_channels else Part(path, MAP, 0, *_simple(module.irreps_in, module.irreps_out))
    if not isinstance(module, o3.TensorProduct):
        return None
    weighted = module.weight_numel > 0
    kind = MAP if weighted and module.internal_weights else PRODUCT
    if isinstance(module, o3.TensorSquare):
        return Part(path, kind, 0, *_simple(module.irreps_in, module.irreps_out), weighted)
    # The wider input is taken as the features, the other one as attributes.
    reads = int(module.irreps_in2.dim > module.irreps_in1.dim)
    features = (module.irreps_in1, module.irreps_in2)[reads]
    return Part(path, kind, reads, *_simple(features, module.irreps_out), weighted)


def _simple(takes: Any, gives: Any) -> tuple[Any, Any]:
    return takes.simplify(), gives.simplify()


def _own_input(model: nn.Module) -> Any:
    from e3nn.o3 import Irreps

    irreps = next((value for name in INPUTS if (value := getattr(model, name, None)) is not None), None)
    return None if irreps is None else Irreps(irreps).simplify()


def _site(part: Part) -> ace.Site:
    acts = ace.Irreps(part.takes), ace.Irreps(part.gives)
    shapes = (part.takes.dim,), (part.gives.dim,)
    return ace.Site(part.path, part.path, *shapes, reads=ace.Tap(part.reads), acts=acts)
