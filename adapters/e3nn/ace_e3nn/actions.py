"""The action of E(3) on a model built of e3nn modules.

A model can define its action in the attribute ``ace_action``. Otherwise its attribute ``irreps_out`` has the irreps of
its output, and the names of its inputs decide: ``pos`` and similar names are positions, ``x`` has the irreps of the
attribute ``irreps_in``, and any other ``name`` those of ``irreps_name``. A floating point input with unknown action is
an error, since training in random frames would be wrong if it stayed constant.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence
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
"""Names of entries of a graph that are targets of the loss; models do not read them."""
BATCH = "batch"
"""Name of the vector with the graph number of every node, as in PyTorch Geometric."""
CALLED = {
    **dict.fromkeys(("x", "node_input", "node_features", "node_feats", "features", "input"), INPUTS),
    "z": ("irreps_node_attr",),
}
"""Mapping from an input's name to attributes of the model that may have its irreps, besides ``irreps_<name>``."""
HOW = (
    "list the arguments of your forward pass, for example: from ace_plugins.adapter import E3, GroupAction, Irreps, "
    "Positions; model.ace_action = GroupAction(E3, {'pos': Positions(), 'data.x': Irreps('8x0e+4x1o')}, "
    "outputs=Irreps('1x1o'))"
)


def group_action(model: nn.Module) -> ace.GroupAction:
    """Return the model's ``ace_action``, or the action that follows from its irreps."""
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
            f"{where}: the group action on its output is unknown; expected an attribute {', '.join(OUTPUTS)}, found "
            f"none; {HOW}"
        )
    parameters = inspect.signature(model.forward).parameters.values()
    stars = [str(p) for p in parameters if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if stars or not parameters:
        raise ace.AdapterError(f"{where}.forward({', '.join(stars)}): expected a named parameter for each input; {HOW}")
    known = tuple(irreps.items())
    inputs = {parameter.name: ByName(parameter.name, known) for parameter in parameters}
    return NamedInputs(ace.E3, inputs, outputs=ace.Irreps(outputs))


@dataclass(frozen=True)
class NamedInputs(ace.GroupAction):
    """An action that finds the samples of a batch by the input ``batch``, or the entry ``batch`` of a dict or graph."""

    def find_samples(self, names: Sequence[str], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return the graph of every node and the inputs per node; without ``batch``, what a GroupAction returns."""
        paths = []
        for name, value in {**dict(zip(names, args, strict=False)), **kwargs}.items():
            keys = value.keys() if callable(getattr(value, "keys", None)) else None
            # Sorted, since the keys of a PyG graph have another order in every process, and the draw depends on it.
            paths += [name] if keys is None else [f"{name}.{key}" for key in sorted(keys)]
        ends = {path: path.rpartition(".")[2] for path in paths}
        batch = next((path for path, end in ends.items() if end == BATCH), None)
        if batch is None:
            return super().find_samples(names, args, kwargs)
        inputs = {path: ace.Invariant() for path, end in ends.items() if end not in TARGETS}
        return ace.GroupAction(self.group, inputs, self.outputs, ace.Graphs(batch)).find_samples(names, args, kwargs)


def _irreps(model: nn.Module, name: str) -> Any:
    """Return the model's attribute of this name as irreps, or None if it is not irreps."""
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
    """The action on the input ``name``. If it is a dict or graph, each entry transforms according to its own name."""

    name: str
    irreps: tuple[tuple[str, str], ...]
    """Pairs of an attribute of the model and the irreps that it has."""

    def __call__(self, element: Any, x: Any) -> Any:
        if x is None or isinstance(x, (bool, int, float, str)):
            return x
        if isinstance(x, Tensor):
            return self.act(element, x)
        if not callable(getattr(x, "keys", None)):
            raise ace.AdapterError(f"expected a tensor, a dict or a graph, found {type(x).__name__}; {HOW}")
        transformed = copy.copy(x)
        for key in x.keys():  # noqa: SIM118  iterating over a graph gives pairs
            transformed[key] = ByName(str(key), self.irreps)(element, x[key])
        return transformed

    def act(self, element: Any, x: Tensor) -> Tensor:
        if not x.is_floating_point():
            return x  # atom types, edges, graph indices
        return self._action()(element, x)

    def _action(self) -> ace.Action:
        irreps = dict(self.irreps)
        named = [irreps[name] for name in (f"irreps_{self.name}", *CALLED.get(self.name, ())) if name in irreps]
        if named:
            return ace.Irreps(named[0])
        if self.name in POSITIONS:
            return ace.Positions()
        if self.name in VECTORS:
            return ace.Vectors()
        if self.name in SCALARS | TARGETS:
            return ace.Invariant()
        raise ace.AdapterError(
            f"{self.name!r}: the group action on this input is unknown, since the model has no irreps_{self.name}; set "
            f"that attribute, or {HOW}; or train with frames = 'off'"
        )
