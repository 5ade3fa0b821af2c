"""The replacement of pytorch3d.transforms, compared with SciPy and closed forms of the uniform distribution."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ace_plugins.errors import AceError, AceWarning
from ace_vn_dgcnn.shims.transforms import Rotate, RotateAxisAngle, TransformError, random_rotations

Rotation = pytest.importorskip("scipy.spatial.transform").Rotation

ARRAY: Any = np.eye(3)
WORD: Any = "ten"
TOLERANCE = {torch.float32: 2e-6, torch.float64: 1e-14}
dtypes = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)


def cloud(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, 3, dtype=dtype, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize(
    ("axis", "start", "goal"),
    [
        ("X", (0, 1, 0), (0, 0, 1)),
        ("Y", (0, 0, 1), (1, 0, 0)),
        ("Z", (1, 0, 0), (0, 1, 0)),
        ("z", (0, 1, 0), (-1, 0, 0)),
    ],
)
def test_a_quarter_turn_is_right_handed(axis: str, start: tuple[int, ...], goal: tuple[int, ...]) -> None:
    turned = RotateAxisAngle(90, axis).transform_points(torch.tensor([start], dtype=torch.float32))
    torch.testing.assert_close(turned, torch.tensor([goal], dtype=torch.float32), rtol=0, atol=1e-6)


@dtypes
@pytest.mark.parametrize("axis", "XYZ")
@pytest.mark.parametrize("angle", [0, 30, -45.5, 90, 180, 271.25, 725])
def test_one_angle_turns_as_scipy_does(axis: str, angle: float, dtype: torch.dtype) -> None:
    points = cloud(17, dtype=dtype)
    expected = Rotation.from_euler(axis, angle, degrees=True).apply(points.double().numpy())
    for given_angle, degrees in ((angle, True), (math.radians(angle), False), (torch.tensor(angle), True)):
        transform = RotateAxisAngle(given_angle, axis, degrees=degrees, dtype=dtype)
        turned = transform.transform_points(points)
        assert turned.dtype == dtype
        assert turned.shape == (17, 3)
        np.testing.assert_allclose(turned.double(), expected, rtol=0, atol=8 * TOLERANCE[dtype])


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    angles=st.lists(st.floats(min_value=-720, max_value=720), min_size=1, max_size=6),
    axis=st.sampled_from("XYZ"),
    degrees=st.booleans(),
)
def test_angles_of_a_batch_each_turn_their_cloud(angles: list[float], axis: str, degrees: bool) -> None:
    points = cloud(len(angles), 9)
    transform = RotateAxisAngle(
        torch.tensor(angles, dtype=torch.float64), axis=axis, degrees=degrees, dtype=torch.float64
    )
    turned = transform.transform_points(points)
    assert len(transform) == len(angles)
    for one, angle, before in zip(turned, angles, points, strict=True):
        expected = Rotation.from_euler(axis, angle, degrees=degrees).apply(before.numpy())
        np.testing.assert_allclose(one, expected, rtol=0, atol=1e-12)


def test_upstreams_rotation_about_z_keeps_the_heights() -> None:
    """Call it like the training script."""
    points = cloud(4, 30, dtype=torch.float32)
    turned = RotateAxisAngle(angle=torch.rand(4) * 360, axis="Z", degrees=True).transform_points(points)
    torch.testing.assert_close(turned[..., 2], points[..., 2], rtol=0, atol=0)
    torch.testing.assert_close(turned.norm(dim=-1), points.norm(dim=-1))
    assert (turned - points).abs().max() > 0.1


def test_matrices_act_on_row_vectors() -> None:
    rotations, points = random_rotations(5, dtype=torch.float64), cloud(5, 11)
    turned = Rotate(rotations, dtype=torch.float64).transform_points(points)
    np.testing.assert_allclose(turned, torch.einsum("bni,bij->bnj", points, rotations), rtol=0, atol=1e-14)
    # The matrix of a rotation of column vectors hence turns the points back.
    expected = Rotation.from_matrix(rotations[2].numpy()).inv().apply(points[2].numpy())
    np.testing.assert_allclose(turned[2], expected, rtol=0, atol=1e-12)


def test_one_transform_after_another_is_their_product() -> None:
    torch.manual_seed(1)
    rotations, points = random_rotations(3, dtype=torch.float64), cloud(3, 8)
    about = RotateAxisAngle(40, "Y", dtype=torch.float64)
    twice = Rotate(rotations, dtype=torch.float64).transform_points(about.transform_points(points))
    product = Rotate(about.get_matrix()[:, :3, :3] @ rotations, dtype=torch.float64)
    np.testing.assert_allclose(twice, product.transform_points(points), rtol=0, atol=1e-13)
    for one, rotation, before in zip(twice, rotations, points, strict=True):
        both = Rotation.from_matrix(rotation.numpy()).inv() * Rotation.from_euler("Y", 40, degrees=True)
        np.testing.assert_allclose(one, both.apply(before.numpy()), rtol=0, atol=1e-12)


def test_broadcasting_is_as_documented() -> None:
    one, three = Rotate(random_rotations(1)[0]), Rotate(random_rotations(3))
    flat, single, batch = (cloud(*shape, dtype=torch.float32) for shape in ((7,), (1, 7), (3, 7)))
    assert (len(one), len(three)) == (1, 3)
    assert one.transform_points(flat).shape == (7, 3)
    assert one.transform_points(single).shape == (1, 7, 3)
    assert one.transform_points(batch).shape == (3, 7, 3)
    assert three.transform_points(flat).shape == (3, 7, 3)
    assert three.transform_points(single).shape == (3, 7, 3)
    torch.testing.assert_close(three.transform_points(flat)[1], flat @ three.get_matrix()[1, :3, :3])
    assert three.transform_points(batch[:, :0]).shape == (3, 0, 3)


def test_the_matrix_is_homogeneous() -> None:
    rotations = random_rotations(2)
    matrix = Rotate(rotations).get_matrix()
    assert matrix.shape == (2, 4, 4)
    torch.testing.assert_close(matrix[:, :3, :3], rotations)
    assert torch.equal(matrix[:, 3], torch.tensor([[0.0, 0, 0, 1]]).expand(2, 4))
    assert torch.equal(matrix[:, :, 3], torch.tensor([[0.0, 0, 0, 1]]).expand(2, 4))
    matrix.zero_()
    torch.testing.assert_close(Rotate(rotations).get_matrix()[:, :3, :3], rotations)


def test_transforms_move() -> None:
    transform = RotateAxisAngle(torch.tensor([10.0, 20.0]), axis="Y")
    assert transform.to("cpu") is transform
    copied = transform.to("cpu", copy=True)
    assert copied is not transform
    assert torch.equal(copied.get_matrix(), transform.get_matrix())
    meta = transform.to(torch.device("meta"))
    assert isinstance(meta, RotateAxisAngle)
    assert meta.device == torch.device("meta")
    assert meta.transform_points(torch.empty(2, 5, 3, device="meta")).shape == (2, 5, 3)
    assert transform.device == torch.device("cpu")
    assert transform.to("cpu", dtype=torch.float64).dtype == torch.float64


def test_gradients_reach_angles_and_points() -> None:
    angle = torch.tensor([0.3, 1.1], dtype=torch.float64, requires_grad=True)
    points = cloud(2, 3).requires_grad_()

    def turn(angle: torch.Tensor, points: torch.Tensor) -> torch.Tensor:
        return RotateAxisAngle(angle, "Z", degrees=False, dtype=torch.float64).transform_points(points)

    assert torch.autograd.gradcheck(turn, (angle, points))


@dtypes
def test_random_rotations_are_rotations(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    rotations = random_rotations(2000, dtype=dtype)
    assert rotations.shape == (2000, 3, 3)
    assert rotations.dtype == dtype
    product = rotations @ rotations.transpose(1, 2)
    torch.testing.assert_close(product, torch.eye(3, dtype=dtype).expand_as(product), rtol=0, atol=TOLERANCE[dtype])
    torch.testing.assert_close(
        torch.linalg.det(rotations), torch.ones(2000, dtype=dtype), rtol=0, atol=2 * TOLERANCE[dtype]
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Rotate(rotations, dtype=dtype)


def test_random_rotations_are_those_of_gaussian_quaternions() -> None:
    """Draw all quaternions at once, real part first, like PyTorch3D."""
    torch.manual_seed(3)
    rotations = random_rotations(50, dtype=torch.float64)
    torch.manual_seed(3)
    real, *vector = torch.randn(50, 4, dtype=torch.float64).unbind(1)
    expected = Rotation.from_quat(torch.stack([*vector, real], dim=1).numpy()).as_matrix()
    np.testing.assert_allclose(rotations, expected, rtol=0, atol=1e-14)


def test_random_rotations_are_uniform() -> None:
    """The mean is 0, squares of entries are 1/3, distinct entries are uncorrelated, the angle has density
    (1 - cos t) / pi; and all of that from another point of view."""
    torch.manual_seed(0)
    count = 40_000
    rotations = random_rotations(count, dtype=torch.float64)
    fixed = torch.tensor(Rotation.from_euler("xyz", [0.4, -1.0, 2.0]).as_matrix())
    for seen in (rotations, fixed @ rotations, rotations @ fixed):
        entries = seen.reshape(count, 9).numpy()
        assert np.abs(entries.mean(axis=0)).max() < 5 / math.sqrt(3 * count)
        assert np.abs(entries.T @ entries / count - np.eye(9) / 3).max() < 5 / math.sqrt(5 * count)
        traces = seen.diagonal(dim1=1, dim2=2).sum(1).numpy()
        angles = np.sort(np.arccos(np.clip((traces - 1) / 2, -1, 1)))
        cumulative = (angles - np.sin(angles)) / math.pi
        steps = np.arange(count + 1) / count
        statistic = max(np.abs(cumulative - steps[:-1]).max(), np.abs(cumulative - steps[1:]).max())
        assert statistic < 1.95 / math.sqrt(count)  # exceeded once in a thousand seeds


def test_uniform_angles_are_not_uniform_rotations() -> None:
    """The bounds above detect a wrong distribution."""
    torch.manual_seed(0)
    angles = np.sort(math.pi * torch.rand(40_000, dtype=torch.float64).numpy())
    cumulative = (angles - np.sin(angles)) / math.pi
    assert np.abs(cumulative - np.arange(40_000) / 40_000).max() > 0.1


def test_random_rotations_follow_torchs_seed() -> None:
    torch.manual_seed(7)
    first, second = random_rotations(4), random_rotations(4)
    torch.manual_seed(7)
    assert torch.equal(random_rotations(4), first)
    assert torch.equal(random_rotations(4), second)
    assert not torch.equal(first, second)


def test_types_and_devices_are_those_asked_for() -> None:
    assert random_rotations(0).shape == (0, 3, 3)
    assert random_rotations(2).dtype == torch.get_default_dtype()
    assert random_rotations(2, device="meta").device.type == "meta"
    assert random_rotations(2, dtype=torch.float64, device=torch.device("cpu")).dtype == torch.float64
    assert Rotate(random_rotations(2, dtype=torch.float64)).dtype == torch.float32
    assert RotateAxisAngle(torch.tensor(5), dtype=torch.float64).get_matrix().dtype == torch.float64
    assert len(Rotate(random_rotations(0))) == 0


@pytest.mark.parametrize(
    ("wrong", "argument", "found"),
    [
        (lambda: Rotate(torch.eye(4)), "R", "[4, 4]"),
        (lambda: Rotate(torch.zeros(2, 2, 3, 3)), "R", "[2, 2, 3, 3]"),
        (lambda: Rotate(torch.zeros(3)), "R", "[3]"),
        (lambda: Rotate(ARRAY), "R", "ndarray"),
        (lambda: RotateAxisAngle(10, "W"), "axis", "'W'"),
        (lambda: RotateAxisAngle(10, "XY"), "axis", "'XY'"),
        (lambda: RotateAxisAngle(torch.zeros(2, 1)), "angle", "[2, 1]"),
        (lambda: RotateAxisAngle(WORD), "angle", "str"),
        (lambda: random_rotations(-1), "n", "-1"),
        (
            lambda: Rotate(torch.eye(3)).transform_points(torch.zeros(3)),
            "points",
            "[3]",
        ),
        (
            lambda: Rotate(torch.eye(3)).transform_points(torch.zeros(2, 3, 100)),
            "points",
            "[2, 3, 100]",
        ),
        (
            lambda: Rotate(random_rotations(2)).transform_points(torch.zeros(3, 5, 3)),
            "points",
            "3",
        ),
        (
            lambda: Rotate(torch.eye(3)).transform_points(torch.zeros(5, 3, dtype=torch.float64)),
            "points",
            "torch.float64 on cpu",
        ),
    ],
)
def test_mistakes_are_reported_in_one_line(wrong: Any, argument: str, found: str) -> None:
    with pytest.raises(TransformError) as caught:
        wrong()
    assert argument in str(caught.value)
    assert found in str(caught.value)
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, AceError)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    "matrix", [2 * torch.eye(3), torch.diag(torch.tensor([1.0, 1.0, -1.0])), torch.full((3, 3), math.nan)]
)
def test_what_is_no_rotation_is_warned_of(matrix: torch.Tensor) -> None:
    with pytest.warns(AceWarning, match="R: expected rotations"):
        Rotate(matrix)


def test_the_tolerance_is_the_callers() -> None:
    rough = torch.eye(3) + 1e-3
    with pytest.warns(AceWarning, match="within 1e-05"):
        Rotate(rough)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Rotate(rough, orthogonal_tol=1e-2)
