"""The demo's picture, as the paper's figure: a row for each target, with f_eq, gamma f_neq and their sum."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .training import Run

COLUMNS = ("input", "target", "without ACE", "f_eq", "gamma f_neq", "f_eq + gamma f_neq")
COLOURS = ("#4c4c4c", "#d55e00")
"""Without and with ACE."""
LAYERS = ("#0072b2", "#009e73", "#cc79a7")


def draw(runs: Mapping[str, Sequence[tuple[Run, Run]]], path: Path) -> None:
    """``runs`` has for each target, seed by seed, the run without and the one with ACE. The images are of the first
    seed, the curves of all. Without pyplot, so that no window system and no global state take part."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(17, 2.0 * len(runs) + 0.7), layout="constrained")
    FigureCanvasAgg(figure)
    widths = [1.0] * len(COLUMNS) + [1.5, 1.5]
    grid = figure.subplots(len(runs), len(widths), squeeze=False, width_ratios=widths)
    for row, (target, pairs) in zip(grid, runs.items(), strict=True):
        _images(row, *pairs[0])
        row[0].set_ylabel(f"square to\n{target}", fontsize=11)
        _errors(row[-2], pairs)
        _gammas(row[-1], [with_ace for _, with_ace in pairs])
    for axis, title in zip(grid[0], (*COLUMNS, "validation error", "gamma of every layer"), strict=True):
        axis.set_title(title, fontsize=10)
    for axis, name in zip(grid[-1][-2:], ("epoch", "step"), strict=True):
        axis.set_xlabel(name)
    for axis in grid[:, -2]:
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    grid[0][-2].legend(frameon=False, fontsize=8)
    grid[0][-1].legend(frameon=False, fontsize=8)
    for column in (grid[:, -2], grid[:, -1]):  # one scale for all targets
        limits = [value for axis in column for value in axis.get_ylim()]
        for axis in column:
            axis.set_ylim(min(limits), max(limits))
    figure.savefig(path, dpi=110)


def _images(row: Any, plain: Run, with_ace: Run) -> None:
    from .training import outputs

    images = plain.data.test
    without = outputs(plain)[1]
    f_eq, together = outputs(with_ace)
    shown = (images.inputs[0, 0], images.targets[0, 0], without, f_eq, together - f_eq, together)
    for axis, name, image in zip(row, COLUMNS, shown, strict=False):
        added = name == "gamma f_neq"
        # What is added has both signs: red adds, blue takes away. The rest has one scale.
        colours = {"cmap": "RdBu_r", "vmin": -1, "vmax": 1} if added else {"cmap": "viridis", "vmin": 0, "vmax": 1}
        axis.imshow(image.numpy(), **colours)
        axis.set_xticks([])
        axis.set_yticks([])


def _errors(axis: Any, pairs: Sequence[tuple[Run, Run]]) -> None:
    """Each seed a line, and the floor of equivariant models where there is one."""
    for number, pair in enumerate(pairs):
        for run, colour in zip(pair, COLOURS, strict=True):
            label = run.name if number == 0 else None
            axis.plot(range(1, len(run.curve) + 1), run.curve, color=colour, linewidth=1.3, alpha=0.8, label=label)
    floor = pairs[0][0].data.test.floor
    if floor > 0:
        axis.axhline(floor, color="0.6", linewidth=0.9, linestyle="--", zorder=0)
        place: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points", "ha": "right"}
        words = "best of any equivariant model"
        axis.annotate(words, (0.98, floor), xytext=(0, -9), fontsize=7, color="0.4", **place)
    if all(math.isfinite(value) and value > 0 for pair in pairs for run in pair for value in run.curve):
        from matplotlib.ticker import FuncFormatter, NullFormatter

        axis.set_yscale("log")
        axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.yaxis.set_minor_formatter(NullFormatter())
    _dress(axis)


def _gammas(axis: Any, runs: Sequence[Run]) -> None:
    """Each seed and layer a line."""
    for number, run in enumerate(runs):
        steps = [step for step, _ in run.gammas]
        for layer, site in enumerate(run.ace.sites):
            values = [gamma[layer] for _, gamma in run.gammas]
            label = site.name if number == 0 else None
            colour = LAYERS[layer % len(LAYERS)]
            axis.plot(steps, values, color=colour, linewidth=1.2, alpha=0.8, label=label)
    axis.axhline(0.0, color="0.7", linewidth=0.8, zorder=0)
    _dress(axis)


def _dress(axis: Any) -> None:
    axis.grid(True, color="0.92")
    axis.set_axisbelow(True)
    axis.tick_params(labelsize=8)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
