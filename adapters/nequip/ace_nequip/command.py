"""What ``nequip-train`` says of itself: how it prints its results. How long it trains, Lightning's trainer tells."""

from __future__ import annotations

import os
from collections.abc import Sequence

from ace_plugins.adapter import Metric, Script

TRAIN = "nequip-train"

_NUMBER = r"([-+]?(?:[\d.]+(?:e[-+]?\d+)?|nan|inf))"
# Lightning's table of a test: the name, the border of the cell, the number. Validation is printed by the progress bar.
METRICS = tuple(
    Metric(name.replace("_", " "), rf"test0_epoch/{name}\W*[│\s]\s*{_NUMBER}")
    for name in ("forces_mae", "per_atom_energy_mae", "forces_rmse", "per_atom_energy_rmse")
)


def script(argv: Sequence[str]) -> Script | None:
    """None if ``argv`` is of another command: nequip-package and nequip-compile train nothing."""
    if not argv or os.path.basename(argv[0]) != TRAIN:
        return None
    return Script(metrics=METRICS)
