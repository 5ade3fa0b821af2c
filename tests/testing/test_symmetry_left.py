"""symmetry_left: what trained models have left of O(3), on point clouds whose symmetry is known."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from clouds import CloudAdapter, Run, break_symmetry, start

from ace_plugins import symmetry_left
from ace_plugins.errors import AdapterError, AttachError, ConfigError
from ace_plugins.plugins.registry import registry
from ace_plugins.symmetry.subgroups import angle_between


@pytest.fixture(autouse=True)
def _adapter() -> Iterator[None]:
    registry().add(CloudAdapter(), "cloud")
    yield
    registry().remove("cloud")


def train(kind: str, *, mode: str = "auto", steps: int = 700, seed: int = 3) -> tuple[Run, torch.Tensor]:
    run = start(1000, 0.0, seed, steps, mode=mode)
    run.task, axis = break_symmetry(run.task, kind, seed)
    return run.train(), axis


def batches(run: Run) -> list[Any]:
    return [(x,) for x in run.task.x_test[:384].split(64)]


def test_the_axis_that_the_data_keep_is_found_by_a_trained_model() -> None:
    run, axis = train("axis")
    before = run.model.training, torch.get_rng_state()
    left = symmetry_left(run.model, batches(run))
    turns, mirrors = left.kept
    assert angle_between(turns.axis, axis.tolist()) < 5
    assert mirrors.name == "reflections in planes that contain it"
    assert before[0] == run.model.training
    assert torch.equal(before[1], torch.get_rng_state())
    json.dumps(left.to_dict())


def test_nothing_is_named_on_data_that_keep_nothing() -> None:
    run, _ = train("nothing")
    assert not symmetry_left(run.model, batches(run)).kept


def test_a_model_without_branches_keeps_everything_and_has_a_note_on_the_data() -> None:
    run, _ = train("axis", mode="strict", steps=60)
    plain = symmetry_left(run.model, batches(run))
    assert plain.sentence.startswith("The model keeps all of O(3); it has no branches in eval mode")
    on = symmetry_left(run.model, batches(run), branches_on=True)
    assert (on.note, on.group) == ("", "O(3)")


def test_mistakes_are_named() -> None:
    run = start(40, 0.0, 0)
    with pytest.raises(ConfigError, match="expected at least 4"):
        symmetry_left(run.model, batches(run)[:3])
    with pytest.raises(AttachError):
        symmetry_left(run.model, batches(run), branches_on=True)
    with pytest.raises(AdapterError, match="no adapter supports"):
        symmetry_left(torch.nn.Identity(), batches(run))
