"""Synthetic motion capture data for the miniature of EGNO: a running stick figure."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np

TRIALS = {"train": (1, 2, 5, 6, 10), "val": (0, 4, 9), "test": (3, 7, 8)}
STARTS, BEFORE = 8, 90
"""Number of start frames per trial, and their upper limit."""


def write_motion(folder: Path, *, joints: int = 6, frames: int = 130, seed: int = 0) -> None:
    """Write ``motion_run.pkl`` and ``split_run.pkl`` in upstream's format: 11 trials of one skeleton.

    Upstream predicts 30 frames ahead and computes velocities from the next frame, so ``frames`` is at least 121.
    """
    random = np.random.default_rng(seed)
    parents = [int(random.integers(joint)) for joint in range(1, joints)]
    bones = random.uniform((-1.0, -2.0, -0.3), (1.0, 0.5, 0.3), (joints, 3))  # that of the first joint is not used
    swing, lag = random.uniform(0.2, 0.6, joints), random.uniform(0.0, 2 * np.pi, joints)

    trials = []
    for _ in range(sum(map(len, TRIALS.values()))):
        stride, speed, start = random.uniform(25, 35), random.uniform(0.08, 0.12), random.uniform(0.0, 2 * np.pi)
        heading = random.uniform(0.0, 2 * np.pi)
        time = np.arange(frames)
        phase = start + 2 * np.pi * time / stride
        x = np.empty((frames, joints, 3))
        # Two bounces per stride while moving along z.
        x[:, 0] = np.stack((0.1 * np.sin(phase), 8.0 + 0.25 * (1 - np.cos(2 * phase)), speed * time), axis=1)
        for joint, parent in enumerate(parents, start=1):
            angle = swing[joint] * np.sin(phase + lag[joint])
            side, up, ahead = bones[joint]
            bone = (np.full(frames, side), up * np.cos(angle) - ahead * np.sin(angle))
            x[:, joint] = x[:, parent] + np.stack((*bone, up * np.sin(angle) + ahead * np.cos(angle)), axis=1)
        cos, sin = np.cos(heading), np.sin(heading)
        trials.append(x @ np.array([[cos, 0.0, -sin], [0.0, 1.0, 0.0], [sin, 0.0, cos]]))  # about the upright axis

    edges = [[parent, joint] for joint, parent in enumerate(parents, start=1)]
    split = tuple({trial: random.permutation(BEFORE)[:STARTS] for trial in part} for part in TRIALS.values())
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "motion_run.pkl").write_bytes(pickle.dumps((edges, trials)))
    (folder / "split_run.pkl").write_bytes(pickle.dumps(split))
