"""The demo's picture, like the paper's figure: one row per target, with f_eq, gamma f_neq and their sum."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .training import Run

COLUMNS = ("input", "target", "without ACE", "f_eq", "gamma f_neq", "f_eq + gamma f_neq")
COLOURS = ("#4c4c4c", "#d55e00")
"""Colours of the runs without and with ACE."""
LAYERS = ("#0072b2", "#009e73", "#cc79a7")


def draw(runs: Mapping[str, Sequence[tuple[Run, Run]]], path: Path) -> None:
    """Draw the runs into a file.

    ``runs`` has pairs of runs without and with ACE, one per seed, for each target. The images are of the first seed,
    the curves of all seeds.
    """
    from matplotlib.figure import Figure  # not pyplot, which has global state and may open windows
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(17, 2.0 * len(runs) + 0.7), layout="constrained")
    widths = [1.0] * len(COLUMNS) + [1.5, 1.5]
    grid = figure.subplots(len(runs), len(widths), squeeze=False, width_ratios=widths)
    for row, (target, pairs) in zip(grid, runs.items(), strict=True):
        _draw_images(row, *pairs[0])
        row[0].set_ylabel(f"square to\n{target}", fontsize=11)
        _draw_errors(row[-2], pairs)
        _draw_gammas(row[-1], [with_ace for _, with_ace in pairs])
    for axes, title in zip(grid[0], (*COLUMNS, "validation error", "gamma of every layer"), strict=True):
        axes.set_title(title, fontsize=10)
    for axes, name in zip(grid[-1][-2:], ("epoch", "step"), strict=True):
        axes.set_xlabel(name)
    for axes in grid[:, -2]:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    for column in (grid[:, -2], grid[:, -1]):
        column[0].legend(frameon=False, fontsize=8)
        limits = [value for axes in column for value in axes.get_ylim()]
        for axes in column:  # the same scale for all targets
            axes.set_ylim(min(limits), max(limits))
            axes.tick_params(labelsize=8)
            style_axes(axes)
    figure.savefig(path, dpi=110)


def _draw_images(row: Any, plain: Run, with_ace: Run) -> None:
    from .training import outputs

    images = plain.data.test
    without = outputs(plain)[1]
    f_eq, together = outputs(with_ace)
    shown = (images.inputs[0, 0], images.targets[0, 0], without, f_eq, together - f_eq, together)
    for axes, name, image in zip(row, COLUMNS, shown, strict=False):
        signed = name == "gamma f_neq"
        colours = {"cmap": "RdBu_r", "vmin": -1, "vmax": 1} if signed else {"cmap": "viridis", "vmin": 0, "vmax": 1}
        axes.imshow(image.numpy(), **colours)
        axes.set_xticks([])
        axes.set_yticks([])


def _draw_errors(axes: Any, pairs: Sequence[tuple[Run, Run]]) -> None:
    """Draw one line per seed, and the lowest possible error of equivariant models if it is not 0."""
    for number, pair in enumerate(pairs):
        for run, colour in zip(pair, COLOURS, strict=True):
            label = run.name if number == 0 else None
            axes.plot(range(1, len(run.curve) + 1), run.curve, color=colour, linewidth=1.3, alpha=0.8, label=label)
    floor = pairs[0][0].data.test.floor
    if floor > 0:
        axes.axhline(floor, color="0.6", linewidth=0.9, linestyle="--", zorder=0)
        place: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points", "ha": "right"}
        text = "best of any equivariant model"
        axes.annotate(text, (0.98, floor), xytext=(0, -9), fontsize=7, color="0.4", **place)
    if all(math.isfinite(value) and value > 0 for pair in pairs for run in pair for value in run.curve):
        from matplotlib.ticker import FuncFormatter, NullFormatter

        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())


def _draw_gammas(axes: Any, runs: Sequence[Run]) -> None:
    """Draw one line per seed and layer."""
    for number, run in enumerate(runs):
        steps = [step for step, _ in run.gammas]
        for layer, name in enumerate(run.gammas[0][1]):
            values = [gamma[name] for _, gamma in run.gammas]
            label = name if number == 0 else None
            colour = LAYERS[layer % len(LAYERS)]
            axes.plot(steps, values, color=colour, linewidth=1.2, alpha=0.8, label=label)
    axes.axhline(0.0, color="0.7", linewidth=0.8, zorder=0)


def style_axes(axes: Any) -> None:
    """Give axes a light grid, behind the data, and no frame at the top and on the right."""
    axes.grid(True, color="0.92")
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
