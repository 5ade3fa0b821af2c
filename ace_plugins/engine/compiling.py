"""What a compiler must leave to Python."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch


def outside_graphs(reason: str) -> Callable[[Any], Any]:
    """A function that splits the graph. torch tells the reason where the whole forward was to be one graph."""
    told = {"reason": reason} if "reason" in inspect.signature(torch.compiler.disable).parameters else {}
    return functools.partial(torch.compiler.disable, **told)
