"""The command ``ace-patch data mocap``: BVH recordings in the format that EGNO's main_mocap_no.py reads.

EGNO reads a pickle of (edges, trials): pairs of joints that a bone connects, and for each trial an array
[frames, joints, 3]. Its loader splits the trials by their position in this list. If the file with the
chosen start frames does not exist, EGNO writes it.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from ace_plugins import adapter as ace

from . import bvh


@dataclass(frozen=True)
class Case:
    """A data set of EGNO, which the option ``--case`` of its script selects."""

    file: str
    trials: tuple[str, ...]
    """Recordings of CMU's database (subject_trial), in the order that EGNO's loader splits."""
    frames: int
    """Fewest frames of a trial: start frames are below 300 (walk) or 90 (run), targets 30 frames later, and one more
    frame gives the velocity."""


CASES = {
    # The order of the run data is that of the file in EGNO's repository. That of its walk data is not known.
    "run": Case("motion_run.pkl", tuple(f"09_{n:02}" for n in (6, 7, 11, 5, 4, 10, 1, 3, 2, 9, 8)), 121),
    "walk": Case("motion.pkl", tuple(f"35_{n:02}" for n in (*range(1, 17), *range(28, 35))), 331),
}
SKIPPED = {"09_10": 6}
"""First frames that EGNO's preprocessing leaves out."""


def convert(path: Path, skipped: int = 0) -> tuple[list[list[int]], bvh.Array]:
    """Return bones and positions of a recording: pairs (joint, parent), and [frames, joints, 3].

    The first frame of a recording in this conversion is a T-pose, which is left out. Joints at the same place as their
    parent are one node.
    """
    recording = bvh.read(path)
    nodes: list[int] = []
    """Index of the node of every joint."""
    kept: list[int] = []
    bones: list[list[int]] = []
    for number, joint in enumerate(recording.joints):
        if joint.parent >= 0 and not any(joint.offset):
            nodes.append(nodes[joint.parent])
            continue
        nodes.append(len(kept))
        if joint.parent >= 0:
            bones.append([len(kept), nodes[joint.parent]])
        kept.append(number)
    return bones, bvh.positions(recording)[1 + skipped :, kept]


def load(folder: Path, trials: Sequence[str], fewest: int) -> tuple[list[list[int]], list[bvh.Array]]:
    """Return the bones, and the positions in every trial.

    Raises:
        ConfigError: A recording is missing, too short, or has another skeleton than the first.
    """
    paths = [folder / f"{trial}.bvh" for trial in trials]
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        raise ace.ConfigError(
            f"bvh {str(folder)!r}: expected {len(paths)} recordings, found no {', '.join(missing)}; get the BVH "
            "conversion of CMU's motion capture database by B. Hahne"
        )
    first: list[list[int]] | None = None
    found: list[bvh.Array] = []
    for trial, path in zip(trials, paths, strict=True):
        bones, positions = convert(path, SKIPPED.get(trial, 0))
        first = bones if first is None else first
        if bones != first:
            raise ace.ConfigError(f"{path}: expected the skeleton of {paths[0].name}, found another one")
        if len(positions) < fewest:
            raise ace.ConfigError(f"{path}: expected at least {fewest} frames after the T-pose, found {len(positions)}")
        found.append(positions)
    return first or [], found


@click.command()
@click.option(
    "--bvh",
    "folder",
    required=True,
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder of the recordings: 35_01.bvh, 35_02.bvh, ...",
)
@click.option(
    "--out",
    required=True,
    type=click.Path(path_type=Path),
    help="Folder for the file, created if missing; upstream reads motion/dataset in its checkout.",
)
@click.option(
    "--case",
    type=click.Choice(list(CASES)),
    default="walk",
    show_default=True,
    help="Data set, as in upstream's option --case.",
)
@click.option(
    "--trials", help="Other recordings, separated by commas: 16_35,16_36,... Their number must be that of the case."
)
@click.option("--overwrite", is_flag=True, help="Replace an existing file.")
def mocap(folder: Path, out: Path, case: str, trials: str | None, overwrite: bool) -> None:
    """Convert CMU motion capture recordings (BVH) to the data that EGNO's main_mocap_no.py reads.

    Case walk has the 23 recordings of subject 35 that walk, case run the first 11 of subject 9. EGNO's repository has
    the data for run but not for walk. The skeleton has 28 joints and EGNO's has 31, because the BVH conversion lacks
    three bones: one of the spine, and one at each wrist.
    """
    chosen = CASES[case]
    names = tuple(trials.split(",")) if trials else chosen.trials
    if len(names) != len(chosen.trials):
        raise ace.ConfigError(
            f"trials: expected {len(chosen.trials)} recordings, as many as upstream's loader splits for {case}; "
            f"found {len(names)}"
        )
    path = out / chosen.file
    if path.exists() and not overwrite:
        raise ace.ConfigError(f"out: {path} exists; choose another folder, or replace it with --overwrite")
    bones, positions = load(folder, names, chosen.frames)
    out.mkdir(parents=True, exist_ok=True)
    ace.publish(path, pickle.dumps((bones, positions)))
    frames = [len(trial) for trial in positions]
    click.echo(
        f"wrote {path}: {len(positions)} trials of {min(frames)} to {max(frames)} frames, {len(bones) + 1} joints, "
        f"{len(bones)} bones"
    )


DATASETS = {"mocap": mocap}
