"""``ace-patch data nbody``: the charged N-body data set of SEGNN, all trajectories at once.

A seed gives the data set that upstream's own generator gives for it, up to rounding, which close encounters
amplify. Only elementwise operations are used, so that neither the block size nor a BLAS changes a bit of it.
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
"""Trajectories integrated together: enough to hide NumPy's overhead, few enough to stay in the cache."""


@dataclass(frozen=True)
class Trajectories:
    """One part of the data set, laid out as upstream saves it."""

    loc: Array
    """[n, frames, 3, particles]"""
    vel: Array
    """[n, frames, 3, particles], half a step behind ``loc``"""
    edges: Array
    """[n, particles, particles]: the products of the charges"""
    charges: Array
    """[n, particles, 1]: -1 or 1"""


def frames_of(steps: int, every: int) -> int:
    """How many frames are kept: one every so many steps, neither at the start nor at the end."""
    if every < 1 or steps % every or steps < 2 * every:
        raise AceError(f"steps {steps}: expected a multiple of every {every}, at least twice it")
    return steps // every - 1


def simulate(loc: Array, vel: Array, charges: Array, *, steps: int = STEPS, every: int = EVERY) -> tuple[Array, Array]:
    """Positions and velocities [n, frames, 3, p] from those at the start [n, 3, p] and charges [n, p, 1]."""
    shape = (len(loc), frames_of(steps, every), *loc.shape[1:])
    locs, vels = np.empty(shape), np.empty(shape)
    for start in range(0, len(loc), BLOCK):
        part = slice(start, start + BLOCK)
        _integrate(loc[part], vel[part], charges[part], every, locs[part], vels[part])
    return locs, vels


def _integrate(loc: Array, vel: Array, charges: Array, every: int, locs: Array, vels: Array) -> None:
    """Leapfrog for one block, into ``locs`` and ``vels``; the trajectories are the last, contiguous axis."""
    count, _, particles = loc.shape
    loc, vel = (np.array(state.transpose(1, 2, 0), order="C") for state in (loc, vel))
    left, right = np.triu_indices(particles, 1)
    charge = charges[:, :, 0].T
    strength = np.ascontiguousarray(charge[left] * charge[right])
    pairs = np.empty((3, len(left), count))
    squares = np.empty_like(pairs)
    square, cube = np.empty_like(strength), np.empty_like(strength)
    force, moved = np.zeros_like(loc), np.empty_like(loc)
    # One row for each particle but the last: itself, the particles after it, and its pairs with them.
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


def initial(
    count: int, random: np.random.RandomState, *, particles: int = PARTICLES, frames: int = STEPS // EVERY - 1
) -> tuple[Array, Array, Array]:
    """Positions and velocities [n, 3, p] and charges [n, p, 1], drawn trajectory by trajectory like upstream.

    Upstream ends a trajectory with noise for all frames, of variance zero; drawing it keeps the stream in step.
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
    """The next ``count`` trajectories of a random stream; ``progress`` is told how many more are done."""
    frames = frames_of(steps, every)
    locs, vels = (np.empty((count, frames, 3, particles)) for _ in range(2))
    charges = np.empty((count, particles, 1))
    for start in range(0, count, BLOCK):
        part = slice(start, min(start + BLOCK, count))
        size = part.stop - start
        loc, vel, charges[part] = initial(size, random, particles=particles, frames=frames)
        locs[part], vels[part] = simulate(loc, vel, charges[part], steps=steps, every=every)
        if progress is not None:
            progress(size)
    return Trajectories(locs, vels, charges * charges.transpose(0, 2, 1), charges)


def check(
    out: Path, *, train: int, valid: int, test: int, seed: int, suffix: str, overwrite: bool, steps: int, every: int
) -> None:
    """Everything that can be wrong with a data set to be generated; nothing is written."""
    for part, count in (("train", train), ("valid", valid), ("test", test)):
        if count < 1:
            raise AceError(f"{part} {count}: expected at least 1 trajectory")
    frames_of(steps, every)
    if not 0 <= seed < 2**32:
        raise AceError(f"seed {seed}: expected 0 to {2**32 - 1}")
    if set(suffix) & {"/", "\\", "\0"}:
        raise AceError(f"suffix {suffix!r}: expected the end of a file's name, found a path")
    nearest = next(folder for folder in (out, *out.absolute().parents) if os.path.lexists(folder))
    if not nearest.is_dir():
        raise AceError(f"out {str(out)!r}: expected a folder, found that {str(nearest)!r} is none")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise AceError(f"out {str(out)!r}: expected a folder to write to, {str(nearest)!r} is not writable")
    for path in paths_of(out, suffix).values():
        if os.path.lexists(path) and not overwrite:
            raise AceError(f"{str(path)!r} exists already: choose another folder, or --overwrite")
        if path.is_dir():
            raise AceError(f"{str(path)!r}: expected a file to overwrite, found a folder")


def paths_of(out: Path, suffix: str) -> dict[tuple[str, str], Path]:
    """The file of every part and array, named as upstream reads it."""
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
    """Write the twelve files that upstream reads into ``out``: all of them or none."""
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
    """Move the files to where they belong. Stopped halfway, those moved go again: old and new must not mix."""
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
    help="Folder for the files, made if missing; upstream reads nbody/dataset in its checkout.",
)
@click.option("--train", default=10000, show_default=True, help="Trajectories to train on.")
@click.option("--valid", default=2000, show_default=True, help="Trajectories to validate on.")
@click.option("--test", default=2000, show_default=True, help="Trajectories to test on.")
@click.option("--seed", default=43, show_default=True, help="The same as upstream's: the same data set.")
@click.option("--suffix", default="small", show_default=True, help="End of the files' names, as upstream expects it.")
@click.option("--overwrite", is_flag=True, help="Replace files that exist.")
def nbody(out: Path, **settings: Any) -> None:
    """The data set of SEGNN's N-body experiment: five charged particles, simulated.

    Writes what upstream's generate_dataset.py writes for the same seed and numbers, in a small part of the time.
    """
    settings |= {"steps": STEPS, "every": EVERY}
    check(out, **settings)
    counts = {part: settings[part] for part in ("train", "valid", "test")}
    with progress(sum(counts.values()), "trajectories") as done:
        written = generate(out, **settings, progress=done)
    told = ", ".join(f"{count:,} {part}" for part, count in counts.items())
    click.echo(
        f"wrote {len(written)} files to {out}: {told} trajectories of {PARTICLES} charged particles, "
        f"{frames_of(STEPS, EVERY)} frames each"
    )
