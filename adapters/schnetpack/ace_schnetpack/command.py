"""Reads epochs from the command line of ``spktrain``, and finds the results it prints."""

from __future__ import annotations

import os
from collections.abc import Sequence

from ace_plugins.adapter import Metric, Script

TRAIN = "spktrain"
OPTION = "trainer.max_epochs"
# A row of Lightning's table of test results has the name, the border of the cell and the number.
METRICS = tuple(
    Metric(name.replace("_", " "), f"test_{name}" + r"\W*[│\s]\s*{number}")
    for name in ("forces_mae", "energy_mae", "forces_rmse", "energy_rmse", "loss")
)


def script(argv: Sequence[str]) -> Script | None:
    """Return epochs and metrics of spktrain. Without an option for them, epochs come from Lightning's trainer."""
    if not argv or os.path.basename(argv[0]) != TRAIN:
        return None
    given = [value for word in argv[1:] for name, _, value in [word.partition("=")] if name.lstrip("+") == OPTION]
    if not given or not given[-1].isdecimal():
        return Script(metrics=METRICS)
    return Script(int(given[-1]), f"{TRAIN} {OPTION}", METRICS)
