"""A copy of a model and its batch in float64, for measurements that are to be above rounding."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import AceError
from ..symmetry.measuring import Call, as_call, evaluate, mapped, untouched
from .state import Ace


def in_double(model: nn.Module, batch: Any, *, copied: bool) -> tuple[nn.Module, Any, str]:
    """A copy of the model and the batch in float64, or as they are and why."""
    try:
        judged = _copy(model).double() if copied else model
        args, kwargs = (mapped(part, _wide) for part in as_call(batch))
        with torch.inference_mode(False), unwatched(judged), untouched(judged):
            evaluate(judged, args, kwargs, 0)
        return judged, Call(args, kwargs), ""
    except AceError:
        raise
    except Exception as error:
        why = f"not converted to float64: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
    try:
        return (_copy(model) if copied else model), batch, why
    except Exception:
        return model, batch, why


def _wide(tensor: Tensor) -> Tensor:
    wide = torch.complex128 if tensor.is_complex() else torch.float64
    return tensor.to(wide) if tensor.is_floating_point() or tensor.is_complex() else tensor


def _copy(model: nn.Module) -> nn.Module:
    copied = copy.deepcopy(model)
    for mine, its in zip(model.modules(), copied.modules(), strict=True):
        if isinstance(mine, Ace) and isinstance(its, Ace):
            its.forced = mine.forced  # a copy has no override of its own
    return copied


@contextmanager
def unwatched(model: nn.Module) -> Iterator[None]:
    """Evaluations in here are not the script's, whose epochs are counted by them."""
    aces = [module for module in model.modules() if isinstance(module, Ace)]
    before = [(ace.budget.watching, ace.evaluates) for ace in aces]
    for ace in aces:
        ace.budget.watching = False
    try:
        yield
    finally:
        for ace, (watching, evaluates) in zip(aces, before, strict=True):
            ace.budget.watching, ace.evaluates = watching, evaluates
