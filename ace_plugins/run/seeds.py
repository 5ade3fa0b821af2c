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
"""Upper limit of seeds, because numpy accepts only smaller ones. Larger seeds are taken modulo this number."""


def shift_seeds() -> None:
    """Shift all seeds of this process by the number in the environment variable ``ACE_SEED_SHIFT``."""
    shift = SeedShift(int(os.environ[SHIFT]))
    shift.patch(random, "seed")
    whenever_imported(lambda numpy: shift.patch(numpy.random, "seed"), name="numpy")
    whenever_imported(shift.patch_torch, name="torch")


class SeedShift:
    """Adds a number to every seed, in all libraries."""

    def __init__(self, by: int) -> None:
        self.by = by
        self.inside = False
        """True during a call to a seed function. Seed functions that it calls must not shift the seed again."""

    def patch(self, module: Any, *names: str) -> None:
        """Seed a module with the shift, and replace its seed functions by ones that add the shift."""
        for name in names:
            seed = getattr(module, name)
            seed(self.by % LIMIT)
            setattr(module, name, self._wrap(seed))

    def patch_torch(self, torch: ModuleType) -> None:
        self.patch(torch, "manual_seed")
        torch.random.manual_seed = torch.manual_seed
        self.patch(torch.cuda, "manual_seed", "manual_seed_all")

    def _wrap(self, seed: Callable[..., Any]) -> Callable[..., Any]:
        def seed_shifted(value: Any = None, *args: Any, **kwargs: Any) -> Any:
            if self.inside or not hasattr(value, "__index__"):
                return seed(value, *args, **kwargs)
            self.inside = True
            try:
                return seed((int(value) + self.by) % LIMIT, *args, **kwargs)
            finally:
                self.inside = False

        return seed_shifted
