"""This process among those that train one model together."""

from __future__ import annotations

import os

from torch import distributed


def is_distributed() -> bool:
    return distributed.is_available() and distributed.is_initialized()


def rank() -> int:
    """0 where it trains alone."""
    return distributed.get_rank() if is_distributed() else int(os.environ.get("RANK", "0") or 0)
