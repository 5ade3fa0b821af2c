"""Finds the results that ``nequip-train`` prints. The number of epochs comes from Lightning's trainer."""

from __future__ import annotations

import os
from collections.abc import Sequence

from ace_plugins.adapter import Metric, Script

TRAIN = "nequip-train"
# A row of Lightning's table of test results has the name, the border of the cell and the number.
METRICS = tuple(
    Metric(name.replace("_", " "), f"test0_epoch/{name}" + r"\W*[│\s]\s*{number}")
    for name in ("forces_mae", "per_atom_energy_mae", "forces_rmse", "per_atom_energy_rmse")
)


def script(argv: Sequence[str]) -> Script | None:
    """Return the metrics of nequip-train; None for other commands, such as nequip-package, which do not train."""
    return Script(metrics=METRICS) if argv and os.path.basename(argv[0]) == TRAIN else None
