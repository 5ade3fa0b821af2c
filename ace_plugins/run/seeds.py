"""Another seed for a script that has no option for it: every seed it sets for a whole process is shifted.

That is ``random.seed``, ``numpy.random.seed``, ``torch.manual_seed`` and its kin for GPUs. A script that sets none is
seeded with the shift itself, so that it can be repeated too.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ..patch.imports import whenever_imported
from .request import SHIFT

LIMIT = 2**32
"""numpy takes no seed from here on."""


def shift() -> None:
    """Shift the seeds of this process by what the environment says."""
    text = os.environ.get(SHIFT, "")
    if text.lstrip("-").isdecimal():
        shifted = Shifted(int(text))
        shifted.python(random)
        whenever_imported(shifted.numpy, name="numpy")
        whenever_imported(shifted.torch, name="torch")


class Shifted:
    """One shift for all libraries of the process."""

    def __init__(self, by: int) -> None:
        self.by = by
        self.inside = False
        """A library's own call is under way, which seeds others in turn."""

    def _wrapped(self, seed: Callable[..., Any]) -> Callable[..., Any]:
        def shifted(value: Any = None, *args: Any, **kwargs: Any) -> Any:
            if self.inside or not hasattr(value, "__index__"):
                return seed(value, *args, **kwargs)
            self.inside = True
            try:
                return seed((int(value) + self.by) % LIMIT, *args, **kwargs)
            finally:
                self.inside = False

        return shifted

    def python(self, module: ModuleType) -> None:
        plain = module.seed
        plain(self.by % LIMIT)
        module.seed = self._wrapped(plain)  # type: ignore[attr-defined]

    def numpy(self, module: ModuleType) -> None:
        self.python(module.random)

    def torch(self, module: ModuleType) -> None:
        plain = module.manual_seed
        plain(self.by % LIMIT)
        module.manual_seed = module.random.manual_seed = self._wrapped(plain)  # type: ignore[attr-defined]
        for name in ("manual_seed", "manual_seed_all"):
            setattr(module.cuda, name, self._wrapped(getattr(module.cuda, name)))
