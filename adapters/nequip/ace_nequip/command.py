"""Finds the results that ``nequip-train`` prints. The number of epochs comes from Lightning's trainer."""

from __future__ import annotations

import os
from collections.abc import Sequence

from ace_plugins.adapter import Metric, Script

TRAIN = "nequip-train"
# Lightning's table of test results: the name, the border of the cell, the number.
METRICS = tuple(
    Metric(name.replace("_", " "), f"test0_epoch/{name}" + r"\W*[│\s]\s*{number}")
    for name in ("forces_mae", "per_atom_energy_mae", "forces_rmse", "per_atom_energy_rmse")
)


def script(argv: Sequence[str]) -> Script | None:
    """Return the facts about nequip-train. Other commands, such as nequip-package, train nothing."""
    return Script(metrics=METRICS) if argv and os.path.basename(argv[0]) == TRAIN else None
