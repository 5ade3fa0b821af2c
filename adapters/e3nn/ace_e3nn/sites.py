"""Which modules of a model are sites: those of e3nn's own where a layer ends.

Their signatures and irreps are known, whatever the classes around them look like. By kind:

- A gate (`Gate`, `NormActivation`, `S2Activation`) ends a layer: every gate is a site.
- A map (`Linear`, or a tensor product with weights of its own) is a site where nothing ends its layer for it. It is
  none if a gate takes up what it gives, or a product after it does (the map that enters a convolution).
- A product is a tensor product that has no weights or is given them. Of the maps after it that take up what it gives,
  the widest ends the convolution and is a site. If there is a self-connection, a map that gives the same without a
  product, that is the site instead: it reads what the layer reads. A product with weights that nothing takes up is a
  site itself.

One module "takes up" what another gives if the irreps are the same; before and after are in the same parent module, by
the order of registration. Left out are modules that only have invariant numbers (0e) on both sides, which no branch
could make less symmetric, and maps that read the model's own input, where positions may be.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from ace_plugins import adapter as ace

GATE, MAP, PRODUCT = "gate", "map", "product"
INPUTS = ("irreps_in", "irreps_node_input", "irreps_input", "irreps_node_in")
"""What models call the irreps of their input features."""


@dataclass(frozen=True)
class Part:
    """One of e3nn's modules in a model."""

    path: str
    kind: str
    reads: int
    """Which argument of its forward has the features."""
    takes: Any
    """The irreps of that argument, simplified."""
    gives: Any
    """The irreps of its output, simplified."""
    weighted: bool = True

    @property
    def parent(self) -> str:
        return self.path.rpartition(".")[0]

    @property
    def invariant(self) -> bool:
        return all(str(irrep) == "0e" for _, irrep in (*self.takes, *self.gives))


def is_e3nn(module: nn.Module) -> bool:
    """Whether this is a building block of e3nn, with e3nn's own forward. Its ready-made models are not blocks."""
    home = next((base for base in type(module).__mro__ if "forward" in vars(base)), type(module))
    return home.__module__.startswith(("e3nn.o3.", "e3nn.nn._"))


def has_e3nn(model: nn.Module) -> bool:
    """Whether the model is built of e3nn modules."""
    return not is_e3nn(model) and any(map(is_e3nn, model.modules()))


def sites_of(model: nn.Module) -> list[ace.Site]:
    """The sites, in the order in which the modules were registered."""
    if not has_e3nn(model):
        what = "is one itself" if is_e3nn(model) else "has none"
        raise ace.AdapterError(
            f"{type(model).__name__}: expected a model with e3nn modules in it (o3.Linear, o3.TensorProduct, nn.Gate), "
            f"found that it {what}; adapter 'e3nn' is for models built of them"
        )
    found = [part for part in _parts(model) if part.takes.dim and part.gives.dim]
    return [_site(part) for part in chosen(found, _own_input(model))]


def chosen(parts: Sequence[Part], own_input: Any = None) -> list[Part]:
    """The parts that are sites. ``own_input``: the irreps of the model's input features, where it tells them."""
    gated = {part.takes for part in parts if part.kind == GATE}
    open_ended = [part for part in parts if part.kind == GATE or part.gives not in gated]
    for candidates in ([p for p in open_ended if p.kind == GATE or p.takes != own_input], open_ended):
        found = [p for p in candidates if not p.invariant and (p.kind == GATE or _ends_a_layer(p, candidates, parts))]
        if found:
            return found
    return []


def _ends_a_layer(part: Part, candidates: Sequence[Part], parts: Sequence[Part]) -> bool:
    """Whether a map or product does so, among those that may be sites."""
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
    """The parts of one parent module, in the order of registration, which settles what irreps leave open."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.maps = [part for part in parts if part.kind == MAP]
        self.entering: list[Part] = []
        """The map before each product that the product takes up."""
        self.after: list[Part] = []
        """The maps after products that take up what these give."""
        self.ends: list[Part] = []
        """Of these the widest, one for each product: a convolution may have a second, narrow map, as for a scale."""
        for place, product in enumerate(parts):
            if product.kind == PRODUCT:
                before = [part for part in parts[:place] if part.kind == MAP and part.gives == product.takes]
                behind = [part for part in parts[place:] if part.kind == MAP and part.takes == product.gives]
                self.entering += before[-1:]
                self.after += behind
                free = [part for part in behind if part not in self.ends]
                self.ends += [max(free, key=lambda part: part.gives.dim)] if free else []


def _parts(model: nn.Module, path: str = "", seen: set[int] | None = None) -> Iterator[Part]:
    """e3nn's outermost modules, each once, however many places share it."""
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
        mixes_channels = module.weight.dim() > 1  # f_in and f_out: features are not the last dimension alone
        return None if mixes_channels else Part(path, MAP, 0, *_simple(module.irreps_in, module.irreps_out))
    if not isinstance(module, o3.TensorProduct):
        return None
    weighted = module.weight_numel > 0
    kind = MAP if weighted and module.internal_weights else PRODUCT
    if isinstance(module, o3.TensorSquare):
        return Part(path, kind, 0, *_simple(module.irreps_in, module.irreps_out), weighted)
    # The features are the wider of the two: the other are attributes.
    reads = int(module.irreps_in2.dim > module.irreps_in1.dim)
    features = (module.irreps_in1, module.irreps_in2)[reads]
    return Part(path, kind, reads, *_simple(features, module.irreps_out), weighted)


def _simple(takes: Any, gives: Any) -> tuple[Any, Any]:
    return takes.simplify(), gives.simplify()


def _own_input(model: nn.Module) -> Any:
    from e3nn.o3 import Irreps

    told = next((value for name in INPUTS if (value := getattr(model, name, None)) is not None), None)
    return None if told is None else Irreps(told).simplify()


def _site(part: Part) -> ace.Site:
    acts = ace.Irreps(part.takes), ace.Irreps(part.gives)
    return ace.Site(part.path, part.path, (part.takes.dim,), (part.gives.dim,), reads=ace.Tap(part.reads), acts=acts)
