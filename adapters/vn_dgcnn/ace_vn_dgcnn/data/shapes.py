"""The command ``ace-patch data shapes``: solids of a dozen families in the text layout of ModelNet40.

ModelNet40 is a download of gigabytes. A few hundred solids, generated in seconds, show whether a script trains and how
it reacts to missing points. All shapes are upright, so upstream's ``--rot aligned`` and ``--rot z`` are meaningful.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click
import numpy as np

from ace_plugins import AceError
from ace_plugins.adapter import one_of, progress

from .solids import FAMILIES, Array

Progress = Callable[[int], None]

NAMES = "modelnet40_shape_names.txt"
INDEX = {"train": "modelnet40_train.txt", "test": "modelnet40_test.txt"}
RECORD = "shapes.json"
"""Settings of the data set. The file marks the folder as written by this command."""
DROP_SPLITS = {"train": ("train",), "test": ("test",), "both": ("train", "test")}
NEIGHBOURS = 20
"""Default of upstream's --n_knn. Upstream fails on clouds with fewer points."""
LINE = "%.6f,%.6f,%.6f,%.6f,%.6f,%.6f\n"


def shape(name: str, split: str, number: int, *, points: int, noise: float = 0.0, seed: int = 0) -> Array:
    """Return one shape [points, 6]: positions and normals.

    Each shape has its own random stream, so it does not depend on the other shapes or on dropped points. ``noise``
    moves the points, not the normals.
    """
    random = np.random.default_rng([seed, list(FAMILIES).index(name), list(INDEX).index(split), number])
    positions, normals = FAMILIES[name].sample(random, points)
    if noise:
        positions = positions + noise * random.standard_normal(positions.shape)
    return np.concatenate([positions, normals], axis=1)


def kept_of(points: int, drop: float) -> int:
    """Return the number of points that remain in every shape of a split.

    Upstream's loader reads the first ``--num_point`` lines of a file, or all lines of a shorter one, and stacks the
    shapes of a batch. So all shapes of a split must have the same length, which may be less than ``--num_point``.
    """
    if points < 1:
        raise AceError(f"points {points}: expected at least 1")
    if not 0 <= drop < 1:
        raise AceError(f"drop {drop}: expected a fraction from 0 up to, not including, 1")
    kept = round(points * (1 - drop))
    if kept < 1:
        raise AceError(f"drop {drop}: expected at least 1 of {points} points to remain, found 0")
    return kept


def ids_of(name: str, split: str, train: int, test: int) -> list[str]:
    """Return the ids of a class in a split, numbered like ModelNet40: from 1, training shapes first."""
    numbers = range(1, train + 1) if split == "train" else range(train + 1, train + test + 1)
    return [f"{name}_{number:04d}" for number in numbers]


def files_of(names: Sequence[str], train: int, test: int) -> list[str]:
    """Return all files of a data set, relative to its folder."""
    shapes = [f"{name}/{each}.txt" for name in names for split in INDEX for each in ids_of(name, split, train, test)]
    return [RECORD, NAMES, *INDEX.values(), *shapes]


def check(
    folder: Path,
    *,
    classes: int,
    train: int,
    test: int,
    points: int,
    noise: float,
    drop: float,
    drop_split: str,
    seed: int,
) -> None:
    """Raise an AceError if the data set cannot be generated. Writes nothing."""
    if not 1 <= classes <= len(FAMILIES):
        raise AceError(f"classes {classes}: expected 1 to {len(FAMILIES)} ({', '.join(FAMILIES)})")
    for part, count in (("train", train), ("test", test)):
        if count < 1:
            raise AceError(f"{part} {count}: expected at least 1 shape per class")
    kept_of(points, drop)
    if drop_split not in DROP_SPLITS:
        raise AceError(one_of("drop split", drop_split, DROP_SPLITS))
    if not 0 <= noise <= 1e3:
        raise AceError(f"noise {noise}: expected a standard deviation from 0 to 1000")
    if not 0 <= seed < 2**32:
        raise AceError(f"seed {seed}: expected 0 to {2**32 - 1}")
    nearest = next(each for each in (folder, *folder.absolute().parents) if os.path.lexists(each))
    if not nearest.is_dir():
        raise AceError(f"out {str(folder)!r}: expected a folder, but {str(nearest)!r} is not a folder")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise AceError(f"out {str(folder)!r}: expected a writable folder, but {str(nearest)!r} is not writable")
    foreign = _foreign(folder)
    if foreign is not None:
        raise AceError(
            f"out {str(folder)!r}: expected a new or empty folder, or one written by this command, found {foreign!r} "
            "in it; choose another folder, or move that file"
        )


def _read_record(folder: Path) -> set[str]:
    """Return the files and folders that this command has written into a folder, according to its record."""
    try:
        record = json.loads((folder / RECORD).read_text())
        names = [name for name in FAMILIES if name in record["classes"]]
        files = files_of(names, int(record["train"]), int(record["test"]))
    except (OSError, ValueError, TypeError, KeyError):
        return set()
    return {*files, *names}


def _foreign(folder: Path) -> str | None:
    """Return the first path in a folder that this command has not written; None if there is none."""
    if not folder.is_dir():
        return None
    ours = _read_record(folder)
    found = (path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*") if ours else folder.iterdir()))
    return next((path for path in found if path not in ours), None)


def generate(
    folder: str | Path,
    *,
    classes: int = 8,
    train: int = 40,
    test: int = 10,
    points: int = 1024,
    noise: float = 0.0,
    drop: float = 0.0,
    drop_split: str = "train",
    seed: int = 0,
    progress: Progress | None = None,
) -> list[Path]:
    """Write the data set into ``folder``, all of it or nothing, and return its files. Replaces an earlier data set.

    The points of a shape are in random order and are dropped from the end. So the first lines of a file are a uniform
    sample of the shape, and a smaller ``drop`` keeps all points that a larger one keeps.
    """
    folder = Path(folder)
    settings: dict[str, Any] = {"train": train, "test": test, "points": points, "noise": noise, "drop": drop}
    settings |= {"drop_split": drop_split, "seed": seed}
    check(folder, classes=classes, **settings)
    names = list(FAMILIES)[:classes]
    made = [each for each in (folder, *folder.absolute().parents) if not each.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=".shapes-", dir=folder) as inside:
            fresh, old = Path(inside) / "fresh", Path(inside) / "old"
            fresh.mkdir()
            old.mkdir()
            (fresh / RECORD).write_text(json.dumps({"classes": names, **settings}, indent=1) + "\n")
            _write(fresh, names, **settings, progress=progress)
            _publish(fresh, old, folder)
    except BaseException as error:
        for each in made:
            with suppress(OSError):  # not empty any more
                each.rmdir()
        if isinstance(error, OSError):
            raise AceError(f"out {str(folder)!r}: could not write the data set: {error}") from error
        raise
    return [folder / file for file in files_of(names, train, test)]


def _write(
    folder: Path,
    names: Sequence[str],
    *,
    train: int,
    test: int,
    points: int,
    noise: float,
    drop: float,
    drop_split: str,
    seed: int,
    progress: Progress | None,
) -> None:
    (folder / NAMES).write_text("".join(f"{name}\n" for name in names))
    for name in names:
        (folder / name).mkdir()
    for split, index in INDEX.items():
        kept = kept_of(points, drop if split in DROP_SPLITS[drop_split] else 0.0)
        ids = {name: ids_of(name, split, train, test) for name in names}
        for name, each in ids.items():
            for number, identity in enumerate(each):
                made = shape(name, split, number, points=points, noise=noise, seed=seed)[:kept]
                (folder / name / f"{identity}.txt").write_text(_text(made))
            if progress is not None:
                progress(len(each))
        (folder / index).write_text("".join(f"{identity}\n" for each in ids.values() for identity in each))


def _text(rows: Array) -> str:
    """Format all rows at once, which is several times faster than ``np.savetxt``. Adding 0 turns -0 into 0."""
    return LINE * len(rows) % tuple((rows.round(6) + 0.0).ravel().tolist())


def _publish(fresh: Path, old: Path, folder: Path) -> None:
    """Replace the old data set by the new one. If that fails halfway, undo every move, so that they do not mix."""
    ours = sorted(path for path in _read_record(folder) if "/" not in path and (folder / path).exists())
    moves = [(folder / name, old / name) for name in ours]
    moves += [(entry, folder / entry.name) for entry in sorted(fresh.iterdir())]
    begun: list[tuple[Path, Path]] = []
    try:
        for source, target in moves:
            begun.append((source, target))
            os.replace(source, target)
    except BaseException:
        for source, target in reversed(begun):
            if target.exists() and not source.exists():
                os.replace(target, source)
        raise


@click.command()
@click.option(
    "--out",
    required=True,
    type=click.Path(path_type=Path),
    help="Folder for the data, created if missing; upstream reads data/modelnet40_normal_resampled in its checkout.",
)
@click.option("--classes", default=8, show_default=True, help=f"Number of classes of shapes, up to {len(FAMILIES)}.")
@click.option("--train", default=40, show_default=True, help="Training shapes per class.")
@click.option("--test", default=10, show_default=True, help="Test shapes per class.")
@click.option(
    "--points",
    default=1024,
    show_default=True,
    help="Points per shape. Upstream's scripts read only the first --num_point points of a shape: if --drop leaves at "
    "least that many, it may have no effect.",
)
@click.option(
    "--noise",
    default=0.0,
    show_default=True,
    help="Standard deviation of noise on the points.",
)
@click.option("--drop", default=0.0, show_default=True, help="Fraction of points to drop from every shape.")
@click.option(
    "--drop-split",
    default="train",
    show_default=True,
    type=click.Choice(list(DROP_SPLITS)),
    help="Split to drop points from.",
)
@click.option("--seed", default=0, show_default=True, help="Seed of the shapes; they do not depend on what is dropped.")
def shapes(out: Path, **settings: Any) -> None:
    """Generate solids in the layout of ModelNet40: spheres, cones, tori, brackets and others, with normals.

    A substitute for the download, made in seconds. With --drop the training shapes have fewer points, as in the
    paper's robustness experiment (0 to 0.85). All shapes of a split keep the same number of points, since upstream's
    loader stacks them. Upstream's graphs need at least --n_knn points, 20 by default.
    """
    check(out, **settings)
    counts = {split: settings["classes"] * settings[split] for split in INDEX}
    with progress(sum(counts.values()), "shapes") as done:
        generate(out, **settings, progress=done)
    dropped = DROP_SPLITS[settings["drop_split"]]
    kept = {split: kept_of(settings["points"], settings["drop"] if split in dropped else 0.0) for split in INDEX}
    listed = ", ".join(f"{count:,} {split} of {kept[split]:,} points" for split, count in counts.items())
    click.echo(f"wrote {sum(counts.values()):,} shapes of {settings['classes']} classes to {out}: {listed}")
    if min(kept.values()) < NEIGHBOURS:
        click.echo(f"fewer than {NEIGHBOURS} points per shape: use a smaller --n_knn in upstream's scripts", err=True)


DATASETS = {"shapes": shapes}
