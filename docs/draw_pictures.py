"""Draw the data of the tutorials: python docs/draw_pictures.py --mocap EGNO/motion/dataset/motion_run.pkl

Needs matplotlib, scikit-learn and the adapters c4, segnn and vn_dgcnn. `ace-patch demo schnet` and `ace-patch demo c4`
draw docs/demo_schnet.png and docs/pictures/c4.png.
"""

from __future__ import annotations

import argparse
import pickle
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from click.testing import CliRunner
from matplotlib.figure import Figure

PICTURES = Path(__file__).parent / "pictures"
INK, ACCENT = "#4c4c4c", "#d55e00"


def save(figure: Figure, name: str) -> None:
    figure.savefig(PICTURES / f"{name}.png", dpi=110)


def draw_mocap(path: Path) -> None:
    """Draw a running person six times, seen from the side, and the same scene upside down."""
    bones, trials = pickle.loads(path.read_bytes())
    trial = trials[0]
    figure = Figure(figsize=(10, 2.3), layout="constrained")
    for axes, sign, title in zip(figure.subplots(1, 2), (1, -1), ("recorded", "the same to EGNO"), strict=True):
        for frame in np.linspace(0, len(trial) - 1, 6).astype(int):
            for child, parent in bones:
                ends = trial[frame, [child, parent]]
                axes.plot(ends[:, 2], sign * ends[:, 1], color=INK, linewidth=1.6)
        axes.axhline(0, color=ACCENT, linewidth=2)
        axes.set_title(f"{title} ({'floor below' if sign > 0 else 'floor above'})")
        axes.set_aspect("equal")
        axes.axis("off")
    save(figure, "mocap")


def draw_digits() -> None:
    """Draw a 6 and a 9 of scikit-learn's digits, upright and upside down."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    six, nine = (digits.images[np.flatnonzero(digits.target == digit)[8]] for digit in (6, 9))
    shown = (("6", six), ("6, upside down", six[::-1, ::-1]), ("9", nine), ("9, upside down", nine[::-1, ::-1]))
    figure = Figure(figsize=(10, 2.9), layout="constrained")
    for axes, (title, image) in zip(figure.subplots(1, 4), shown, strict=True):
        axes.imshow(image, cmap="gray_r")
        axes.set_title(title)
        axes.axis("off")
    save(figure, "digits")


def draw_shapes() -> None:
    """Draw three synthetic shapes as they are written, and turned at random as by ``--rot so3``."""
    import torch

    from ace_plugins.adapter import SO3
    from ace_vn_dgcnn.data.shapes import DATASETS

    with tempfile.TemporaryDirectory() as folder:
        result = CliRunner().invoke(DATASETS["shapes"], ["--out", folder])
        assert result.exit_code == 0, result.output
        root = Path(folder)
        names = [line.split()[0] for line in (root / "modelnet40_shape_names.txt").read_text().splitlines()][2:5]
        clouds = [np.loadtxt(sorted((root / name).glob("*.txt"))[0], delimiter=",")[:, :3] for name in names]
    figure = Figure(figsize=(10, 6), layout="constrained")
    grid: Any = figure.subplots(2, 3, subplot_kw={"projection": "3d"})
    generator = torch.Generator().manual_seed(2)
    for column, (name, cloud) in enumerate(zip(names, clouds, strict=True)):
        turned = cloud @ SO3.sample(generator).matrix.numpy().T
        for row, points in enumerate((cloud, turned)):
            axes = grid[row, column]
            axes.scatter(*points.T, s=1.5, color=(INK, ACCENT)[row])
            axes.set_title(f"{name}, {('aligned', 'turned at random')[row]}", fontsize=10)
            size = np.abs(clouds[column]).max() * 1.1
            axes.set(xlim=(-size, size), ylim=(-size, size), zlim=(-size, size), box_aspect=(1, 1, 1))
            axes.set_axis_off()
    save(figure, "shapes")


def draw_nbody() -> None:
    """Draw the paths of five charged particles, and of the same particles in a turned frame."""
    from ace_segnn.data import nbody

    loc, vel, charges = nbody.draw_initial(1, np.random.RandomState(1))
    paths, _ = nbody.simulate(loc, vel, charges, steps=5000, every=50)
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    turn = np.array([[0.6, -0.8], [0.8, 0.6]])
    for axes, matrix, title in zip(
        figure.subplots(1, 2),
        (np.eye(2), turn),
        ("five charged particles", "the same, turned: also a solution"),
        strict=True,
    ):
        for particle in range(paths.shape[-1]):
            x, y = matrix @ paths[0, :, :2, particle].T
            colour = ACCENT if charges[0, particle, 0] > 0 else INK
            axes.plot(x, y, color=colour, linewidth=1.4)
            axes.plot(x[-1], y[-1], "o", color=colour, markersize=7)
        axes.set_title(title)
        axes.set_aspect("equal")
        axes.axis("off")
    save(figure, "nbody")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mocap", type=Path, help="motion_run.pkl of a clone of EGNO")
    options = parser.parse_args()
    PICTURES.mkdir(exist_ok=True)
    if options.mocap:
        draw_mocap(options.mocap)
    draw_digits()
    draw_shapes()
    draw_nbody()


if __name__ == "__main__":
    main()
