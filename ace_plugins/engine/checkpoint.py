"""Weights that a checkpoint keeps by number: ``ema.ema_weight_0``, ``ema.ema_weight_1`` and so on, or as a list.

Averages of weights are often kept so, in the order of ``model.parameters()``, and what ACE added is among them without
a name. It is found by its shapes: ACE's parameters stand together there, and what stands before and after them must be
weights that stand before and after them in the state_dict too.

Checkpoints with and without ACE: what an attached model accepts, and what plain upstream gets.
"""

from __future__ import annotations

import copy
import json
import math
import os
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import AceWarning, CheckpointError
from ..output import publish
from .forward import uninstall
from .state import NAME, Ace, find

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


MANIFEST = f"{NAME}.manifest"
SAFETENSORS = ".safetensors"


class CheckpointHook:
    """load_state_dict pre-hook of an attached model: refuse what is not its own, before anything is copied.

    A plain upstream checkpoint is welcome: ACE's part keeps what it has.
    """

    def __call__(self, model: nn.Module, state: MutableMapping[str, Any], prefix: str, *rest: Any) -> None:
        ace = find(model)
        if ace is None:
            return
        own = model.state_dict(prefix=prefix, keep_vars=True)
        mine = prefix + NAME + "."
        # Judged by what the checkpoint holds: a part of one is welcome, and whether it was to be strict torch
        # does not tell here.
        theirs = [name for name in state if name.startswith(prefix) and not name.startswith(mine)]
        fitting = [name for name in theirs if name in own and _same_shape(state[name], own[name])]
        if len(fitting) * 2 < len(theirs):
            weights = [name for name in own if not name.startswith(mine)]
            raise CheckpointError(
                f"checkpoint of another architecture: {len(fitting)} of its {len(theirs)} weights fit "
                f"{type(model).__name__} by name and shape; it holds {_some(theirs)}, expected {_some(weights)}; "
                f"nothing was loaded into {type(model).__name__}"
            )
        if any(name.startswith(mine) for name in state):
            _check_ace(ace, own, state, mine)
            return
        state.update({name: value.detach() for name, value in own.items() if name.startswith(mine)})
        deployed = "; with them model.eval() is not the checkpoint's function" if ace.in_eval else ""
        warnings.warn(
            f"checkpoint without ACE loaded into {type(model).__name__}: gamma, the duals and the branches of "
            f"its {len(ace.sites)} sites keep the values they have{deployed}",
            AceWarning,
            stacklevel=2,
        )


def _check_ace(ace: Ace, own: Mapping[str, Any], state: Mapping[str, Any], mine: str) -> None:
    if mine + "manifest" not in state:
        return  # a part of one, on purpose
    about = read_manifest(state.get(mine + "manifest"))
    sites = [site.name for site in ace.sites]
    if about is None or about["adapter"] != ace.adapter or about["sites"] != sites:
        found = "an unreadable manifest" if about is None else f"{about['adapter']}: {', '.join(about['sites'])}"
        raise CheckpointError(
            f"checkpoint holds ACE of other sites ({found}), expected {ace.adapter}: {', '.join(sites)}; "
            "nothing of it was loaded"
        )
    wrong = [n for n, v in own.items() if n.startswith(mine) and not _same_shape(state.get(n), v)]
    extra = [n for n in state if n.startswith(mine) and n not in own]
    if wrong or extra:
        raise CheckpointError(
            f"checkpoint holds ACE with other branches: missing or of another shape {_some(wrong)}, not expected "
            f"{_some(extra)}; attach with the settings it was trained with; nothing of it was loaded"
        )


def read_manifest(stored: object) -> dict[str, Any] | None:
    """What a checkpoint says of the ACE in it; None if that cannot be read."""
    if not isinstance(stored, Tensor):
        return None
    try:
        about = json.loads(bytes(stored.round().to(torch.uint8).tolist()))
        return about if {"adapter", "sites"} <= about.keys() else None
    except (ValueError, AttributeError, TypeError):
        return None


def export(
    source: Mapping[str, Any] | str | os.PathLike[str],
    to: str | os.PathLike[str] | None = None,
    *,
    trust: bool = False,
) -> Any:
    """A checkpoint without ACE, which plain upstream loads with ``strict=True``.

    ``source`` is a state_dict, or dicts and lists with state_dicts somewhere inside (a checkpoint of Lightning, say),
    or the path of either as ``torch.save`` wrote it. Returns the same structure without ACE's entries, and writes it
    to ``to`` if given. Averages of the weights that are kept by number beside them lose ACE's as well. ``trust`` reads
    files of pickled models, too, whose code runs when they are read.
    """
    return exported(source, to, trust=trust).content


@dataclass
class Exported:
    """What an export came to; ``kept`` and ``removed`` count tensors."""

    content: Any = None
    kept: int = 0
    removed: int = 0
    gammas: list[Tensor] = field(default_factory=list)
    optimizers: int = 0
    """Optimizer states beside the weights, which still count ACE's parameters."""
    states: list[tuple[Mapping[Any, Any], tuple[str, ...]]] = field(default_factory=list)
    """The state_dicts with ACE in them, each with the prefixes of ACE's keys."""

    def clean(self, content: Any) -> Any:
        if isinstance(content, (list, tuple)) and type(content) in (list, tuple):
            gone = places(content, self.states)
            self.removed += len(gone)
            return type(content)(self.clean(item) for place, item in enumerate(content) if place not in gone)
        if isinstance(content, nn.Module):
            return self._projected(content)
        if not isinstance(content, Mapping):
            self.kept += isinstance(content, Tensor)
            return content
        if _is_of_an_optimizer(content):
            plain = _without_adopted(content)
            if plain is not None:
                return plain
            self.optimizers += 1
        prefixes = _prefixes(content)
        self.gammas.extend(content[p + "gamma"] for p in prefixes if isinstance(content.get(p + "gamma"), Tensor))
        numbered = renumbered(content, prefixes) if prefixes else {}
        cleaned: Any = copy.copy(content)  # of the same kind
        cleaned.clear()
        for name, value in content.items():
            if (isinstance(name, str) and name.startswith(prefixes or ("\0",))) or numbered.get(name, "") is None:
                self.removed += 1
            else:
                cleaned[numbered.get(name, name)] = self.clean(value)
        if prefixes and hasattr(cleaned, "_metadata"):  # torch's: a version for every submodule
            known = cleaned._metadata
            cleaned._metadata = type(known)((k, v) for k, v in known.items() if not f"{k}.".startswith(prefixes))
        return cleaned

    def _projected(self, whole: nn.Module) -> nn.Module:
        """A model that was pickled whole, plain again. It is nobody's but the export's."""
        before = len(whole.state_dict())
        # A module of Lightning keeps what it was built with, models among it, in a dict beside its submodules.
        kept = [vars(part).values() for part in whole.modules()]
        beside = [each for values in kept for value in values if isinstance(value, Mapping) for each in value.values()]
        for model in [part for each in (whole, *beside) if isinstance(each, nn.Module) for part in each.modules()]:
            ace = find(model)
            if ace is not None:
                self.gammas.append(ace.gamma)
                uninstall(ace, model)
        left = len(whole.state_dict())
        self.kept, self.removed = self.kept + left, self.removed + before - left
        return whole


def _is_of_an_optimizer(content: Mapping[Any, Any]) -> bool:
    """Whether this is what ``Optimizer.state_dict()`` gives. A model's own tensors may have the same names."""
    groups = content.get("param_groups")
    return (
        isinstance(content.get("state"), Mapping)
        and isinstance(groups, list)
        and all(isinstance(group, Mapping) and isinstance(group.get("params"), list) for group in groups)
    )


def _prefixes(content: Mapping[Any, Any]) -> tuple[str, ...]:
    """Of ACE's keys in a state_dict. A wrapped model's have one ("module.ace."); the manifest marks every ACE."""
    marks = [k for k in content if isinstance(k, str) and (k == MANIFEST or k.endswith("." + MANIFEST))]
    return tuple(mark[: -len("manifest")] for mark in marks)


def _states(content: Any) -> Iterator[tuple[Mapping[Any, Any], tuple[str, ...]]]:
    """The state_dicts with ACE in them, wherever they are."""
    if isinstance(content, Mapping):
        if prefixes := _prefixes(content):
            yield content, prefixes
        content = content.values()
    elif type(content) not in (list, tuple):
        return
    for each in content:
        yield from _states(each)


def _without_adopted(state: Mapping[str, Any]) -> dict[str, Any] | None:
    """An optimizer's state without the group that ACE's parameters were adopted in; None if they are elsewhere."""
    *groups, last = state["param_groups"] or [{}]
    if last.get("name") != NAME:
        return None
    values = {number: value for number, value in state["state"].items() if number not in last["params"]}
    return {**state, "param_groups": groups, "state": values}


def exported(
    source: Mapping[str, Any] | str | os.PathLike[str],
    to: str | os.PathLike[str] | None = None,
    *,
    trust: bool = False,
) -> Exported:
    """`export`, with the counts."""
    if isinstance(source, nn.Module):
        raise CheckpointError(f"cannot export {type(source).__name__} itself: expected its state_dict() or a path")
    if to is not None and isinstance(source, (str, os.PathLike)) and Path(to).resolve() == Path(source).resolve():
        raise CheckpointError(f"{str(to)!r} is the checkpoint itself: ACE's part would be lost; choose another name")
    where = "the state_dict"
    content: Any = source
    if isinstance(source, (str, os.PathLike)):
        where = str(source)
        content = read_checkpoint(Path(source), trust=trust)
    result = Exported()
    try:
        result.states.extend(_states(content))
        result.content = result.clean(content)
    except RecursionError:
        raise CheckpointError(f"{where} is nested too deeply, or holds itself: expected dicts and lists") from None
    if not result.removed:
        raise CheckpointError(
            f"{where} holds no ACE: expected keys such as {MANIFEST!r} and '{NAME}.gamma', "
            f"found {_some(content) if isinstance(content, Mapping) else type(content).__name__}"
        )
    if to is not None:
        _write(result.content, Path(to))
    largest = max(map(_largest, result.gammas), default=0.0)
    if not largest <= 1e-3:  # written so that nan is told too
        warnings.warn(
            f"exporting f_eq alone although max |gamma| is {largest:.3g}: the branches it leaves out still count",
            AceWarning,
            stacklevel=3,
        )
    if result.optimizers:
        warnings.warn(
            "the optimizer state beside the weights is left as it is and still counts ACE's parameters: plain upstream "
            "can load the weights but not resume from it",
            AceWarning,
            stacklevel=3,
        )
    return result


def read_checkpoint(path: Path, *, trust: bool = False) -> Any:
    """What ``torch.save`` wrote: tensors and containers alone, nothing that runs code, unless it is trusted."""
    if not path.is_file():
        raise CheckpointError(f"no checkpoint at {str(path)!r}: expected a file that torch.save wrote")
    if path.suffix == SAFETENSORS:
        library = _safetensors()
        try:
            return library.load_file(path)
        except Exception as error:
            raise CheckpointError(f"cannot read {path} as safetensors: {' '.join(str(error).split())}") from None
    try:
        with torch.serialization.safe_globals(numpy_numbers()):
            return torch.load(path, map_location="cpu", weights_only=not trust)
    except Exception as error:
        if trust:
            raise CheckpointError(
                f"cannot read {path}: {type(error).__name__}: {' '.join(str(error).split())}"
            ) from None
        raise CheckpointError(
            f"cannot read {path} as a checkpoint of tensors and containers ({type(error).__name__} in torch.load): "
            "expected what torch.save(model.state_dict(), path) writes, alone or in a dict; a model that was saved "
            "whole runs code when it is read: if you trust it, add --trust (trust=True)"
        ) from None


def numpy_numbers() -> list[Any]:
    """What the numbers of numpy are pickled with: scripts save their accuracies as such, beside the weights."""
    try:
        import numpy
    except ImportError:
        return []
    rebuild = numpy.float64(0).__reduce__()[0]
    found: list[Any] = [rebuild, numpy.dtype, *{type(numpy.dtype(kind)) for kind in "?bBhHiIlLqQefd"}]
    if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 6):
        # As numpy 1 and numpy 2 name it, whichever wrote the file.
        found += [(rebuild, f"numpy.{core}.multiarray.scalar") for core in ("core", "_core")]
    return found


def _write(content: Any, path: Path) -> None:
    """Whole or not at all."""
    if path.is_dir() or not path.parent.is_dir():
        raise CheckpointError(f"cannot write {str(path)!r}: expected a file name in a folder that exists")
    if path.suffix != SAFETENSORS:
        publish(path, lambda file: torch.save(content, file))
        return
    odd = [str(name) for name, value in content.items() if not isinstance(value, Tensor)]
    if odd:
        raise CheckpointError(
            f"cannot write {str(path)!r}: safetensors holds tensors by name alone, found {_some(odd)} beside them; "
            "choose a name such as plain.pt"
        )
    written = _safetensors().save({name: value.contiguous() for name, value in content.items()})
    publish(path, written)


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError:
        raise CheckpointError("files of safetensors need the package: pip install safetensors") from None
    return safetensors.torch


def _largest(gamma: Tensor) -> float:
    """|gamma| at most; nan where its values are not there."""
    if gamma.is_meta:
        return math.nan
    values = gamma.detach().to_dense()
    values = (values if values.is_complex() else values.double()).abs()
    return float(values.max()) if values.numel() else 0.0


def _same_shape(value: object, like: object) -> bool:
    if isinstance(value, Tensor) and isinstance(like, Tensor):
        return value.shape == like.shape
    return value is not None and not isinstance(like, Tensor)


def _some(names: Any) -> str:
    listed = [str(name) for name in names]
    shown = ", ".join(listed[:3])
    return f"{shown} and {len(listed) - 3} more" if len(listed) > 3 else shown or "nothing"
