"""The command ``ace-patch data nbody``: SEGNN's data set of charged particles, all trajectories at once.

A seed gives the same data set as upstream's generator, up to rounding errors, which close encounters amplify. Only
elementwise operations are used, so that the result does not depend on the block size or on the BLAS library.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray

from ace_plugins import AceError
from ace_plugins.adapter import progress

Array = NDArray[np.float64]
Progress = Callable[[int], None]

PARTICLES = 5
BOX = 5.0
SPEED = 0.5
DT = 0.001
MAX_FORCE = 0.1 / DT
STEPS = 5000
EVERY = 100

BLOCK = 1024
"""Trajectories integrated together: enough to hide NumPy's overhead, few enough to fit into the cache."""


@dataclass(frozen=True)
class Trajectories:
    """One split of the data set (training, validation or test), as arrays in the layout that upstream expects."""

    loc: Array
    """[n, frames, 3, particles]"""
    vel: Array
    """[n, frames, 3, particles], half a step behind ``loc``"""
    edges: Array
    """[n, particles, particles], products of the charges"""
    charges: Array
    """[n, particles, 1], -1 or 1"""


def frames_of(steps: int, every: int) -> int:
    """Return the number of saved frames: one per ``every`` steps, without the first and the last."""
    if every < 1 or steps % every or steps < 2 * every:
        raise AceError(f"steps {steps}: expected a multiple of every ({every}), at least {2 * every}")
    return steps // every - 1


def simulate(loc: Array, vel: Array, charges: Array, *, steps: int = STEPS, every: int = EVERY) -> tuple[Array, Array]:
    """Return positions and velocities [n, frames, 3, p] from initial ones [n, 3, p] and charges [n, p, 1]."""
    shape = (len(loc), frames_of(steps, every), *loc.shape[1:])
    locs, vels = np.empty(shape), np.empty(shape)
    for start in range(0, len(loc), BLOCK):
        part = slice(start, start + BLOCK)
        _integrate(loc[part], vel[part], charges[part], every, locs[part], vels[part])
    return locs, vels


def _integrate(loc: Array, vel: Array, charges: Array, every: int, locs: Array, vels: Array) -> None:
    """Integrate one block with leapfrog into ``locs`` and ``vels``. Trajectories are the last, contiguous axis."""
    count, _, particles = loc.shape
    loc, vel = (np.array(state.transpose(1, 2, 0), order="C") for state in (loc, vel))
    left, right = np.triu_indices(particles, 1)
    charge = charges[:, :, 0].T
    strength = np.ascontiguousarray(charge[left] * charge[right])
    pairs = np.empty((3, len(left), count))
    squares = np.empty_like(pairs)
    square, cube = np.empty_like(strength), np.empty_like(strength)
    force, moved = np.zeros_like(loc), np.empty_like(loc)
    # For each particle except the last: its index, the particles after it, and its pairs with them.
    starts = np.searchsorted(left, range(particles)).tolist()
    rows = [(i, slice(i + 1, None), slice(*ends)) for i, ends in enumerate(pairwise(starts))]
    separations = [(loc[:, i : i + 1], loc[:, after], pairs[:, row]) for i, after, row in rows]
    actions = [(pairs[:, row], force[:, i]) for i, _, row in rows]
    reactions = [(force[:, after], pairs[:, row]) for _, after, row in rows]

    for frame in range(locs.shape[1]):
        for _ in range(every):
            for one, others, between in separations:
                np.subtract(one, others, out=between)
            np.multiply(pairs, pairs, out=squares)
            np.add(squares[0], squares[1], out=square)
            np.add(square, squares[2], out=square)
            np.sqrt(square, out=cube)
            np.multiply(square, cube, out=cube)
            np.divide(strength, cube, out=cube)
            np.multiply(pairs, cube, out=pairs)
            force[:, -1] = 0.0
            for between, on_one in actions:
                np.add.reduce(between, axis=1, out=on_one)
            for on_others, between in reactions:
                np.subtract(on_others, between, out=on_others)
            np.minimum(force, MAX_FORCE, out=force)
            np.maximum(force, -MAX_FORCE, out=force)
            np.multiply(force, DT, out=force)
            np.add(vel, force, out=vel)
            np.multiply(vel, DT, out=moved)
            np.add(loc, moved, out=loc)
        locs[:, frame] = loc.transpose(2, 0, 1)
        vels[:, frame] = vel.transpose(2, 0, 1)


def draw_initial(
    count: int, random: np.random.RandomState, *, particles: int = PARTICLES, frames: int = STEPS // EVERY - 1
) -> tuple[Array, Array, Array]:
    """Draw positions and velocities [n, 3, p] and charges [n, p, 1] in upstream's order.

    Upstream draws noise for all frames of a trajectory and scales it by zero. Drawing it too keeps the random streams
    in step.
    """
    charges, normal = np.empty((count, particles, 1)), np.empty((count, 2, 3, particles))
    for place in range(count):
        charges[place] = random.choice((-1.0, 0.0, 1.0), size=(particles, 1), p=(0.5, 0.0, 0.5))
        normal[place] = random.standard_normal((2, 3, particles))
        random.standard_normal(2 * frames * 3 * particles)
    loc, vel = normal[:, 0] * (particles / 5.0) ** (1 / 3), normal[:, 1]
    vel = vel * SPEED / np.sqrt((vel**2).sum(axis=1, keepdims=True))
    for side in (1.0, -1.0):
        outside = side * loc > BOX
        loc[outside] = 2 * side * BOX - loc[outside]
        vel[outside] = -side * np.abs(vel[outside])
    return loc, vel, charges


def sample(
    count: int,
    random: np.random.RandomState,
    *,
    particles: int = PARTICLES,
    steps: int = STEPS,
    every: int = EVERY,
    progress: Progress | None = None,
) -> Trajectories:
    """Simulate the next ``count`` trajectories of a random stream.

    ``progress`` is called with the number of trajectories finished since the last call.
    """
    frames = frames_of(steps, every)
    locs, vels = (np.empty((count, frames, 3, particles)) for _ in range(2))
    charges = np.empty((count, particles, 1))
    for start in range(0, count, BLOCK):
        part = slice(start, min(start + BLOCK, count))
        size = part.stop - start
        loc, vel, charges[part] = draw_initial(size, random, particles=particles, frames=frames)
        locs[part], vels[part] = simulate(loc, vel, charges[part], steps=steps, every=every)
        if progress is not None:
            progress(size)
    return Trajectories(locs, vels, charges * charges.transpose(0, 2, 1), charges)


def check(
    out: Path, *, train: int, valid: int, test: int, seed: int, suffix: str, overwrite: bool, steps: int, every: int
) -> None:
    """Raise an AceError if the data set cannot be generated. Writes nothing."""
    for part, count in (("train", train), ("valid", valid), ("test", test)):
        if count < 1:
            raise AceError(f"{part} {count}: expected at least 1 trajectory")
    frames_of(steps, every)
    if not 0 <= seed < 2**32:
        raise AceError(f"seed {seed}: expected 0 to {2**32 - 1}")
    if set(suffix) & {"/", "\\", "\0"}:
        raise AceError(f"suffix {suffix!r}: expected the end of a file name, found a path")
    nearest = next(folder for folder in (out, *out.absolute().parents) if os.path.lexists(folder))
    if not nearest.is_dir():
        raise AceError(f"out {str(out)!r}: expected a folder, but {str(nearest)!r} is not a folder")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise AceError(f"out {str(out)!r}: expected a writable folder, but {str(nearest)!r} is not writable")
    for path in paths_of(out, suffix).values():
        if os.path.lexists(path) and not overwrite:
            raise AceError(f"{str(path)!r} exists already; choose another folder, or use --overwrite")
        if path.is_dir():
            raise AceError(f"{str(path)!r}: expected a file, found a folder")


def paths_of(out: Path, suffix: str) -> dict[tuple[str, str], Path]:
    """Return the file of every part and array, with the names that upstream expects."""
    return {
        (part, field.name): out / f"{field.name}_{part}_charged{PARTICLES}_initvel1{suffix}.npy"
        for part in ("train", "valid", "test")
        for field in fields(Trajectories)
    }


def generate(
    out: Path,
    *,
    train: int = 10000,
    valid: int = 2000,
    test: int = 2000,
    seed: int = 43,
    suffix: str = "small",
    steps: int = STEPS,
    every: int = EVERY,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> list[Path]:
    """Write the twelve files that upstream reads into ``out``, or none of them."""
    counts = {"train": train, "valid": valid, "test": test}
    check(out, **counts, seed=seed, suffix=suffix, overwrite=overwrite, steps=steps, every=every)
    random = np.random.RandomState(seed)
    paths = paths_of(out, suffix)
    try:
        out.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=".nbody-", dir=out) as folder:
            fresh = Path(folder)
            for part, count in counts.items():
                made = sample(count, random, steps=steps, every=every, progress=progress)
                for field in fields(made):
                    np.save(fresh / paths[part, field.name].name, getattr(made, field.name))
            _publish(fresh, list(paths.values()))
    except OSError as error:
        raise AceError(f"out {str(out)!r}: could not write the data set: {error}") from error
    return list(paths.values())


def _publish(fresh: Path, paths: list[Path]) -> None:
    """Move the files into place. If that fails halfway, remove those moved, so that old and new files do not mix."""
    try:
        for path in paths:
            os.replace(fresh / path.name, path)
    except BaseException:
        for path in paths:
            if not (fresh / path.name).exists():
                path.unlink(missing_ok=True)
        raise


@click.command()
@click.option(
    "--out",
    required=True,
    type=click.Path(path_type=Path),
    help="Folder for the files, created if missing; upstream reads nbody/dataset in its checkout.",
)
@click.option("--train", default=10000, show_default=True, help="Number of training trajectories.")
@click.option("--valid", default=2000, show_default=True, help="Number of validation trajectories.")
@click.option("--test", default=2000, show_default=True, help="Number of test trajectories.")
@click.option("--seed", default=43, show_default=True, help="Random seed, as in upstream's generator.")
@click.option("--suffix", default="small", show_default=True, help="Suffix of the file names that upstream reads.")
@click.option("--overwrite", is_flag=True, help="Replace existing files.")
def nbody(out: Path, **settings: Any) -> None:
    """Generate the data set of SEGNN's N-body experiment: simulations of five charged particles.

    Writes the same files as upstream's generate_dataset.py for the same seed and numbers, many times faster.
    """
    settings |= {"steps": STEPS, "every": EVERY}
    check(out, **settings)
    counts = {part: settings[part] for part in ("train", "valid", "test")}
    with progress(sum(counts.values()), "trajectories") as done:
        written = generate(out, **settings, progress=done)
    listed = ", ".join(f"{count:,} {part}" for part, count in counts.items())
    click.echo(
        f"wrote {len(written)} files to {out}: {listed} trajectories of {PARTICLES} charged particles, "
        f"{frames_of(STEPS, EVERY)} frames each"
    )


DATASETS = {"nbody": nbody}
