"""Draw docs/evidence.png, one row per comparison in docs/evidence/. Needs matplotlib.

    python docs/draw_evidence.py

The picture's metadata hold the numbers that it shows, so that a test can compare them with the files.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from write_evidence import DOCS, ratios, read

from ace_plugins.statistics import t_interval

PICTURE = DOCS / "evidence.png"
COLORS = {"broken": "#d55e00", "symmetric": "#0072b2"}


def rows() -> list[dict[str, Any]]:
    """Return title, truth, and the ratios auto / upstream by seed of each comparison, those on broken data first."""
    found = [
        {"title": one["title"], "truth": one["truth"], "ratios": [round(r, 4) for r in ratios(one, "auto")]}
        for one in read()
    ]
    return sorted(found, key=lambda row: (row["truth"], sum(map(math.log, row["ratios"])) / len(row["ratios"])))


def draw(path: Path) -> None:
    """Draw the picture: a dot for each seed, the geometric mean, and its 95 % interval."""
    import matplotlib.pyplot as plt

    found = rows()
    figure, axes = plt.subplots(figsize=(9, 0.3 * len(found) + 1.2))
    for place, row in enumerate(reversed(found)):
        logs, color = [math.log(ratio) for ratio in row["ratios"]], COLORS[row["truth"]]
        mean = math.exp(sum(logs) / len(logs))
        if len(logs) > 1:
            low, high = map(math.exp, t_interval(logs))
            axes.plot([max(low, 0.015), min(high, 3)], [place, place], color=color, linewidth=2, alpha=0.5)
        axes.plot(row["ratios"], [place] * len(logs), "o", color=color, markersize=3.5, alpha=0.45)
        axes.plot([mean], [place], "D", color=color, markersize=6)
    axes.axvline(1, color="0.4", linewidth=1)
    axes.set_xscale("log")
    axes.set_xlim(0.015, 3)
    ticks = (0.02, 0.05, 0.1, 0.2, 0.5, 1, 2)
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_yticks(range(len(found)), [row["title"] for row in reversed(found)], fontsize=8)
    axes.set_ylim(-0.6, len(found) - 0.4)
    axes.set_xlabel("test error with ACE (mode auto) / without ACE")
    for truth, text in (("broken", "data break the symmetry"), ("symmetric", "data have the symmetry")):
        axes.plot([], [], "D", color=COLORS[truth], label=text)
    axes.legend(loc="lower left", fontsize=8, frameon=False)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    figure.tight_layout()
    figure.savefig(path, dpi=130, metadata={"Software": None, "Description": json.dumps(found)})


if __name__ == "__main__":
    draw(PICTURE)
