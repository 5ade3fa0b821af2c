"""The C4 convolution on plain PyTorch, its adapter, and the demo of the paper's toy task."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from torch import Tensor

from ace_c4.demo import command, shapes, training
from ace_c4.demo.command import INSTALL, demo
from ace_c4.net import C4Conv, C4Net
from ace_plugins import attach
from ace_plugins.adapter import ConfigError, check_picture
from ace_plugins.testing import parametrize_with_checks


@parametrize_with_checks("c4")
def test_contract(check: Any) -> None:
    check()


def turned(x: Tensor, *, fields: bool) -> Tensor:
    """Rotate by a quarter turn, which shifts the four rotations of a regular field by one."""
    image = torch.rot90(x, 1, (-2, -1))
    return image.unflatten(1, (-1, 4)).roll(1, dims=2).flatten(1, 2) if fields else image


@pytest.mark.parametrize("lifts", [True, False])
def test_a_convolution_turns_with_what_it_reads(lifts: bool) -> None:
    torch.manual_seed(0)
    layer = C4Conv(2, 3, 5, lifts=lifts).double()
    x = torch.randn(2, layer.channels_in, 7, 7, dtype=torch.float64)
    expected = turned(layer(x), fields=True)
    torch.testing.assert_close(layer(turned(x, fields=not lifts)), expected)
    assert not torch.allclose(layer(x), expected)


def test_the_group_convolution_written_out() -> None:
    """Field o at rotation r is the sum over fields i and rotations s of kernel (o, i, s - r), rotated r times."""
    torch.manual_seed(0)
    layer = C4Conv(2, 2, 3).double()
    x = torch.randn(1, 8, 6, 6, dtype=torch.float64)
    found = layer(x).unflatten(1, (2, 4))
    for o in range(2):
        for r in range(4):
            expected = layer.bias[o].detach().clone()
            for i in range(2):
                for s in range(4):
                    kernel = torch.rot90(layer.weight[o, i, (s - r) % 4], r)[None, None]
                    expected = expected + torch.nn.functional.conv2d(x[:, None, 4 * i + s], kernel, padding=1)[:, 0]
            torch.testing.assert_close(found[:, o, r], expected)


def test_an_even_kernel_is_refused() -> None:
    with pytest.raises(ValueError, match="kernel_size: expected an odd number"):
        C4Net(kernel_size=4)


def test_the_floor_is_what_quarter_turns_leave() -> None:
    """Compare with rotating the box around one square."""
    images = shapes.draw(200, "rectangle", 0)
    assert torch.equal(images.inputs, shapes.draw(200, "square", 0).inputs), "the same squares for every target"
    assert shapes.draw(50, "square", 0).floor == 0
    one = shapes.draw(1, "asymmetric shape", 3)
    rows, columns = (torch.nonzero(one.inputs[0, 0] > 0.5)[:, axis] for axis in (0, 1))
    box = one.targets[0, 0, rows.min() : rows.max() + 1, columns.min() : columns.max() + 1]
    four = torch.stack([torch.rot90(box, k) for k in range(4)])
    assert one.floor == pytest.approx(float((box - four.mean(0)).square().sum() / shapes.SIDE**2), abs=1e-6)
    assert not any(torch.equal(box, other) for other in four[1:])


def test_the_runs_start_from_the_same_weights_and_see_the_same_images() -> None:
    plain, ours = command.start_pair("rectangle", 4, seed=5)
    state = ours.model.state_dict()
    assert all(torch.equal(state[key], value) for key, value in plain.model.state_dict().items())
    assert torch.equal(plain.data.train.inputs, ours.data.train.inputs)
    assert not torch.equal(plain.data.train.inputs[: training.HELD], plain.data.test.inputs)


@pytest.mark.parametrize("target", list(shapes.TARGETS))
def test_gamma_stays_where_the_symmetry_is_broken_and_only_there(target: str) -> None:
    plain, ours = command.start_pair(target, 4, seed=0)
    assert list(training.train([plain, ours], 4)) == [1, 2, 3, 4]
    without, result = training.judge(plain), training.judge(ours)
    largest = max(map(abs, result.gamma))
    assert without.equivariance < 1e-5
    if target == "square":
        assert largest < 0.05
        assert result.equivariance < 0.02
        assert result.test == pytest.approx(result.test_f_eq, rel=0.1)
    else:
        assert largest > 0.1
        assert without.test > 0.97 * without.floor, "no equivariant model gets below the floor, except by noise"
        assert result.test < 0.5 * without.floor < result.test_f_eq
        f_eq, together = training.outputs(ours)
        assert float((together - f_eq).abs().max()) > 0.3


def test_strict_mode_gives_an_equivariant_model_back() -> None:
    run = training.start("strict", {"mode": "strict"}, "rectangle", 4, 0)
    list(training.train([run], 4))
    result = training.judge(run)
    assert result.gamma == [0.0] * 3
    assert result.equivariance < 1e-5
    assert result.test > 0.97 * result.floor


def run(*arguments: str, folder: Path) -> Result:
    return CliRunner().invoke(demo, ["--picture", str(folder / "picture.png"), *arguments])


def test_the_demo_from_end_to_end(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    threads, stream = torch.get_num_threads(), torch.random.get_rng_state()
    result = run("--epochs", "1", "--seeds", "1", "--json", folder=tmp_path)
    assert result.exception is None
    report = json.loads(result.stdout)
    assert list(report["targets"]) == list(shapes.TARGETS)
    for target in report["targets"].values():
        plain, ours = target["runs"]
        assert (plain["name"], ours["name"], ours["seed"]) == ("without ACE", "ACE resilient", 0)
        assert (len(plain["gamma"]), len(ours["gamma"]), len(ours["validation_curve"])) == (0, 3, 1)
    told = [line for line in result.stderr.splitlines() if "epoch 1/1, validation error" in line]
    assert len(told) == 3, "a line for every epoch where there is no terminal"
    assert "not meaningful" in report["conclusions"][-1]
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.random.get_rng_state(), stream)


def judged(plain: list[float], ours: list[float], floor: float = 0.0) -> list[tuple[training.Result, training.Result]]:
    def result(error: float, gamma: list[float]) -> training.Result:
        return training.Result("", 0, error, error, floor, gamma, 2.2e-7)

    return [(result(a, []), result(b, [0.1, -0.2])) for a, b in zip(plain, ours, strict=True)]


@pytest.mark.parametrize(
    ("plain", "ours", "words"),
    [
        ([1.0, 1.0], [0.1, 0.3], "clearly lower in 2 of 2 seeds, 0.2 "),
        ([1.0, 1.0], [0.1, 0.9], "neither is clearly better (with ACE 0.1 to 0.9 "),
        ([1.0, 1.0], [2.0, 4.0], "clearly higher in 2 of 2 seeds, 3 times"),
        ([1.0, 1.0], [0.1, float("nan")], "diverged"),
    ],
)
def test_the_demo_agrees_with_the_numbers(plain: list[float], ours: list[float], words: str) -> None:
    (told,) = command.conclude({"rectangle": judged(plain, ours, floor=0.5)}, epochs=6)
    assert words in told
    assert "gets below 0.5000" in told
    assert "|gamma| of a run ends at 0.2 to 0.2" in told
    (told,) = command.conclude({"square": judged(plain, ours)}, epochs=6)
    assert "gets below" not in told


def test_the_table_fits_a_terminal() -> None:
    from rich.console import Console

    console = Console(width=80, record=True, file=sys.stderr)
    console.print(command.make_table({name: judged([0.05] * 3, [0.01] * 3) for name in shapes.TARGETS}))
    text = console.export_text()
    assert "…" not in text
    assert "0.0100–0.0100" in text


def test_mistakes_are_reported_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"x\.txt.*\.png"):
        check_picture(Path("x.txt"))
    with pytest.raises(ConfigError, match="folder"):
        check_picture(tmp_path / "none" / "x.png")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"matplotlib.*adapters/c4\[demo\]"):
        check_picture(tmp_path / "x.png", INSTALL)


def test_help_does_not_import_torch() -> None:
    code = (
        "import sys; from ace_c4.demo.command import demo; demo(['--help'], standalone_mode=False); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, capture_output=True).returncode == 0


def test_attaching_does_not_warn_of_unbounded_branches(recwarn: pytest.WarningsRecorder) -> None:
    attach(C4Net(), mode="resilient", trace=False, tell=False)
    assert not list(recwarn)
