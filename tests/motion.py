"""Motion capture for the miniature of EGNO: somebody made of sticks, running."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np

TRIALS = {"train": (1, 2, 5, 6, 10), "val": (0, 4, 9), "test": (3, 7, 8)}
STARTS, BEFORE = 8, 90
"""So many start frames of every trial, all before that one."""


def write_motion(folder: Path, *, joints: int = 6, frames: int = 130, seed: int = 0) -> None:
    """``motion_run.pkl`` and ``split_run.pkl``, as upstream pickles them: 11 trials of one skeleton.

    Upstream looks 30 frames ahead and takes velocities from the frame after: ``frames`` is 121 at least.
    """
    random = np.random.default_rng(seed)
    parents = [int(random.integers(joint)) for joint in range(1, joints)]
    bones = random.uniform((-1.0, -2.0, -0.3), (1.0, 0.5, 0.3), (joints, 3))  # of the first joint: none
    swing, lag = random.uniform(0.2, 0.6, joints), random.uniform(0.0, 2 * np.pi, joints)

    trials = []
    for _ in range(sum(map(len, TRIALS.values()))):
        stride, speed, start = random.uniform(25, 35), random.uniform(0.08, 0.12), random.uniform(0.0, 2 * np.pi)
        heading = random.uniform(0.0, 2 * np.pi)
        time = np.arange(frames)
        phase = start + 2 * np.pi * time / stride
        x = np.empty((frames, joints, 3))
        # Two bounces a stride, up against gravity and down again, on the way along z.
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
