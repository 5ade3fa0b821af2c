"""The symmetry that is left after a run: found at its end, in the folder of the run, in the report."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from clouds import CloudAdapter, Run, break_symmetry, start

from ace_plugins import AceWarning, project, write_report
from ace_plugins.adapter import hookimpl
from ace_plugins.plugins.registry import registry
from ace_plugins.report.charts import draw_sphere
from ace_plugins.report.page import describe_run
from ace_plugins.report.terminal import draw_run
from ace_plugins.report.trace import LEFT, find_newest, read_run
from ace_plugins.symmetry.subgroups import spread_axes


@pytest.fixture(autouse=True)
def _adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACE_RUNS", str(tmp_path / "runs"))
    registry().add(CloudAdapter(), "cloud")
    yield
    registry().remove("cloud")


def train(steps: int = 120, **settings: object) -> tuple[Run, Path]:
    run = start(400, 0.0, 3, steps, **{"trace": True, "symmetry_left": True, **settings})
    run.task, _ = break_symmetry(run.task, "axis", 3)
    run.train()
    project(run.model)
    folder = find_newest(Path("runs"))
    assert folder is not None
    return run, folder


def test_a_run_ends_with_the_symmetry_that_is_left(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.warns(AceWarning, match="changes its output"):
        _, folder = train(mode="resilient", tell=True)
    found = json.loads((folder / LEFT).read_text())
    assert f"ace: {found['sentence']}\n" in capsys.readouterr().err
    assert len(found["axes"]) == 100
    run = read_run(folder)
    assert run.symmetry["sentence"] == found["sentence"] == describe_run(run)["symmetry_left"]
    assert found["sentence"] in str(draw_run(run))
    page = write_report(folder).read_text()
    assert page.count('class="best"') == 1
    assert page.count(found["sentence"]) == 1
    assert "Symmetry that is left" in page
    assert "all rotations" in page


def test_it_is_found_before_the_script_deletes_its_model() -> None:
    run = start(400, 0.0, 3, 60, trace=True, symmetry_left=True, mode="resilient").train()
    folder = find_newest(Path("runs"))
    assert folder is not None
    del run
    gc.collect()
    assert json.loads((folder / LEFT).read_text())["sentence"]


def test_it_is_found_once_and_does_not_change_the_training(capsys: pytest.CaptureFixture[str]) -> None:
    weights = []
    for left in (False, True):
        run = start(400, 0.0, 3, 60, mode="resilient", trace=True, tell=True, symmetry_left=left).train()
        run.steps = 90
        run.train()
        weights.append(torch.cat([p.detach().flatten() for p in run.model.parameters()]))
        with pytest.warns(AceWarning, match="changes its output"):
            project(run.model)
    assert torch.equal(*weights)
    assert capsys.readouterr().err.count("The model keeps") == 1


def test_nothing_is_written_unless_the_setting_is_on(capsys: pytest.CaptureFixture[str]) -> None:
    _, folder = train(mode="auto", symmetry_left=False, horizon=0.3)
    assert not (folder / LEFT).exists()
    assert read_run(folder).symmetry == {}
    assert "symmetry" not in capsys.readouterr().err


class WithoutAction(CloudAdapter):
    @hookimpl
    def ace_group_action(self) -> None:
        """Return nothing: the group is unknown."""


def test_a_failure_is_a_warning() -> None:
    registry().remove("cloud")
    registry().add(WithoutAction(), "cloud")
    found = pytest.warns(AceWarning, match="the symmetry that is left in Cloud cannot be found: .*ace_group_action")
    with pytest.warns(AceWarning, match="changes its output"), found:
        _, folder = train(steps=60, mode="resilient")
    assert not (folder / LEFT).exists()


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"sentence": 1}', '{"sentence": "a", "subgroups": [{}], "axes": []}']
)
def test_damaged_files_are_left_out(text: str) -> None:
    with pytest.warns(AceWarning, match="changes its output"):
        _, folder = train(steps=40, mode="resilient", symmetry_left=False)
    (folder / LEFT).write_text(text)
    assert read_run(folder).symmetry == {}
    assert "Symmetry that is left" not in write_report(folder).read_text()


def test_the_map_has_a_dot_for_every_axis_and_marks_the_smallest() -> None:
    axes = list(spread_axes(50))
    drawn = str(draw_sphere("<map>", [(axis, 1.0 + axis[0]) for axis in axes]))
    assert drawn.count("<circle") == 50 + 2  # the rim, the dots and the ring
    assert "&lt;map&gt;" in drawn
    ring = drawn[drawn.index('class="best"') :]
    assert float(ring.split('cx="')[1].split('"')[0]) < 130  # far on the left: x is smallest there
    assert torch.isfinite(torch.tensor([float(part.split('"')[0]) for part in drawn.split('cx="')[1:]])).all()
    assert str(draw_sphere("none", [])).count("<circle") == 1
