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
BUFFERS = ("direction", "running_mean", "running_var", "num_batches_tracked")  # in branches

File = str | os.PathLike[str]


def check_state(model: nn.Module, state: MutableMapping[str, Any], prefix: str, *rest: Any) -> None:
    """Pre-hook of load_state_dict: refuses checkpoints of other models, and accepts those of plain upstream."""
    ace = find(model)
    if ace is None:
        return
    own = model.state_dict(prefix=prefix, keep_vars=True)
    mine = prefix + NAME + "."
    # A partial checkpoint is accepted, because torch does not pass the caller's argument ``strict`` to this hook.
    theirs = [name for name in state if name.startswith(prefix) and not name.startswith(mine)]
    fitting = [name for name in theirs if name in own and _shape(state[name]) == _shape(own[name])]
    if len(fitting) * 2 < len(theirs):
        expected = _some(name for name in own if not name.startswith(mine))
        raise CheckpointError(
            f"checkpoint of another architecture: {len(fitting)} of its {len(theirs)} weights fit the names and "
            f"shapes of {type(model).__name__}; expected {expected}, found {_some(theirs)}; nothing was loaded"
        )
    if any(name.startswith(mine) for name in state):
        ace.duals.migrate(state, f"{mine}duals.")
        if mine + "manifest" in state:  # otherwise the script loads only a part of a checkpoint, on purpose
            _check_ace(ace, own, state, mine)
        ace.session.started = True  # gamma has the value of the checkpoint
        return
    state.update({name: value.detach() for name, value in own.items() if name.startswith(mine)})
    text = f"checkpoint without ACE loaded into {type(model).__name__}: gamma, duals and branches are unchanged"
    deployed = "; with branches, model.eval() differs from the checkpoint's model" if ace.in_eval else ""
    warnings.warn(text + deployed, AceWarning, stacklevel=2)


def _check_ace(ace: Ace, own: Mapping[str, Any], state: Mapping[str, Any], mine: str) -> None:
    expected = f"{ace.adapter}: {', '.join(site.name for site in ace.sites)}"
    try:
        about = json.loads(bytes(state[mine + "manifest"].round().to(torch.uint8).tolist()))
        found = f"{about['adapter']}: {', '.join(about['sites'])}"
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError):
        found = "an unreadable manifest"
    if found != expected:
        raise CheckpointError(f"the checkpoint's sites ({found}) are not the model's ({expected}); nothing was loaded")
    wrong = [n for n, value in own.items() if n.startswith(mine) and not _holds_numbers(state.get(n), value)]
    extra = [n for n in state if n.startswith(mine) and n not in own]
    if wrong or extra:
        raise CheckpointError(
            f"the checkpoint's branches are not the model's: missing, damaged or of another shape: {_some(wrong)}; "
            f"unknown: {_some(extra)}; attach with the settings of the run that wrote it; nothing was loaded"
        )


def export(source: Mapping[str, Any] | File, to: File | None = None, *, trust: bool = False) -> Any:
    """Remove ACE from a checkpoint, so that plain upstream loads it with ``strict=True``.

    ACE's entries are also removed from averaged weights in a list or under numbered keys (NequIP's EMA, torch_ema).

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


def export_checkpoint(source: Mapping[str, Any] | File, to: File | None = None, *, trust: bool = False) -> Exported:
    """Export a checkpoint as `export` does, and return its content with counts of tensors."""
    if isinstance(source, nn.Module):
        raise CheckpointError(f"cannot export {type(source).__name__} itself: expected its state_dict() or a path")
    path = Path(source) if isinstance(source, (str, os.PathLike)) else None
    if to is not None and path is not None and Path(to).resolve() == path.resolve():
        raise CheckpointError(f"{str(to)!r} is the checkpoint itself: ACE's part would be lost; choose another name")
    content: Any = source if path is None else read_checkpoint(path, trust=trust)
    result = Exported(list(_find_blocks(content)))
    result.content = result.clean(content)
    if not result.removed:
        raise CheckpointError(
            f"{path or 'the state_dict'} holds no ACE: expected keys such as {MANIFEST!r} and "
            f"'{NAME}.gamma', found {_some(content) if isinstance(content, Mapping) else type(content).__name__}"
        )
    largest = max((_largest(gamma) for gamma in result.gammas), default=0.0)
    if to is not None:
        if Path(to).is_dir() or not Path(to).parent.is_dir():
            raise CheckpointError(f"cannot write {str(to)!r}: expected a file name in a folder that exists")
        publish(to, lambda file: torch.save(result.content, file))
    if not largest <= 1e-3:  # this is also true for nan
        text = f"export removes branches with |gamma| up to {largest:.3g}, so the exported model may give other outputs"
        warnings.warn(text, AceWarning, stacklevel=3)
    if result.optimizers:
        text = "plain upstream can load the weights, but not the optimizer state, which still has ACE's parameters"
        warnings.warn(text, AceWarning, stacklevel=3)
    return result


@dataclass
class Exported:
    """A checkpoint from which ACE was removed, with counts of the tensors removed and kept."""

    blocks: list[list[Any]]  # for every model with ACE, the shapes of ACE's parameters in the order of ``parameters()``
    content: Any = None
    kept: int = 0
    removed: int = 0
    gammas: list[Any] = field(default_factory=list)
    optimizers: int = 0  # number of optimizer states, which are not changed

    def clean(self, content: Any) -> Any:
        """Return the content without ACE, and update the counts."""
        if type(content) in (list, tuple):
            gone = self._find_averages(content, f"a list of {len(content)} tensors")
            self.removed += len(gone)
            return type(content)(self.clean(item) for place, item in enumerate(content) if place not in gone)
        if isinstance(content, nn.Module):
            return self._project(content)
        if not isinstance(content, Mapping):
            self.kept += isinstance(content, Tensor)
            return content
        self.optimizers += isinstance(content.get("param_groups"), list) and "state" in content
        prefixes = _prefixes(content)
        self.gammas += [content.get(prefix + "gamma") for prefix in prefixes]
        renamed = self._renumber(content)
        cleaned: Any = copy.copy(content)  # keeps the type and torch's _metadata
        cleaned.clear()
        for name, value in content.items():
            if str(name).startswith(prefixes) or renamed.get(name, "") is None:
                self.removed += 1
            else:
                cleaned[renamed.get(name, name)] = self.clean(value)
        return cleaned

    def _renumber(self, state: Mapping[Any, Any]) -> dict[str, str | None]:
        """Return new keys for numbered keys of averaged weights ("ema_weight_0"); None for keys to remove."""
        stems = Counter(match[1] for name in state if (match := NUMBERED.fullmatch(str(name))))
        renamed: dict[str, str | None] = {}
        for stem, count in stems.items():
            family = [f"{stem}{number}" for number in range(count)]
            if all(name in state for name in family):
                gone = self._find_averages([state[name] for name in family], f"{family[0]} to {family[-1]}")
                kept = [name for place, name in enumerate(family) if place not in gone]
                renamed |= dict.fromkeys(family) | dict(zip(kept, family, strict=False))
        return renamed

    def _find_averages(self, weights: Sequence[Any], what: str) -> range:
        """Return the indices of ACE's parameters in averaged weights, which have a known order but no names."""
        shapes = list(map(_shape, weights))
        found: set[range] = set()
        for block in self.blocks:
            starts = [place for place in range(len(shapes)) if shapes[place : place + len(block)] == block]
            found |= {range(start, start + len(block)) for start in starts}
        if len(found) > 1:
            raise CheckpointError(
                f"cannot tell which of the averaged weights ({what}) are ACE's: {len(found)} parts of them have the "
                "shapes of ACE's parameters, expected 1; copy the averages into the model and export its state_dict()"
            )
        return found.pop() if found else range(0)

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
    """Return the prefixes of ACE's keys in a state_dict, such as "ace.", found from keys like "ace.manifest"."""
    keys = [str(name) for name in content]
    return tuple(key.removesuffix("manifest") for key in keys if f".{key}".endswith(f".{MANIFEST}"))


def _find_blocks(content: Any) -> Iterator[list[Any]]:
    """Yield the `Exported.blocks` of all state_dicts that contain ACE, at any depth of dicts and lists."""
    if isinstance(content, Mapping):
        for prefix in _prefixes(content):
            names = [str(name) for name in content if str(name).startswith((f"{prefix}gamma", f"{prefix}branches."))]
            if names:
                yield [_shape(content[name]) for name in names if name.rpartition(".")[2] not in BUFFERS]
        content = list(content.values())
    if isinstance(content, (list, tuple)):
        for each in content:
            yield from _find_blocks(each)


def _largest(gamma: Any) -> float:
    if not isinstance(gamma, Tensor) or gamma.is_meta or not gamma.is_floating_point() or not gamma.numel():
        found = f"{gamma.dtype} {list(gamma.shape)}" if isinstance(gamma, Tensor) else type(gamma).__name__
        raise CheckpointError(f"damaged checkpoint: {NAME}.gamma: expected numbers, found {found}")
    return float(gamma.detach().to_dense().abs().max())


def read_checkpoint(path: Path, *, trust: bool = False) -> Any:
    """Read a file that ``torch.save`` wrote: tensors and containers, and also pickled models if ``trust`` is true."""
    if not path.is_file():
        raise CheckpointError(f"no checkpoint at {str(path)!r}: expected a file that torch.save wrote")
    try:
        with torch.serialization.safe_globals(numpy_numbers()):
            return torch.load(path, map_location="cpu", weights_only=not trust)
    except Exception as error:
        hint = (
            "if the file contains a whole model and you trust it, add --trust (trust=True): reading it then runs code"
        )
        why = " ".join(str(error).split()) if trust else f"expected tensors and containers; {hint}"
        text = f"cannot read {path} as a checkpoint: {type(error).__name__} in torch.load: {why}"
        raise CheckpointError(text) from None


def numpy_numbers() -> list[Any]:
    """Return the functions and types that ``torch.serialization.safe_globals`` must allow to load NumPy numbers.

    Returns:
        A list for ``safe_globals``, used with ``torch.load(..., weights_only=True)``; empty without NumPy.
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


def _holds_numbers(value: Any, like: Tensor) -> bool:
    """Return whether a value can be loaded into ``like``: a dense tensor of real numbers, of the same shape."""
    dense = isinstance(value, Tensor) and value.layout == torch.strided and (like.is_meta or not value.is_meta)
    return dense and not (value.is_quantized or value.is_complex()) and value.shape == like.shape


def _shape(value: Any) -> Any:
    return getattr(value, "shape", None)


def _some(names: Iterable[Any]) -> str:
    listed = [str(name) for name in names]
    shown = ", ".join(listed[:3])
    return f"{shown} and {len(listed) - 3} more" if len(listed) > 3 else shown or "nothing"
