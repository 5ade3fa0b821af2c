"""What ``spktrain`` says of itself: how long it trains, where its command line tells, and how it prints its results."""

from __future__ import annotations

import os
from collections.abc import Sequence

from ace_plugins.adapter import Metric, Script

TRAIN = "spktrain"
OPTION = "trainer.max_epochs"

_NUMBER = r"([-+]?(?:[\d.]+(?:e[-+]?\d+)?|nan|inf))"
# Lightning's table of a test: the name, the border of the cell, the number. Validation is printed by the progress bar.
METRICS = tuple(
    Metric(name.replace("_", " "), rf"test_{name}\W*[│\s]\s*{_NUMBER}")
    for name in ("forces_mae", "energy_mae", "forces_rmse", "energy_rmse", "loss")
)


def script(argv: Sequence[str]) -> Script | None:
    """None if ``argv`` is of another command. What the command line does not say, Lightning's trainer will."""
    if not argv or os.path.basename(argv[0]) != TRAIN:
        return None
    said = [value for word in argv[1:] for name, _, value in [word.partition("=")] if name.lstrip("+") == OPTION]
    if not said or not said[-1].isdecimal():
        return Script(metrics=METRICS)
    return Script(int(said[-1]), f"{TRAIN} {OPTION}", METRICS)
