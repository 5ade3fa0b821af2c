"""Motion capture recordings for EGNO: forward kinematics, the converted files, and upstream's own loader."""

from __future__ import annotations

import importlib.util
import math
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st

from ace_egno.data import bvh, mocap
from ace_plugins.adapter import ConfigError

REAL = os.environ.get("ACE_UPSTREAM_EGNO", "")
RECORDINGS = os.environ.get("ACE_UPSTREAM_BVH", "")
angles = st.floats(-180, 180)


def chain(lengths: list[float]) -> list[bvh.Joint]:
    """Return a chain along x whose joints turn about z. The last one has no channels."""
    root = [bvh.Joint("root", -1, (0.0, 0.0, 0.0), ["Xposition", "Yposition", "Zposition", "Zrotation"])]
    limbs = [bvh.Joint(str(n), n, (length, 0.0, 0.0), ["Zrotation"]) for n, length in enumerate(lengths)]
    limbs[-1].channels = []
    return root + limbs


@given(st.lists(angles, min_size=3, max_size=3), st.lists(st.floats(-9, 9), min_size=3, max_size=3))
@settings(deadline=None, max_examples=50)
def test_a_chain_in_the_plane_is_a_sum_of_polar_vectors(turns: list[float], start: list[float]) -> None:
    lengths = [2.0, 1.0, 0.5]
    found = bvh.positions(bvh.Recording(chain(lengths), np.array([[*start, *turns]])))[0]
    x, y, total = start[0], start[1], 0.0
    expected = [(x, y, start[2])]
    for length, turn in zip(lengths, turns, strict=True):
        total += math.radians(turn)
        x, y = x + length * math.cos(total), y + length * math.sin(total)
        expected.append((x, y, start[2]))
    np.testing.assert_allclose(found, expected, atol=1e-9)


def turn(vector: Any, axis: Any, degrees: float) -> Any:
    """Rotate a vector about a unit vector, by Rodrigues' formula."""
    angle, axis = math.radians(degrees), np.array(axis, dtype=float)
    along = axis * (axis @ vector)
    return along + math.cos(angle) * (vector - along) + math.sin(angle) * np.cross(axis, vector)


@given(angles, angles, angles)
@settings(deadline=None, max_examples=50)
def test_channels_are_intrinsic_rotations_in_their_order(first: float, second: float, third: float) -> None:
    """Intrinsic rotations about z, y, x turn a vector about the fixed axes x, y, z, one after the other."""
    offset = (0.3, -1.2, 2.0)
    joints = [
        bvh.Joint("root", -1, (0.0, 0.0, 0.0), ["Zrotation", "Yrotation", "Xrotation"]),
        bvh.Joint("end", 0, offset),
    ]
    found = bvh.positions(bvh.Recording(joints, np.array([[first, second, third]])))[0, 1]
    expected = turn(turn(turn(np.array(offset), (1, 0, 0), third), (0, 1, 0), second), (0, 0, 1), first)
    np.testing.assert_allclose(found, expected, atol=1e-9)


SKELETON = """HIERARCHY
ROOT Hips
{
  OFFSET 0 0 0
  CHANNELS 6 Xposition Yposition Zposition Zrotation Yrotation Xrotation
  JOINT Hip
  {
    OFFSET 0 0 0
    CHANNELS 3 Zrotation Yrotation Xrotation
    JOINT Leg
    {
      OFFSET 0 -2 0
      CHANNELS 3 Zrotation Yrotation Xrotation
      End Site
      {
        OFFSET 0 -1 0
      }
    }
  }
  JOINT Head
  {
    OFFSET 0 1.5 0
    CHANNELS 3 Zrotation Yrotation Xrotation
  }
}
MOTION
"""


def write(path: Path, frames: int, seed: int = 0, skeleton: str = SKELETON) -> None:
    """Write a recording: a T-pose, then ``frames`` random ones. Frame n is at x = n."""
    random = np.random.default_rng(seed)
    rows = np.concatenate([np.arange(frames + 1)[:, None], random.uniform(-90, 90, (frames + 1, 14))], 1)
    rows[0] = 0.0
    lines = "\n".join(" ".join(f"{value:.4f}" for value in row) for row in rows)
    path.write_text(f"{skeleton}Frames: {frames + 1}\nFrame Time: .0083333\n{lines}\n")


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(mocap.mocap, [str(argument) for argument in arguments])


@pytest.fixture
def recordings(tmp_path: Path) -> Path:
    folder = tmp_path / "bvh"
    folder.mkdir()
    for case in mocap.CASES.values():
        for seed, trial in enumerate(case.trials):
            write(folder / f"{trial}.bvh", case.frames + seed + mocap.SKIPPED.get(trial, 0), seed)
    return folder


def test_joints_without_a_bone_are_merged_and_the_first_frames_left_out(tmp_path: Path) -> None:
    write(tmp_path / "a.bvh", 5)
    bones, positions = mocap.convert(tmp_path / "a.bvh", skipped=2)
    assert bones == [[1, 0], [2, 1], [3, 0]]  # leg, its end, head; the hip is at the same place as the root
    assert positions.shape == (3, 4, 3)
    assert positions[:, 0, 0].tolist() == [3.0, 4.0, 5.0]
    lengths = [np.linalg.norm(positions[:, child] - positions[:, parent], axis=1) for child, parent in bones]
    np.testing.assert_allclose(np.stack(lengths, 1), np.broadcast_to([2.0, 1.0, 1.5], (3, 3)), atol=1e-6)


@pytest.mark.parametrize("case", mocap.CASES)
def test_the_file_is_what_upstream_reads(case: str, recordings: Path, tmp_path: Path) -> None:
    result = run("--bvh", recordings, "--out", tmp_path / "new" / "folder", "--case", case)
    assert result.exception is None
    about = mocap.CASES[case]
    bones, trials = pickle.loads((tmp_path / "new" / "folder" / about.file).read_bytes())
    assert len(bones) == 3
    assert [len(trial) for trial in trials] == [about.frames + n for n in range(len(about.trials))]
    assert {trial.shape[1:] for trial in trials} == {(4, 3)}
    assert f"{len(trials)} trials" in result.stdout


@pytest.mark.skipif(not REAL, reason="ACE_UPSTREAM_EGNO is not set")
@pytest.mark.parametrize("case", mocap.CASES)
def test_upstreams_loader_reads_the_file(case: str, recordings: Path, tmp_path: Path) -> None:
    run("--bvh", recordings, "--out", tmp_path / "data", "--case", case)
    spec = importlib.util.spec_from_file_location("upstream_motion", Path(REAL) / "motion" / "dataset.py")
    assert spec is not None
    assert spec.loader is not None
    upstream = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(upstream)
    _, trials = pickle.loads((tmp_path / "data" / mocap.CASES[case].file).read_bytes())
    for part in ("train", "val", "test"):
        loaded = upstream.MotionDynamicsDataset(part, 60, 30, str(tmp_path / "data"), case=case, num_timesteps=5)
        x, v, edges, _, _, _, height, later, _ = loaded[0]
        assert x.shape == v.shape == (4, 3)
        frame = round(float(x[0, 0])) - 1  # the root of frame n is at x = n; the T-pose is left out
        trial = next(t for t in trials if len(t) > frame and np.allclose(t[frame], x, atol=1e-4))
        np.testing.assert_allclose(v, trial[frame + 1] - trial[frame], atol=1e-4)
        np.testing.assert_allclose(later[:, -1], trial[frame + 30], atol=1e-4)
        np.testing.assert_allclose(height[:, 0], x[:, 1] / 10, atol=1e-6)
        assert edges.max() == 3


@pytest.mark.skipif(not (REAL and RECORDINGS), reason="ACE_UPSTREAM_EGNO or ACE_UPSTREAM_BVH is not set")
def test_the_run_data_agrees_with_upstreams_own_where_joints_correspond() -> None:
    """The BVH conversion lacks the bone below the neck and those of the hands; all others are the same."""
    bones, theirs = pickle.loads((Path(REAL) / "motion" / "dataset" / "motion_run.pkl").read_bytes())
    missing = (13, 20, 27)
    same = [joint for joint in range(31) if joint not in missing]
    number = {joint: place for place, joint in enumerate(same)} | {joint: same.index(joint - 1) for joint in missing}
    case = mocap.CASES["run"]
    ours_bones, ours = mocap.load(Path(RECORDINGS), case.trials, case.frames)
    assert ours_bones == [[number[a], number[b]] for a, b in bones if a not in missing]
    for mine, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(
            mine[:, :13], other[:, :13], atol=2e-4
        )  # root, legs and spine: the places themselves
        for joint, parent in bones:
            if joint not in missing:
                bone = mine[:, number[joint]] - mine[:, number[parent]]
                np.testing.assert_allclose(bone, other[:, joint] - other[:, parent], atol=2e-4)


def test_an_existing_file_is_kept(recordings: Path, tmp_path: Path) -> None:
    path = tmp_path / "motion.pkl"
    path.write_bytes(b"precious")
    with pytest.raises(ConfigError, match="--overwrite"):
        raise run("--bvh", recordings, "--out", tmp_path).exception or AssertionError
    assert path.read_bytes() == b"precious"
    assert run("--bvh", recordings, "--out", tmp_path, "--overwrite").exception is None
    assert path.read_bytes() != b"precious"


def test_other_recordings(recordings: Path, tmp_path: Path) -> None:
    names = [f"16_{n:02}" for n in range(11)]
    for name in names:
        write(recordings / f"{name}.bvh", 125)
    assert run("--bvh", recordings, "--out", tmp_path, "--case", "run", "--trials", ",".join(names)).exception is None
    _, trials = pickle.loads((tmp_path / "motion_run.pkl").read_bytes())
    assert {len(trial) for trial in trials} == {125}
    with pytest.raises(ConfigError, match=r"trials.*expected 11.*found 2"):
        raise (
            run("--bvh", recordings, "--out", tmp_path / "x", "--case", "run", "--trials", "a,b").exception or KeyError
        )


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.unlink(), r"found no 35_02\.bvh"),
        (lambda path: write(path, 200), r"35_02\.bvh.*at least 331 frames.*found 200"),
        (lambda path: path.write_text("nothing"), "expected a BVH file"),
        (lambda path: path.write_text(SKELETON + "Frames: 1\nFrame Time: 1\n0 0\n"), "expected 15 numbers.*found 2"),
        (lambda path: write(path, 340, skeleton=SKELETON.replace("0 1.5 0", "0 0 0")), "skeleton of 35_01"),
    ],
)
def test_recordings_that_cannot_be_used(damage: Any, message: str, recordings: Path, tmp_path: Path) -> None:
    damage(recordings / "35_02.bvh")
    with pytest.raises(ConfigError, match=message):
        raise run("--bvh", recordings, "--out", tmp_path / "out").exception or AssertionError
    assert not (tmp_path / "out").exists()
