"""Draw docs/egno.png, the figure of the README, from the results in docs/evidence/egno.json.

python docs/draw_evidence.py
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
LABELS = {"off": "upstream", "auto": "with ACE, mode auto"}


def draw(results: list[dict[str, Any]], to: Path) -> None:
    """Draw the validation error over the epochs, one line for each run and seed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3.6), dpi=130)
    for run, colour in (("off", "#777777"), ("auto", "#0072b2")):
        for number, result in enumerate(each for each in results if each["run"] == run):
            epochs, errors = zip(*result["curves"]["validation"], strict=True)
            axes.plot(epochs, errors, color=colour, marker=".", label=LABELS[run] if number == 0 else None)
    axes.set_yscale("log")
    axes.set_xlabel("epoch")
    axes.set_ylabel("validation error (MSE)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    axes.set_title("EGNO, motion capture (run), three seeds", loc="left", fontsize=10)
    figure.tight_layout()
    figure.savefig(to)


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "egno.png"
    draw(json.loads((HERE / "evidence" / "egno.json").read_text())["results"], target)
