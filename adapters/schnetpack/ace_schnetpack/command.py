"""Reads epochs from the command line of ``spktrain``, and finds the results it prints."""

from __future__ import annotations

import os
from collections.abc import Sequence

from ace_plugins.adapter import Metric, Script

TRAIN = "spktrain"
OPTION = "trainer.max_epochs"
# Lightning's table of test results: the name, the border of the cell, the number.
METRICS = tuple(
    Metric(name.replace("_", " "), f"test_{name}" + r"\W*[│\s]\s*{number}")
    for name in ("forces_mae", "energy_mae", "forces_rmse", "energy_rmse", "loss")
)


def script(argv: Sequence[str]) -> Script | None:
    """Return the facts about spktrain. Without the option, Lightning's trainer has the number of epochs."""
    if not argv or os.path.basename(argv[0]) != TRAIN:
        return None
    given = [value for word in argv[1:] for name, _, value in [word.partition("=")] if name.lstrip("+") == OPTION]
    if not given or not given[-1].isdecimal():
        return Script(metrics=METRICS)
    return Script(int(given[-1]), f"{TRAIN} {OPTION}", METRICS)
