"""The shapes, compared with closed forms of their surfaces, and the data set as upstream's loader reads it."""

from __future__ import annotations

import io
import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from ace_plugins.errors import AceError
from ace_vn_dgcnn.data import shapes, solids

Array = NDArray[np.float64]

MANY = 200_000
SMALL: dict[str, Any] = {"classes": 3, "train": 2, "test": 1, "points": 40}


def generator(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def read(folder: Path, split: str, npoint: int = 1024) -> list[tuple[str, int, Array, Array]]:
    """Read a split like upstream: id, label, the first points and their normals."""
    names = (folder / "modelnet40_shape_names.txt").read_text().split()
    found = []
    for identity in (folder / f"modelnet40_{split}.txt").read_text().split():
        name = "_".join(identity.split("_")[:-1])
        lines = (folder / name / f"{identity}.txt").read_text().splitlines()
        rows = np.array([[float(number) for number in line.split(",")] for line in lines][:npoint])
        assert rows.shape[1] == 6
        found.append((identity, names.index(name), rows[:, :3], rows[:, 3:]))
    return found


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def prism(base: float, outline: float, height: float) -> tuple[float, float]:
    """Return volume and area of a prism from those of its base."""
    return base * height, 2 * base + outline * height


def helix_length(rise: float, turns: float) -> float:
    return turns * math.hypot(2 * math.pi, rise)


TETRAHEDRON_SIDE = math.sqrt(3) / 2 * math.hypot(1.4, 0.5)
CLOSED_FORMS: dict[str, tuple[dict[str, float], tuple[float, float] | None]] = {
    "sphere": ({}, (4 / 3 * math.pi, 4 * math.pi)),
    "cuboid": ({"width": 1.2, "height": 0.6}, prism(2.4, 6.4, 0.6)),
    "cylinder": ({"height": 2.5}, prism(math.pi, 2 * math.pi, 2.5)),
    "cone": ({"height": 2.0}, (2 / 3 * math.pi, math.pi * (1 + math.sqrt(5)))),
    "torus": ({"tube": 0.4}, (2 * math.pi**2 * 0.16, 4 * math.pi**2 * 0.4)),
    "tetrahedron": ({"height": 1.4}, (math.sqrt(3) / 4 * 1.4, 3 * math.sqrt(3) / 4 + 3 * TETRAHEDRON_SIDE)),
    "helix": (
        {"tube": 0.2, "rise": 1.1, "turns": 1.75},
        (math.pi * 0.04 * helix_length(1.1, 1.75), 2 * math.pi * (0.2 * helix_length(1.1, 1.75) + 0.04)),
    ),
    "cross": ({"arm": 0.5, "height": 0.4}, prism(1.75, 8, 0.4)),
    "ellipsoid": ({"middle": 0.7, "short": 0.35}, None),  # its area is an elliptic integral
    "capsule": ({"length": 2.0}, (math.pi * (2 + 4 / 3), math.pi * (4 + 4))),
    "l_bracket": ({"foot": 1.5, "width": 0.4, "height": 0.7}, prism(0.8 + 0.44, 7, 0.7)),
    "cube_with_hole": ({"hole": 1.0, "height": 1.5}, prism(3, 12, 1.5)),
}


@pytest.mark.parametrize("name", solids.FAMILIES)
def test_surfaces_are_closed_look_outward_and_are_sampled_by_area(name: str) -> None:
    """By the theorem of Gauss the normals average to 0, and points times normals to the unit matrix by volume / area.

    Points off the surface, areas without their share and normals that look inward would all show.
    """
    proportions, known = CLOSED_FORMS[name]
    points, normals = solids.FAMILIES[name].surface(generator(), MANY, **proportions)
    assert points.shape == normals.shape == (MANY, 3)
    np.testing.assert_allclose(np.linalg.norm(normals, axis=1), 1, rtol=0, atol=1e-12)
    size = np.linalg.norm(points, axis=1).max()
    bound = 4 / math.sqrt(MANY)
    assert np.abs(normals.mean(axis=0)).max() < bound
    moments = points.T @ normals / MANY
    volume_by_area = np.trace(moments) / 3
    if known is None:
        volume, axes = 4 / 3 * math.pi * 0.7 * 0.35, np.array([1, 0.7, 0.35])
        directions = generator(1).standard_normal((MANY, 3))
        directions /= np.linalg.norm(directions, axis=1, keepdims=True)
        known = volume, 4 * math.pi * axes.prod() * float(np.linalg.norm(directions / axes, axis=1).mean())
    assert abs(volume_by_area - known[0] / known[1]) < size * bound
    assert np.abs(moments - volume_by_area * np.eye(3)).max() < size * bound


@pytest.mark.parametrize("name", solids.FAMILIES)
def test_every_shape_of_a_family_has_its_proportions(name: str) -> None:
    family = solids.FAMILIES[name]
    proportions, _ = CLOSED_FORMS[name]
    assert set(proportions) == set(family.proportions)
    first, second = (family.sample(generator(seed), 500) for seed in (1, 2))
    for points, normals in (first, second):
        assert np.linalg.norm(points, axis=1).max() == pytest.approx(1)
        np.testing.assert_allclose(np.linalg.norm(normals, axis=1), 1, rtol=0, atol=1e-12)
    assert not np.array_equal(first[0], second[0])


def test_points_of_a_sphere_are_their_own_normals() -> None:
    points, normals = solids.sphere(generator(), 1000)
    np.testing.assert_allclose(points, normals, rtol=0, atol=0)
    np.testing.assert_allclose(np.linalg.norm(points, axis=1), 1, rtol=0, atol=1e-12)


def test_points_of_an_ellipsoid_satisfy_its_equation() -> None:
    points, normals = solids.ellipsoid(generator(), 1000, middle=0.7, short=0.4)
    axes = np.array([1.0, 0.7, 0.4])
    np.testing.assert_allclose(((points / axes) ** 2).sum(axis=1), 1, rtol=0, atol=1e-12)
    gradient = points / axes**2
    np.testing.assert_allclose(np.cross(gradient, normals), 0, rtol=0, atol=1e-12)
    assert ((gradient * normals).sum(axis=1) > 0).all()


def test_points_of_a_cylinder_are_on_its_wall_or_its_ends() -> None:
    points, normals = solids.cylinder(generator(), MANY, height=3.0)
    wall = normals[:, 2] == 0
    np.testing.assert_allclose(points[wall, :2], normals[wall, :2], rtol=0, atol=1e-12)
    np.testing.assert_allclose(np.linalg.norm(points[wall, :2], axis=1), 1, rtol=0, atol=1e-12)
    assert np.abs(points[wall, 2]).max() <= 1.5
    np.testing.assert_array_equal(points[~wall], points[~wall] * [1, 1, 0] + 1.5 * normals[~wall])
    # By area: the wall has 6 pi of 8 pi, and half a disc is within sqrt(1/2).
    assert wall.mean() == pytest.approx(0.75, abs=0.005)
    radii = np.linalg.norm(points[~wall, :2], axis=1)
    assert radii.max() <= 1
    assert (radii**2 < 0.5).mean() == pytest.approx(0.5, abs=0.01)


def test_points_of_a_capsule_are_at_one_distance_from_its_axis() -> None:
    points, normals = solids.capsule(generator(), MANY, length=2.0)
    axis = np.clip(points[:, 2], -1, 1)[:, None] * [0, 0, 1]
    np.testing.assert_allclose(points - axis, normals, rtol=0, atol=1e-12)
    assert (np.abs(points[:, 2]) < 1).mean() == pytest.approx(0.5, abs=0.005)


def test_points_of_a_cone_are_on_its_base_or_its_side() -> None:
    points, normals = solids.cone(generator(), MANY, height=2.0)
    base = normals[:, 2] == -1
    np.testing.assert_allclose(points[base, 2], -0.5, rtol=0, atol=1e-12)
    apex = points[~base] - [0, 0, 1.5]
    np.testing.assert_allclose(np.linalg.norm(apex[:, :2], axis=1), -apex[:, 2] / 2, rtol=0, atol=1e-12)
    np.testing.assert_allclose((apex * normals[~base]).sum(axis=1), 0, rtol=0, atol=1e-12)
    assert base.mean() == pytest.approx(1 / (1 + math.sqrt(5)), abs=0.005)


def test_points_of_a_torus_are_a_tube_from_its_circle() -> None:
    points, normals = solids.torus(generator(), MANY, tube=0.4)
    distance = np.linalg.norm(points[:, :2], axis=1)
    circle = points * [1, 1, 0] / distance[:, None]
    np.testing.assert_allclose(points - circle, 0.4 * normals, rtol=0, atol=1e-12)
    # By Pappus: the outer half has pi + 2 tube of 2 pi.
    assert (distance > 1).mean() == pytest.approx(0.5 + 0.4 / math.pi, abs=0.005)


def test_points_of_a_cuboid_are_on_the_faces_they_look_from() -> None:
    points, normals = solids.cuboid(generator(), MANY, width=1.0, height=0.5)
    half = np.array([1.0, 0.5, 0.25])
    assert (np.abs(points) <= half + 1e-12).all()
    assert set(np.unique(normals)) == {-1.0, 0.0, 1.0}
    np.testing.assert_allclose((points * normals).sum(axis=1), np.abs(normals) @ half, rtol=0, atol=1e-12)
    shares = np.abs(normals).mean(axis=0)
    np.testing.assert_allclose(shares, np.array([0.5, 1.0, 2.0]) / 3.5, rtol=0, atol=0.005)


def test_points_of_a_helix_are_a_tube_from_its_line() -> None:
    tube, rise, turns = 0.15, 1.0, 2.0
    points, normals = solids.helix(generator(), 2000, tube=tube, rise=rise, turns=turns)
    line = points - tube * normals
    angle = 2 * math.pi * line[:, 2] / rise
    expected = np.stack([np.cos(angle), np.sin(angle)], axis=1)
    side = np.linalg.norm(line[:, :2] - expected, axis=1) < 1e-9
    assert side.mean() > 0.95
    assert np.abs(angle[side]).max() <= math.pi * turns + 1e-9
    flat = normals[~side]
    np.testing.assert_allclose(np.abs(flat[:, 2]), rise / math.hypot(2 * math.pi, rise), rtol=1e-9)


def test_the_folder_is_laid_out_as_upstream_reads_it(tmp_path: Path) -> None:
    out = tmp_path / "data" / "modelnet40_normal_resampled"
    every = len(solids.FAMILIES)
    written = shapes.generate(out, classes=every, train=3, test=2, points=50)
    names = (out / "modelnet40_shape_names.txt").read_text().splitlines()
    assert names == list(solids.FAMILIES)
    assert len(names) >= 10
    for split, count, first in (("train", 3, 1), ("test", 2, 4)):
        found = read(out, split)
        expected = [f"{name}_{number:04d}" for name in names for number in range(first, first + count)]
        assert [identity for identity, *_ in found] == expected
        assert [label for _, label, *_ in found] == [label for label in range(every) for _ in range(count)]
        for _, _, points, normals in found:
            assert points.shape == (50, 3)
            assert np.linalg.norm(points, axis=1).max() == pytest.approx(1, abs=2e-6)
            np.testing.assert_allclose(np.linalg.norm(normals, axis=1), 1, rtol=0, atol=2e-6)
    assert sorted(path.relative_to(out).as_posix() for path in written) == sorted(contents(out))
    assert {path.name for path in out.iterdir() if path.is_dir()} == set(names)
    assert len(contents(out)) == 4 + 5 * every


def test_files_hold_the_shapes(tmp_path: Path) -> None:
    shapes.generate(tmp_path, **SMALL, seed=3)
    for split in ("train", "test"):
        for place, (identity, _, points, normals) in enumerate(read(tmp_path, split)):
            name = identity.rpartition("_")[0]
            number = place % SMALL[split]
            expected = shapes.shape(name, split, number, points=40, seed=3)
            np.testing.assert_allclose(np.hstack([points, normals]), expected, rtol=0, atol=5.1e-7)
    assert b"-0.000000" not in b"".join(contents(tmp_path).values())


def test_no_two_shapes_are_the_same() -> None:
    made = [
        shapes.shape("cone", split, number, points=20, seed=seed)
        for split in ("train", "test")
        for number in range(3)
        for seed in range(2)
    ]
    assert len({each.tobytes() for each in made}) == 12


def test_the_same_seed_gives_the_same_bytes_and_another_does_not(tmp_path: Path) -> None:
    first, again, other = (tmp_path / name for name in ("first", "again", "other"))
    shapes.generate(first, **SMALL, seed=1)
    shapes.generate(again, **SMALL, seed=1)
    shapes.generate(other, **SMALL, seed=2)
    assert contents(first) == contents(again)
    for name, data in contents(other).items():
        assert (data != contents(first)[name]) == ("/" in name or name == "shapes.json")


def test_shapes_stay_the_same_whatever_else_is_made(tmp_path: Path) -> None:
    few, more = tmp_path / "few", tmp_path / "more"
    shapes.generate(few, **SMALL)
    shapes.generate(more, **{**SMALL, "classes": 5, "train": 4})
    assert (few / "cylinder" / "cylinder_0002.txt").read_bytes() == (
        more / "cylinder" / "cylinder_0002.txt"
    ).read_bytes()
    assert (few / "cylinder" / "cylinder_0003.txt").read_bytes() == (
        more / "cylinder" / "cylinder_0005.txt"
    ).read_bytes()


def test_noise_moves_points_but_neither_normals_nor_shapes() -> None:
    clean = shapes.shape("torus", "train", 0, points=5000)
    noisy = shapes.shape("torus", "train", 0, points=5000, noise=0.05)
    np.testing.assert_array_equal(clean[:, 3:], noisy[:, 3:])
    moved = noisy[:, :3] - clean[:, :3]
    assert moved.std() == pytest.approx(0.05, rel=0.05)
    assert np.abs(moved.mean(axis=0)).max() < 0.005


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    drop=st.floats(min_value=0, max_value=0.97),
    points=st.integers(min_value=20, max_value=90),
    drop_split=st.sampled_from(["train", "test", "both"]),
)
def test_dropping_keeps_a_part_of_every_shape(
    tmp_path_factory: pytest.TempPathFactory, drop: float, points: int, drop_split: str
) -> None:
    folder = tmp_path_factory.mktemp("drop")
    options: dict[str, Any] = {"classes": 2, "train": 2, "test": 1, "points": points, "seed": 4}
    shapes.generate(folder / "whole", **options)
    shapes.generate(folder / "dropped", **options, drop=drop, drop_split=drop_split)
    for split in ("train", "test"):
        lengths = set()
        for identity, *_ in read(folder / "whole", split):
            file = f"{identity.rpartition('_')[0]}/{identity}.txt"
            whole, dropped = ((folder / each / file).read_text().splitlines() for each in ("whole", "dropped"))
            assert len(whole) == points
            assert dropped == [line for line in whole if line in set(dropped)]
            lengths.add(len(dropped))
        (length,) = lengths  # what upstream stacks has one length
        if drop_split in (split, "both"):
            assert abs(length - (1 - drop) * points) <= 0.5
        else:
            assert length == points


def test_a_larger_fraction_keeps_a_part_of_what_a_smaller_one_keeps(tmp_path: Path) -> None:
    kept = []
    for drop in (0.0, 0.3, 0.85):
        shapes.generate(tmp_path, classes=1, train=1, test=1, points=1000, drop=drop)
        kept.append((tmp_path / "sphere" / "sphere_0001.txt").read_text().splitlines())
    assert [len(lines) for lines in kept] == [1000, 700, 150]
    assert set(kept[2]) < set(kept[1]) < set(kept[0])


def test_what_remains_after_dropping_is_still_sampled_by_area() -> None:
    """If points were ordered by face, the first lines would lack some faces."""
    points = shapes.shape("cuboid", "train", 0, points=20_000)[:2000]
    assert np.abs(points[:, 3:].mean(axis=0)).max() < 0.1
    assert np.abs(points[:, :3].mean(axis=0)).max() < 0.1


def features(points: Array, normals: Array) -> Array:
    """Return rotation-invariant features: spreads, radii and the angles of normals, scaled like a loader."""
    points = points - points.mean(axis=0)
    radii = np.linalg.norm(points, axis=1)
    points, radii = points / radii.max(), radii / radii.max()
    spreads = np.sqrt(np.linalg.eigvalsh(points.T @ points / len(points)))
    half = len(points) // 2
    pairs = np.linalg.norm(points[:half] - points[half : 2 * half], axis=1)
    levels = np.linspace(0.05, 0.95, 7)
    looks = (points * normals).sum(axis=1)
    return np.concatenate([spreads, *(np.quantile(each, levels) for each in (radii, pairs, looks))])


@pytest.mark.parametrize("drop", [0.0, 0.85])
def test_classes_can_be_distinguished_in_any_pose(tmp_path: Path, drop: float) -> None:
    every = len(solids.FAMILIES)
    shapes.generate(tmp_path, classes=every, train=20, test=10, points=512, drop=drop, noise=0.01)
    turn, _ = np.linalg.qr(generator(9).standard_normal((3, 3)))
    turn *= np.linalg.det(turn)
    train = [(label, features(points, normals)) for _, label, points, normals in read(tmp_path, "train")]
    test = [(label, features(points @ turn, normals @ turn)) for _, label, points, normals in read(tmp_path, "test")]
    labels, known = np.array([label for label, _ in train]), np.array([each for _, each in train])
    scale = known.std(axis=0)
    centres = np.array([known[labels == label].mean(axis=0) for label in range(every)]) / scale
    guesses = [int(np.linalg.norm(centres - each / scale, axis=1).argmin()) for _, each in test]
    accuracy = np.mean([guess == label for guess, (label, _) in zip(guesses, test, strict=True)])
    assert accuracy > 0.8  # chance is 1 / 12


@pytest.mark.parametrize(
    ("bad", "told"),
    [
        ({"classes": 0}, "classes 0: expected 1 to 12"),
        ({"classes": 13}, "classes 13: expected 1 to 12"),
        ({"train": 0}, "train 0: expected at least 1"),
        ({"test": -2}, "test -2: expected at least 1"),
        ({"points": 0}, "points 0: expected at least 1"),
        ({"drop": 1.0}, "drop 1.0: expected a fraction"),
        ({"drop": -0.1}, "drop -0.1: expected a fraction"),
        ({"drop": math.nan}, "drop nan: expected a fraction"),
        ({"drop": 0.99}, "drop 0.99: expected at least 1 of 40 points to remain, found 0"),
        ({"noise": -1.0}, "noise -1.0: expected a standard deviation"),
        ({"noise": math.inf}, "noise inf: expected a standard deviation"),
        ({"seed": -1}, "seed -1: expected 0 to"),
        ({"seed": 2**32}, "seed 4294967296: expected 0 to"),
    ],
)
def test_bad_settings_are_reported_before_anything_is_written(tmp_path: Path, bad: dict[str, Any], told: str) -> None:
    out = tmp_path / "new" / "data"
    with pytest.raises(AceError) as caught:
        shapes.generate(out, **{**SMALL, **bad})
    assert str(caught.value).startswith(told)
    options = [word for name, value in {**SMALL, **bad}.items() for word in (f"--{name}", str(value))]
    result = run("--out", str(out), *options)
    assert isinstance(result.exception, AceError)
    assert str(result.exception) == str(caught.value)
    assert "\n" not in str(result.exception)
    assert result.output == ""
    assert list(tmp_path.iterdir()) == []


def test_the_split_to_drop_from_is_one_of_three(tmp_path: Path) -> None:
    with pytest.raises(AceError, match="drop split 'tran'.*'train'"):
        shapes.generate(tmp_path / "new", **SMALL, drop_split="tran")
    result = run("--out", str(tmp_path / "new"), "--drop-split", "tran")
    assert result.exit_code == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("below", [".", "deeper/still"])
def test_out_must_be_a_folder(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_text("mine")
    result = run("--out", str(tmp_path / "file" / below))
    assert isinstance(result.exception, AceError)
    assert "expected a folder" in str(result.exception)
    assert "\n" not in str(result.exception)
    assert contents(tmp_path) == {"file": b"mine"}


def test_out_must_be_writable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    locked = tmp_path / "locked"
    locked.mkdir()
    allowed = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != locked and allowed(path, mode))
    for out in (locked, locked / "new"):
        with pytest.raises(AceError, match="locked' is not writable"):
            shapes.generate(out, **SMALL)
    assert list(locked.iterdir()) == []


def test_somebody_elses_folder_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "modelnet40_train.txt").write_text("airplane_0001\n")
    with pytest.raises(AceError, match="found 'modelnet40_train.txt'.*choose another folder"):
        shapes.generate(tmp_path, **SMALL)
    assert contents(tmp_path) == {"modelnet40_train.txt": b"airplane_0001\n"}


def test_its_own_folder_is_replaced_and_nothing_of_it_stays(tmp_path: Path) -> None:
    once, again = tmp_path / "once", tmp_path / "again"
    once.mkdir()
    shapes.generate(again, **{**SMALL, "classes": 4, "train": 5})
    shapes.generate(again, **SMALL, drop=0.5)
    shapes.generate(once, **SMALL, drop=0.5)
    assert contents(again) == contents(once)
    assert {path.name for path in again.iterdir()} == {path.name for path in once.iterdir()}
    assert json.loads((again / "shapes.json").read_text())["drop"] == 0.5


@pytest.mark.parametrize("added", ["notes.txt", "cone/cone_0001.txt", "cuboid/cuboid_0009.txt", "sphere/deeper/x"])
def test_its_own_folder_with_something_added_is_left_alone(tmp_path: Path, added: str) -> None:
    shapes.generate(tmp_path, **SMALL)
    (tmp_path / added).parent.mkdir(exist_ok=True)
    (tmp_path / added).write_text("mine")
    before = contents(tmp_path)
    with pytest.raises(AceError, match=f"found '{added.split('/')[0]}.*choose another folder"):
        shapes.generate(tmp_path, **SMALL, seed=1)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("record", ["", "[]", "{}", '{"classes": ["../other"], "train": 1, "test": 1}'])
def test_an_empty_record_owns_nothing(tmp_path: Path, record: str) -> None:
    out = tmp_path / "data"
    shapes.generate(out, **SMALL)
    (tmp_path / "other").mkdir()
    (out / "shapes.json").write_text(record)
    with pytest.raises(AceError, match="choose another folder"):
        shapes.generate(out, **SMALL)
    assert (tmp_path / "other").is_dir()


@pytest.mark.parametrize("stop", [KeyboardInterrupt, ValueError])
@pytest.mark.parametrize("existing", [True, False])
def test_a_run_that_is_stopped_leaves_what_was_there(tmp_path: Path, stop: type[BaseException], existing: bool) -> None:
    out = tmp_path / "new" / "data"
    if existing:
        shapes.generate(out, **SMALL, seed=1)
    before = contents(tmp_path)
    told: list[int] = []

    def progress(count: int) -> None:
        told.append(count)
        if len(told) == 5:
            raise stop

    with pytest.raises(stop):
        shapes.generate(out, **SMALL, seed=2, progress=progress)
    assert told == [2, 2, 2, 1, 1]
    assert contents(tmp_path) == before
    assert existing or list(tmp_path.iterdir()) == []


def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = Path.write_text

    def full(path: Path, text: str) -> int:
        write(path, text)
        if path.name == "cylinder_0001.txt":
            raise OSError(28, "No space left on device")
        return len(text)

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(AceError, match="No space left"):
        shapes.generate(tmp_path / "data", **SMALL)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("after", [1, 6, 9, 14])
def test_a_run_stopped_between_two_renames_mixes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    shapes.generate(tmp_path, **SMALL, seed=1)
    before = contents(tmp_path)
    replace, moves = os.replace, 0

    def stopped(source: Path, target: Path) -> None:
        nonlocal moves
        moves += 1
        replace(source, target)
        if moves == after:
            raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", stopped)
    with pytest.raises(KeyboardInterrupt):
        shapes.generate(tmp_path, **{**SMALL, "classes": 5}, seed=2)
    assert contents(tmp_path) == before
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def run(*arguments: str) -> Any:
    return CliRunner().invoke(shapes.shapes, list(arguments))


def test_the_command_writes_the_data_set_and_reports_it(tmp_path: Path) -> None:
    out = tmp_path / "data"
    sizes = ["--classes", "2", "--train", "3", "--test", "1", "--points", "100"]
    result = run("--out", str(out), *sizes, "--drop", "0.75", "--seed", "7", "--noise", "0.1")
    assert result.exception is None
    assert result.output == f"wrote 8 shapes of 2 classes to {out}: 6 train of 25 points, 2 test of 100 points\n"
    shapes.generate(tmp_path / "same", classes=2, train=3, test=1, points=100, drop=0.75, seed=7, noise=0.1)
    assert contents(out) == contents(tmp_path / "same")


def test_too_few_points_for_upstreams_graphs_are_reported(tmp_path: Path) -> None:
    options = ["--classes", "1", "--train", "1", "--test", "1", "--points", "100"]
    result = run("--out", str(tmp_path), *options, "--drop", "0.85", "--drop-split", "both")
    assert result.exception is None
    assert "smaller --n_knn" in result.output


def test_the_commands_help_names_every_option() -> None:
    result = run("--help")
    assert result.exit_code == 0
    for option in shapes.shapes.params:
        assert isinstance(option, click.Option)
        assert option.help
        assert option.opts[0] in result.stdout


def test_the_command_and_the_function_have_the_same_defaults() -> None:
    options = shapes.shapes.make_context("shapes", ["--out", "folder"]).params
    assert options.pop("out") == Path("folder")
    defaults = shapes.generate.__kwdefaults__ or {}
    assert options == {name: defaults[name] for name in options}
    assert set(defaults) - set(options) == {"progress"}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_sees_progress_but_no_bar_above_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, empty = Terminal(), Terminal()
    monkeypatch.setattr(sys, "stderr", seen)
    arguments = ["--out", str(tmp_path), "--classes", "2", "--train", "1", "--test", "1", "--points", "30"]
    shapes.shapes.main(arguments, standalone_mode=False)
    assert "50%" in seen.getvalue()
    assert "100%" in seen.getvalue()
    (tmp_path / "mine").write_text("mine")
    monkeypatch.setattr(sys, "stderr", empty)
    with pytest.raises(AceError):
        shapes.shapes.main(arguments, standalone_mode=False)
    assert empty.getvalue() == ""
