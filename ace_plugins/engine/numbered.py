"""Weights that a checkpoint keeps by number: ``ema.ema_weight_0``, ``ema.ema_weight_1`` and so on, or as a list.

Averages of weights are often kept so, in the order of ``model.parameters()``, and what ACE added is among them without
a name. It is found by its shapes: ACE's parameters stand together there, and what stands before and after them must be
weights that stand before and after them in the state_dict too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from ..errors import CheckpointError

Shape = tuple[int, ...]
_NUMBERED = re.compile(r"(.*\D)(\d+)")
_BUFFERS = ("direction", "running_mean", "running_var", "num_batches_tracked", "_u", "_v")
"""What branches hold beside parameters: directions of spectral normalisation, statistics of batch normalisation."""


def renumbered(state: Mapping[Any, Any], prefixes: Sequence[str]) -> dict[str, str | None]:
    """For a state_dict with ACE under these prefixes ("model.ace."): the names of numbered weights that change, each
    with its new name, or None where it is ACE's."""
    found: dict[str, str | None] = {}
    for family in _families(state):
        shapes = [_shape(state[name]) for name in family]
        others = {name: value for name, value in state.items() if name not in family}
        gone = _places_of_ace(others, prefixes, shapes, f"{family[0]} to {family[-1]}")
        stem = family[0].removesuffix("0")
        kept = [name for place, name in enumerate(family) if place not in gone]
        found.update({name: None for place, name in enumerate(family) if place in gone})
        found.update({name: f"{stem}{number}" for number, name in enumerate(kept) if name != f"{stem}{number}"})
    return found


def places(weights: Sequence[Any], states: Iterable[tuple[Mapping[Any, Any], Sequence[str]]]) -> set[int]:
    """Where ACE's parameters are in a list, if that is one of weights of these state_dicts, each with its prefixes."""
    if not weights or not all(isinstance(weight, Tensor) for weight in weights):
        return set()
    found = (
        _places_of_ace(*state, list(map(_shape, weights)), f"a list of {len(weights)} weights") for state in states
    )
    return next(filter(None, found), set())


def _families(state: Mapping[Any, Any]) -> list[list[str]]:
    """Names that differ in their last number alone, from 0 on without a gap."""
    numbers: dict[str, set[int]] = {}
    for name, value in state.items():
        match = _NUMBERED.fullmatch(name) if isinstance(name, str) and isinstance(value, Tensor) else None
        if match:
            numbers.setdefault(match[1], set()).add(int(match[2]))
    return [
        [f"{stem}{number}" for number in range(len(known))]
        for stem, known in numbers.items()
        if known == set(range(len(known)))
    ]


def _places_of_ace(state: Mapping[Any, Any], prefixes: Sequence[str], shapes: Sequence[Shape], what: str) -> set[int]:
    """Of weights with these shapes; empty if they hold no copies of ACE's parameters. ``what`` is for errors."""
    others = {
        name: _shape(value) for name, value in state.items() if isinstance(name, str) and isinstance(value, Tensor)
    }
    gone: set[int] = set()
    begin = 0
    before: list[Shape] = []
    left = list(prefixes)
    for name, shape in others.items():
        if not left or not name.startswith(left[0]):
            if not name.startswith(tuple(prefixes)):
                before.append(shape)
            continue
        mine = _parameters(others, left.pop(0))
        fitting = [
            place
            for place in range(begin, len(shapes) - len(mine) + 1)
            if list(shapes[place : place + len(mine)]) == mine and _among(shapes[begin:place], before)
        ]
        if not fitting and not gone:
            return set()
        if len(fitting) != 1:
            raise CheckpointError(
                f"{what}: {len(fitting)} places fit the shapes of ACE's parameters, expected one; "
                "which of these weights are ACE's cannot be told, and nothing was exported"
            )
        gone.update(range(fitting[0], begin := fitting[0] + len(mine)))
        before = []
    if gone and not _among(shapes[begin:], before):
        raise CheckpointError(
            f"{what}: what follows ACE's parameters are no weights of this state_dict; which of "
            "these weights are ACE's cannot be told, and nothing was exported"
        )
    return gone


def _parameters(others: Mapping[str, Shape], prefix: str) -> list[Shape]:
    """The shapes of one ACE's parameters, in the order of ``parameters()``."""
    inside = {name.removeprefix(prefix): shape for name, shape in others.items() if name.startswith(prefix)}
    return [
        shape
        for name, shape in inside.items()
        if name == "gamma" or (name.startswith("branches.") and name.rpartition(".")[2] not in _BUFFERS)
    ]


def _among(shapes: Iterable[Shape], all_of: Iterable[Shape]) -> bool:
    """Whether the shapes come in this order among the others, which may have more."""
    rest = iter(all_of)
    return all(any(shape == other for other in rest) for shape in shapes)


def _shape(value: Any) -> Shape:
    return tuple(value.shape)
