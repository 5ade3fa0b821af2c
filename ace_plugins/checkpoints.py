"""Checkpoints with and without ACE: what an attached model accepts, and what plain upstream gets."""

from __future__ import annotations

import json
import os
import tempfile
import warnings
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .errors import AceWarning, CheckpointError
from .relaxation import NAME, Ace, find

MANIFEST = f"{NAME}.manifest"


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
        weights = {name: value for name, value in own.items() if not name.startswith(mine)}
        shared = [name for name, value in weights.items() if _same_shape(state.get(name), value)]
        if weights and len(shared) * 2 < len(weights):
            raise CheckpointError(
                f"checkpoint of another architecture: {len(shared)} of the {len(weights)} weights of "
                f"{type(model).__name__} are in it by name and shape; it holds {_some(state)}, expected "
                f"{_some(weights)}; nothing was loaded"
            )
        if not any(name.startswith(mine) for name in state):
            state.update({name: value.detach() for name, value in own.items() if name.startswith(mine)})
            warnings.warn(
                f"checkpoint without ACE loaded into {type(model).__name__}: gamma, the duals and the branches of "
                f"its {len(ace.sites)} sites keep the values they have",
                AceWarning,
                stacklevel=2,
            )
        else:
            _check_ace(ace, own, state, mine)


def _check_ace(ace: Ace, own: Mapping[str, Any], state: Mapping[str, Any], mine: str) -> None:
    about = read_manifest(state.get(mine + "manifest"))
    sites = [site.name for site in ace.sites]
    if about is None or about["adapter"] != ace.adapter or about["sites"] != sites:
        found = "an unreadable manifest" if about is None else f"{about['adapter']}: {', '.join(about['sites'])}"
        raise CheckpointError(
            f"checkpoint holds ACE of other sites ({found}), expected {ace.adapter}: {', '.join(sites)}; "
            "nothing was loaded"
        )
    wrong = [n for n, v in own.items() if n.startswith(mine) and not _same_shape(state.get(n), v)]
    extra = [n for n in state if n.startswith(mine) and n not in own]
    if wrong or extra:
        raise CheckpointError(
            f"checkpoint holds ACE with other branches: missing or of another shape {_some(wrong)}, not expected "
            f"{_some(extra)}; attach with the settings it was trained with; nothing was loaded"
        )


def read_manifest(stored: object) -> dict[str, Any] | None:
    """What a checkpoint says of the ACE in it; None if that cannot be read."""
    if not isinstance(stored, Tensor):
        return None
    try:
        about = json.loads(bytes(stored.to(torch.uint8).tolist()))
        return about if {"adapter", "sites"} <= about.keys() else None
    except (ValueError, AttributeError):
        return None


def export(source: Mapping[str, Any] | str | os.PathLike[str], to: str | os.PathLike[str] | None = None) -> Any:
    """A checkpoint without ACE, which plain upstream loads with ``strict=True``.

    ``source`` is a state_dict, or a dict with state_dicts somewhere inside it, or the path of either as
    ``torch.save`` wrote it. Returns the same structure without ACE's entries, and writes it to ``to`` if given.
    """
    where = "the state_dict"
    content: Any = source
    if isinstance(source, (str, os.PathLike)):
        where = str(source)
        content = _read(Path(source))
    found: list[Tensor] = []
    cleaned = _clean(content, found)
    if not found:
        raise CheckpointError(
            f"{where} holds no ACE: expected keys such as {MANIFEST!r} and '{NAME}.gamma', "
            f"found {_some(content) if isinstance(content, Mapping) else type(content).__name__}"
        )
    largest = max(float(gamma.detach().abs().max()) for gamma in found)
    if largest > 1e-3:
        warnings.warn(
            f"exporting f_eq alone although max |gamma| is {largest:.3g}: the branches it leaves out still count",
            AceWarning,
            stacklevel=2,
        )
    if to is not None:
        _write(cleaned, Path(to))
    return cleaned


def _clean(content: Any, found: list[Tensor]) -> Any:
    if not isinstance(content, Mapping):
        return content
    # A wrapped model's keys have a prefix ("module.ace.gamma"); the manifest marks every ACE there is.
    marks = [k for k in content if isinstance(k, str) and (k == MANIFEST or k.endswith("." + MANIFEST))]
    prefixes = tuple(mark[: -len("manifest")] for mark in marks)
    if prefixes:
        found.extend(content[prefix + "gamma"] for prefix in prefixes)
        kept = {k: v for k, v in content.items() if not k.startswith(prefixes)}
    else:
        kept = {k: _clean(v, found) for k, v in content.items()}
    return type(content)(kept)  # type: ignore[call-arg]


def _read(path: Path) -> Any:
    if not path.is_file():
        raise CheckpointError(f"no checkpoint at {path}: expected a file that torch.save wrote")
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(
            f"cannot read {path} as a checkpoint of tensors and plain containers: {first}; save model.state_dict() "
            "or pass the dict itself"
        ) from None


def _write(content: Any, path: Path) -> None:
    """Whole or not at all."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(handle, "wb") as file:
            torch.save(content, file)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _same_shape(value: object, like: object) -> bool:
    if isinstance(value, Tensor) and isinstance(like, Tensor):
        return value.shape == like.shape
    return value is not None and not isinstance(like, Tensor)


def _some(names: Any) -> str:
    listed = [str(name) for name in names]
    shown = ", ".join(listed[:3])
    return f"{shown} and {len(listed) - 3} more" if len(listed) > 3 else shown or "nothing"
