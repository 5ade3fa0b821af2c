"""Reads motion capture recordings in the BVH format, and computes the positions of their joints.

A BVH file has a tree of joints, each with the offset to its parent in the rest pose, and for every frame the rotation
of every joint (and the position of the root). Rotations are intrinsic, in the order of the joint's channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ace_plugins.adapter import ConfigError

Array = NDArray[np.float64]
AXES = {"X": 0, "Y": 1, "Z": 2}


@dataclass
class Joint:
    """A joint of the skeleton, or the end of a limb (``channels`` is empty)."""

    name: str
    parent: int
    """Index of the parent, -1 for the root."""
    offset: tuple[float, float, float]
    """Vector from the parent in the rest pose, in the units of the file."""
    channels: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Recording:
    """The skeleton and the channels of every frame."""

    joints: Sequence[Joint]
    """Parents come before their children."""
    frames: Array
    """[frames, channels], channels in the order of the joints; angles in degrees."""


def read(path: Path) -> Recording:
    """Read a BVH file.

    Raises:
        ConfigError: The file is not BVH, or its frames do not fit its skeleton.
    """
    try:
        head, _, tail = path.read_text(encoding="ascii").partition("MOTION")
        joints = _parse_skeleton(head.split())
        lines = tail.strip().splitlines()
        count = int(lines[0].removeprefix("Frames:"))
        frames = np.array(" ".join(lines[2:]).split(), dtype=np.float64).reshape(count, -1)
    except (ValueError, IndexError, KeyError) as error:
        raise ConfigError(
            f"{path}: expected a BVH file (HIERARCHY, then MOTION), found another format: {error}"
        ) from error
    channels = sum(len(joint.channels) for joint in joints)
    if frames.shape[1] != channels:
        raise ConfigError(f"{path}: expected {channels} numbers per frame for its joints, found {frames.shape[1]}")
    return Recording(joints, frames)


def _parse_skeleton(words: list[str]) -> list[Joint]:
    joints: list[Joint] = []
    above = [-1]
    """Indices of the joints whose braces are open."""
    place = words.index("ROOT")
    while place < len(words):
        word = words[place]
        if word in ("ROOT", "JOINT", "End"):
            parent = above[-1]
            name = f"{joints[parent].name} end" if word == "End" else words[place + 1]
            joints.append(Joint(name, parent, (0.0, 0.0, 0.0)))
            above.append(len(joints) - 1)
            place += 3  # the keyword, the name and the brace
        elif word == "OFFSET":
            x, y, z = map(float, words[place + 1 : place + 4])
            joints[above[-1]].offset = (x, y, z)
            place += 4
        elif word == "CHANNELS":
            count = int(words[place + 1])
            joints[above[-1]].channels = words[place + 2 : place + 2 + count]
            place += 2 + count
        elif word == "}":
            above.pop()
            place += 1
        else:
            raise ValueError(f"unknown word {word!r}")
    return joints


def positions(recording: Recording) -> Array:
    """Return the position of every joint in every frame, [frames, joints, 3], in the units of the file."""
    frames = recording.frames
    places = np.zeros((len(frames), len(recording.joints), 3))
    turns = np.zeros((len(frames), len(recording.joints), 3, 3))
    column = 0
    for number, joint in enumerate(recording.joints):
        if joint.parent >= 0:
            turn = turns[:, joint.parent]
            place = places[:, joint.parent] + turn @ np.array(joint.offset)
        else:
            turn, place = np.broadcast_to(np.eye(3), (len(frames), 3, 3)), np.tile(joint.offset, (len(frames), 1))
        for channel in joint.channels:
            axis, values = AXES[channel[0]], frames[:, column]
            if channel.endswith("position"):
                place[:, axis] += values
            else:
                turn = turn @ rotations(axis, np.deg2rad(values))
            column += 1
        places[:, number], turns[:, number] = place, turn
    return places


def rotations(axis: int, angles: Array) -> Array:
    """Return the rotations by the angles, in radians, about x (0), y (1) or z (2): [angles, 3, 3]."""
    one, two = (axis + 1) % 3, (axis + 2) % 3
    found = np.zeros((len(angles), 3, 3))
    found[:, axis, axis] = 1.0
    found[:, one, one] = found[:, two, two] = np.cos(angles)
    found[:, two, one] = np.sin(angles)
    found[:, one, two] = -found[:, two, one]
    return found
