"""How E(3) acts on a model built of e3nn modules: by what the model is told, else by the irreps it tells itself.

A model may carry its action as the attribute ``ace_action``. Without one its output turns by its ``irreps_out``, and
its inputs by their names: ``pos`` and its like are positions, ``x`` has the model's ``irreps_in``, any other ``name``
its ``irreps_name``. Numbers that are not told are refused rather than left as they are: a model that is trained in
random frames would learn something else.
"""

from __future__ import annotations

import copy
import inspect
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ace_plugins import adapter as ace

from .sites import INPUTS

GIVEN = "ace_action"
OUTPUTS = ("irreps_out", "irreps_node_output", "irreps_output", "irreps_node_out")
POSITIONS = frozenset({"pos", "positions", "node_pos", "coords", "coordinates"})
VECTORS = frozenset({"vel", "velocity", "velocities", "vectors", "edge_vec", "edge_vector", "edge_vectors"})
SCALARS = frozenset(
    {"edge_weight", "edge_length", "edge_lengths", "edge_scalars", "edge_length_embedding", "edge_length_embedded"}
)
TARGETS = frozenset({"y", "energy", "force", "forces", "target", "targets"})
"""What graphs carry along for the loss. Models do not read it."""
CALLED = {
    **dict.fromkeys(("x", "node_input", "node_features", "node_feats", "features", "input"), INPUTS),
    "z": ("irreps_node_attr",),
}
"""Input -> the model's attributes that may tell its irreps, besides ``irreps_`` and its name."""
HOW = (
    "say it as model.ace_action = ace_plugins.GroupAction(ace_plugins.E3, {'pos': ace_plugins.Positions(), "
    "'data.x': ace_plugins.Irreps('8x0e+4x1o')}, outputs=ace_plugins.Irreps('1x1o')), with the names of your forward"
)


def action_of(model: nn.Module) -> ace.GroupAction:
    """The action that the model was given, or the one that follows from its irreps."""
    given = getattr(model, GIVEN, None)
    if isinstance(given, ace.GroupAction):
        return given
    where = type(model).__name__
    if given is not None:
        raise ace.AdapterError(f"{where}.{GIVEN}: expected a GroupAction, found {type(given).__name__}; {HOW}")
    irreps = {name: str(value) for name in dir(model) if (value := _irreps(model, name)) is not None}
    outputs = next((irreps[name] for name in OUTPUTS if name in irreps), None)
    if outputs is None:
        raise ace.AdapterError(
            f"{where} does not tell the irreps of its output (it has none of {', '.join(OUTPUTS)}), so how the group "
            f"acts on it is not known; {HOW}"
        )
    parameters = inspect.signature(model.forward).parameters.values()
    stars = [str(p) for p in parameters if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if stars or not parameters:
        raise ace.AdapterError(f"{where}.forward({', '.join(stars)}) does not name its inputs; {HOW}")
    told = tuple(irreps.items())
    inputs = {parameter.name: ByName(parameter.name, told) for parameter in parameters}
    return ace.GroupAction(ace.E3, inputs, outputs=ace.Irreps(outputs))


def _irreps(model: nn.Module, name: str) -> Any:
    """What the model tells under this name, if that is irreps."""
    from e3nn.o3 import Irreps

    if not name.startswith("irreps_"):
        return None
    value = getattr(model, name, None)
    if isinstance(value, Irreps):
        return value
    try:
        return Irreps(value) if isinstance(value, str) else None
    except ValueError:
        return None


@dataclass(frozen=True)
class ByName(ace.Action):
    """How the group acts on an input of this name; on a dict or a graph, by the names of what is in it."""

    name: str
    irreps: tuple[tuple[str, str], ...]
    """The irreps that the model tells, by attribute."""

    def __call__(self, element: Any, x: Any) -> Any:
        if x is None or isinstance(x, (bool, int, float, str)):
            return x
        if isinstance(x, Tensor):
            return self.act(element, x)
        if not callable(getattr(x, "keys", None)):
            raise ace.AdapterError(f"expected a tensor, a dict or a graph, found {type(x).__name__}; {HOW}")
        turned = copy.copy(x)
        for key in x.keys():  # noqa: SIM118  iterating over a graph gives pairs
            turned[key] = ByName(str(key), self.irreps)(element, x[key])
        return turned

    def act(self, element: Any, x: Tensor) -> Tensor:
        if not x.is_floating_point():
            return x  # types, edges, the graph of every node
        return self._action()(element, x)

    def _action(self) -> ace.Action:
        told = dict(self.irreps)
        named = [told[name] for name in (f"irreps_{self.name}", *CALLED.get(self.name, ())) if name in told]
        if named:
            return ace.Irreps(named[0])
        if self.name in POSITIONS:
            return ace.Positions()
        if self.name in VECTORS:
            return ace.Vectors()
        if self.name in SCALARS | TARGETS:
            return ace.Invariant()
        raise ace.AdapterError(
            f"{self.name!r}: its name does not tell how the group acts on it, and the model has no irreps_{self.name}; "
            f"set that, or {HOW}; or train with frames = 'off'"
        )
