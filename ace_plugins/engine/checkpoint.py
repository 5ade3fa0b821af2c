"""Checkpoints with and without ACE: loading into attached models, and export to plain upstream."""

from __future__ import annotations

import copy
import json
import os
import re
import warnings
from collections import Counter
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

MANIFEST = f"{NAME}.manifest"
NUMBERED = re.compile(r"(.*\D)(\d+)")
BUFFERS = ("direction", "running_mean", "running_var", "num_batches_tracked", "_u", "_v")
"""Names of the buffers in branches (the last part of a key); all other tensors of branches are parameters."""

File = str | os.PathLike[str]
State = tuple[Mapping[Any, Any], tuple[str, ...]]
"""A state_dict with ACE in it, and the prefixes of ACE's keys ("ace.", "module.ace.")."""


class CheckpointHook:
    """A load_state_dict pre-hook for attached models: refuses checkpoints of other models before anything is loaded.

    A checkpoint of plain upstream is accepted: gamma, the duals and the branches keep their values.
    """

    def __call__(self, model: nn.Module, state: MutableMapping[str, Any], prefix: str, *rest: Any) -> None:
        ace = find(model)
        if ace is None:
            return
        own = model.state_dict(prefix=prefix, keep_vars=True)
        mine = prefix + NAME + "."
        # A partial checkpoint is accepted, because torch does not tell this hook the caller's argument ``strict``.
        theirs = [name for name in state if name.startswith(prefix) and not name.startswith(mine)]
        fitting = [name for name in theirs if name in own and _shape(state[name]) == _shape(own[name])]
        if len(fitting) * 2 < len(theirs):
            weights = [name for name in own if not name.startswith(mine)]
            raise CheckpointError(
                f"checkpoint of another architecture: {len(fitting)} of its {len(theirs)} weights fit "
                f"{type(model).__name__} by name and shape; it holds {_some(theirs)}, expected {_some(weights)}; "
                f"nothing was loaded into {type(model).__name__}"
            )
        if any(name.startswith(mine) for name in state):
            ace.duals.migrate(state, f"{mine}duals.")
            _check_ace(ace, own, state, mine)
            return
        state.update({name: value.detach() for name, value in own.items() if name.startswith(mine)})
        deployed = "; with branches, model.eval() differs from the checkpoint's model" if ace.in_eval else ""
        warnings.warn(
            f"checkpoint without ACE loaded into {type(model).__name__}: gamma, the duals and the branches of "
            f"its {len(ace.sites)} sites keep their current values{deployed}",
            AceWarning,
            stacklevel=2,
        )


def _check_ace(ace: Ace, own: Mapping[str, Any], state: Mapping[str, Any], mine: str) -> None:
    if mine + "manifest" not in state:
        return  # the script loads only a part of a checkpoint, on purpose
    about = read_manifest(state[mine + "manifest"])
    sites = [site.name for site in ace.sites]
    if about is None or about["adapter"] != ace.adapter or about["sites"] != sites:
        found = "an unreadable manifest" if about is None else f"{about['adapter']}: {', '.join(about['sites'])}"
        raise CheckpointError(
            f"checkpoint holds ACE of other sites ({found}), expected {ace.adapter}: {', '.join(sites)}; "
            "nothing of it was loaded"
        )
    wrong = [n for n, value in own.items() if n.startswith(mine) and _shape(state.get(n)) != _shape(value)]
    extra = [n for n in state if n.startswith(mine) and n not in own]
    if wrong or extra:
        raise CheckpointError(
            f"checkpoint holds ACE with other branches: missing or of another shape {_some(wrong)}, not expected "
            f"{_some(extra)}; attach with the settings it was trained with; nothing of it was loaded"
        )


def read_manifest(stored: Tensor) -> dict[str, Any] | None:
    """Return a checkpoint's manifest, a dict with "adapter" and "sites"; None if it is unreadable."""
    try:
        about = json.loads(bytes(stored.round().to(torch.uint8).tolist()))
        return about if {"adapter", "sites"} <= about.keys() else None
    except (ValueError, AttributeError, TypeError):
        return None


def export(source: Mapping[str, Any] | File, to: File | None = None, *, trust: bool = False) -> Any:
    """Remove ACE from a checkpoint, so that plain upstream loads it with ``strict=True``.

    Averaged weights stored in a list or under numbered keys (NequIP's EMA, torch_ema) lose ACE's entries as well.

    Args:
        source: A state_dict, a dict or list with state_dicts inside (such as a Lightning checkpoint), or the path of a
            file that ``torch.save`` wrote.
        to: The file to write, if any.
        trust: Also read files that contain pickled models. Such a file runs code when it is read.

    Returns:
        The content of the checkpoint without ACE's entries.

    Raises:
        CheckpointError: If the source cannot be read or contains no ACE, if it is ambiguous which averaged weights are
            ACE's, or if ``to`` is the source or cannot be written.
    """
    return export_checkpoint(source, to, trust=trust).content


@dataclass
class Exported:
    """A checkpoint from which ACE was removed, with counts of the tensors removed and kept."""

    content: Any = None
    kept: int = 0
    """Number of tensors kept."""
    removed: int = 0
    """Number of tensors removed."""
    gammas: list[Any] = field(default_factory=list)
    optimizers: int = 0
    """Number of optimizer states in the checkpoint from which ACE's parameters could not be removed."""
    states: list[State] = field(default_factory=list)
    """All state_dicts in the original checkpoint that contain ACE."""

    def clean(self, content: Any) -> Any:
        """Return the content without ACE, and update the counts."""
        if type(content) in (list, tuple):
            gone = self._places_in(content)
            self.removed += len(gone)
            return type(content)(self.clean(item) for place, item in enumerate(content) if place not in gone)
        if isinstance(content, nn.Module):
            return self._project(content)
        if not isinstance(content, Mapping):
            self.kept += isinstance(content, Tensor)
            return content
        if _is_optimizer(content):
            plain = _drop_adopted(content)
            if plain is not None:
                return plain
            self.optimizers += 1
        prefixes = _prefixes(content)
        self.gammas.extend(content.get(prefix + "gamma") for prefix in prefixes)
        renamed = _renumber(content, prefixes) if prefixes else {}
        cleaned: Any = copy.copy(content)  # keeps the type and torch's _metadata
        cleaned.clear()
        for name, value in content.items():
            if (isinstance(name, str) and name.startswith(prefixes or "\0")) or renamed.get(name, "") is None:
                self.removed += 1
            else:
                cleaned[renamed.get(name, name)] = self.clean(value)
        if prefixes and hasattr(cleaned, "_metadata"):  # torch keeps a version of every submodule there
            versions = cleaned._metadata.items()
            cleaned._metadata = type(cleaned._metadata)((k, v) for k, v in versions if not f"{k}.".startswith(prefixes))
        return cleaned

    def _places_in(self, weights: Sequence[Any]) -> Sequence[int]:
        """Return the positions of ACE's parameters in a list of averaged weights; empty for any other list."""
        if not weights or not all(isinstance(weight, Tensor) for weight in weights):
            return ()
        shapes = list(map(_shape, weights))
        found = (_places_of_ace(*state, shapes, f"a list of {len(weights)} weights") for state in self.states)
        return next(filter(None, found), ())

    def _project(self, whole: nn.Module) -> nn.Module:
        """Remove ACE from a pickled model, and from models in dicts that are its attributes (Lightning's hparams)."""
        before = len(whole.state_dict())
        dicts = [value for part in whole.modules() for value in vars(part).values() if isinstance(value, Mapping)]
        roots = [whole, *(each for value in dicts for each in value.values() if isinstance(each, nn.Module))]
        for model in [part for root in roots for part in root.modules()]:
            ace = find(model)
            if ace is not None:
                self.gammas.append(ace.gamma)
                uninstall(ace, model)
        left = len(whole.state_dict())
        self.kept, self.removed = self.kept + left, self.removed + before - left
        return whole


def _prefixes(content: Mapping[Any, Any]) -> tuple[str, ...]:
    """Return the prefixes of ACE's keys in a state_dict: the keys of manifests without "manifest"."""
    marks = [k for k in content if isinstance(k, str) and (k == MANIFEST or k.endswith("." + MANIFEST))]
    return tuple(mark.removesuffix("manifest") for mark in marks)


def _states(content: Any) -> Iterator[State]:
    """Yield the state_dicts that contain ACE, at any depth of dicts and lists."""
    if isinstance(content, Mapping):
        if prefixes := _prefixes(content):
            yield content, prefixes
        content = content.values()
    elif type(content) not in (list, tuple):
        return
    for each in content:
        yield from _states(each)


def _renumber(state: Mapping[Any, Any], prefixes: tuple[str, ...]) -> dict[str, str | None]:
    """Return a mapping from numbered keys of averaged weights ("ema.ema_weight_0") to new keys; None means remove."""
    numbered = [match for name in state if isinstance(name, str) and (match := NUMBERED.fullmatch(name))]
    renamed: dict[str, str | None] = {}
    for stem, count in Counter(match[1] for match in numbered).items():
        family = [f"{stem}{number}" for number in range(count)]
        if not all(name in state for name in family):
            continue
        others = {name: value for name, value in state.items() if name not in family}
        shapes = [_shape(state[name]) for name in family]
        gone = _places_of_ace(others, prefixes, shapes, f"{family[0]} to {family[-1]}")
        kept = [name for place, name in enumerate(family) if place not in gone]
        renamed.update({family[place]: None for place in gone})
        renamed.update({name: f"{stem}{number}" for number, name in enumerate(kept) if gone})
    return renamed


def _places_of_ace(
    state: Mapping[Any, Any], prefixes: tuple[str, ...], shapes: Sequence[Any], what: str
) -> Sequence[int]:
    """Return the positions of ACE's parameters among weights known only by shape; empty if there are none.

    ACE's parameters are consecutive, in the order of ``parameters()``. The weights before and after them must have the
    shapes of weights that are before and after ACE's keys in the state_dict.
    """
    names = [name for name in state if isinstance(name, str)]
    mine = [name for name in names if name.startswith(prefixes[0])]
    block = [_shape(state[name]) for name in mine if _is_parameter(name.removeprefix(prefixes[0]))]
    found = [place for place in range(len(shapes)) if shapes[place : place + len(block)] == block]
    if not found:
        return ()
    before, after = names[: names.index(mine[0])], names[names.index(mine[-1]) + 1 :]
    fitting = [
        place
        for place in found
        if _among(shapes[:place], (_shape(state[name]) for name in before))
        and _among(shapes[place + len(block) :], (_shape(state[name]) for name in after))
    ]
    if len(fitting) != 1 or len(prefixes) > 1:
        raise CheckpointError(
            f"{what}: expected averages of the weights of one model with ACE, found {len(fitting)} places that fit "
            "the shapes of ACE's parameters; nothing was exported"
        )
    return range(fitting[0], fitting[0] + len(block))


def _is_parameter(name: str) -> bool:
    return name == "gamma" or (name.startswith("branches.") and name.rpartition(".")[2] not in BUFFERS)


def _among(shapes: Iterable[Any], others: Iterator[Any]) -> bool:
    """Return whether ``shapes`` is a subsequence of ``others``."""
    return all(any(shape == other for other in others) for shape in shapes)


def _is_optimizer(content: Mapping[Any, Any]) -> bool:
    """Return whether this is the state of an optimizer: param_groups with parameters, and a state for each of them."""
    state, groups = content.get("state"), content.get("param_groups")
    return isinstance(state, Mapping) and isinstance(groups, list) and all(map(_is_group, groups))


def _is_group(group: Any) -> bool:
    return isinstance(group, Mapping) and isinstance(group.get("params"), list)


def _drop_adopted(state: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return an optimizer's state without the group that `adopt` added for ACE; None if there is no such group."""
    *groups, last = state["param_groups"] or [{}]
    if last.get("name") != NAME:
        return None
    values = {number: value for number, value in state["state"].items() if number not in last["params"]}
    return {**state, "param_groups": groups, "state": values}


def export_checkpoint(source: Mapping[str, Any] | File, to: File | None = None, *, trust: bool = False) -> Exported:
    """Export a checkpoint as `export` does, and return its content together with counts of tensors."""
    if isinstance(source, nn.Module):
        raise CheckpointError(f"cannot export {type(source).__name__} itself: expected its state_dict() or a path")
    path = Path(source) if isinstance(source, (str, os.PathLike)) else None
    if to is not None and path is not None and Path(to).resolve() == path.resolve():
        raise CheckpointError(f"{str(to)!r} is the checkpoint itself: ACE's part would be lost; choose another name")
    content: Any = source if path is None else read_checkpoint(path, trust=trust)
    result = Exported(states=list(_states(content)))
    result.content = result.clean(content)
    if not result.removed:
        raise CheckpointError(
            f"{path or 'the state_dict'} holds no ACE: expected keys such as {MANIFEST!r} and "
            f"'{NAME}.gamma', found {_some(content) if isinstance(content, Mapping) else type(content).__name__}"
        )
    largest = max(map(_largest, result.gammas), default=0.0)
    if to is not None:
        if Path(to).is_dir() or not Path(to).parent.is_dir():
            raise CheckpointError(f"cannot write {str(to)!r}: expected a file name in a folder that exists")
        publish(to, lambda file: torch.save(result.content, file))
    if not largest <= 1e-3:  # this is also true for nan
        warnings.warn(
            f"exporting f_eq alone although max |gamma| is {largest:.3g}: the branches left out still affect the model",
            AceWarning,
            stacklevel=3,
        )
    if result.optimizers:
        warnings.warn(
            "the optimizer state in the checkpoint is unchanged and still includes ACE's parameters: plain upstream "
            "can load the weights, but its optimizer cannot load that state",
            AceWarning,
            stacklevel=3,
        )
    return result


def _largest(gamma: Any) -> float:
    """Return the largest |gamma| of all sites; raise a CheckpointError if ``gamma`` is damaged."""
    if not isinstance(gamma, Tensor) or gamma.is_meta or not gamma.is_floating_point() or not gamma.numel():
        found = f"{gamma.dtype} {list(gamma.shape)}" if isinstance(gamma, Tensor) else type(gamma).__name__
        raise CheckpointError(
            f"damaged checkpoint: {NAME}.gamma: expected numbers, found {found}; nothing was exported"
        )
    return float(gamma.detach().to_dense().abs().max())


def read_checkpoint(path: Path, *, trust: bool = False) -> Any:
    """Read a file that ``torch.save`` wrote: tensors and containers, and also pickled models if ``trust`` is true."""
    if not path.is_file():
        raise CheckpointError(f"no checkpoint at {str(path)!r}: expected a file that torch.save wrote")
    try:
        with torch.serialization.safe_globals(numpy_numbers()):
            return torch.load(path, map_location="cpu", weights_only=not trust)
    except Exception as error:
        if trust:
            raise CheckpointError(
                f"cannot read {path}: {type(error).__name__}: {' '.join(f'{error}'.split())}"
            ) from None
        raise CheckpointError(
            f"cannot read {path} as a checkpoint ({type(error).__name__} in torch.load): expected tensors and "
            "containers, as torch.save(model.state_dict(), path) writes; a whole model runs code when it is read: if "
            "you trust it, add --trust (trust=True)"
        ) from None


def numpy_numbers() -> list[Any]:
    """Return what ``torch.serialization.safe_globals`` must allow so that pickled NumPy numbers can be read.

    Scripts may save results such as accuracies as NumPy numbers, together with the weights.

    Returns:
        Functions and types that ``torch.load(..., weights_only=True)`` may call; empty if NumPy is not installed.
    """
    try:
        import numpy
    except ImportError:
        return []
    rebuild = numpy.float64(0).__reduce__()[0]
    found: list[Any] = [rebuild, numpy.dtype, *{type(numpy.dtype(kind)) for kind in "?bBhHiIlLqQefd"}]
    if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 6):
        # The file may come from numpy 1 or numpy 2, which name the function differently.
        found += [(rebuild, f"numpy.{core}.multiarray.scalar") for core in ("core", "_core")]
    return found


def _shape(value: Any) -> Any:
    return getattr(value, "shape", None)


def _some(names: Iterable[Any]) -> str:
    listed = [str(name) for name in names]
    shown = ", ".join(listed[:3])
    return f"{shown} and {len(listed) - 3} more" if len(listed) > 3 else shown or "nothing"
