"""Shift the seeds a script sets, for comparisons of scripts that have no option for the seed.

Affects ``random.seed``, ``numpy.random.seed``, ``torch.manual_seed`` and its variants for GPUs. A script that sets no
seed is seeded with the shift, so that it is reproducible too.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ..patch.imports import whenever_imported
from .activation import SHIFT

LIMIT = 2**32
"""numpy accepts only smaller seeds."""


def shift_seeds() -> None:
    """Shift all seeds of this process by the number in the environment."""
    text = os.environ.get(SHIFT, "")
    if text.lstrip("-").isdecimal():
        shift = SeedShift(int(text))
        shift.patch_random(random)
        whenever_imported(lambda numpy: shift.patch_random(numpy.random), name="numpy")
        whenever_imported(shift.patch_torch, name="torch")


class SeedShift:
    """Adds a number to every seed, in all libraries."""

    def __init__(self, by: int) -> None:
        self.by = by
        self.inside = False
        """Set during a call to a seed function, which may call others that must not shift again."""

    def _wrap(self, seed: Callable[..., Any]) -> Callable[..., Any]:
        def shifted(value: Any = None, *args: Any, **kwargs: Any) -> Any:
            if self.inside or not hasattr(value, "__index__"):
                return seed(value, *args, **kwargs)
            self.inside = True
            try:
                return seed((int(value) + self.by) % LIMIT, *args, **kwargs)
            finally:
                self.inside = False

        return shifted

    def patch_random(self, module: ModuleType) -> None:
        """Seed ``random`` or ``numpy.random`` and wrap its seed function."""
        module.seed(self.by % LIMIT)
        module.seed = self._wrap(module.seed)  # type: ignore[attr-defined]

    def patch_torch(self, torch: ModuleType) -> None:
        """Seed torch and wrap its seed functions."""
        torch.manual_seed(self.by % LIMIT)
        torch.manual_seed = torch.random.manual_seed = self._wrap(torch.manual_seed)  # type: ignore[attr-defined]
        for name in ("manual_seed", "manual_seed_all"):
            setattr(torch.cuda, name, self._wrap(getattr(torch.cuda, name)))
