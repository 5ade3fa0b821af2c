"""How long a run is: what is said, what is found out, and what is assumed."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR, StepLR
from toy import Layered

from ace_plugins import Config, attach
from ace_plugins.adapter import Script
from ace_plugins.engine.budget import ASSUMED, LONG, Budget

FIT: dict[str, Any] = {"preset": "fit", "loop": "paced", "mode": "strict", "trace": False}


def budget(value: Any = "auto", script: Script | None = None) -> Budget:
    return Budget(Config(loop="paced", budget=value, horizon=0.25), script)


def epochs_of(made: Budget, steps: int, *, every_step: bool = False, evaluates: bool = True, epochs: int = 2) -> Budget:
    """Let it watch a script that trains so many epochs of so many steps."""
    count = 0
    for _ in range(epochs):
        for step in range(steps):
            if every_step or step == 0:
                made.note_mode(True, count)
            made.horizon(count)
            count += 1
        if evaluates:
            made.note_mode(False, count)
    made.note_mode(True, count)
    return made


def test_steps_are_as_the_user_says() -> None:
    made = budget(600)
    assert made.horizon(0) == 150
    assert str(made) == "600 steps (the setting budget)"
    assert made.is_settled(1)


@pytest.mark.parametrize(
    ("config", "horizon"),
    [
        ({"budget": "2000 epochs"}, 2000),
        ({"budget": 40_000}, 2000),
        ({"budget": "300 epochs"}, 1500),
        ({"budget": "2000 epochs", "horizon": 0.25}, 10_000),
        ({"budget": "2000 epochs", "mode": "resilient"}, 10_000),
    ],
)
def test_a_strict_run_of_many_epochs_is_relaxed_for_a_hundred(config: dict[str, Any], horizon: float) -> None:
    made = epochs_of(Budget(Config(loop="paced", **config)), 20)
    assert made.horizon(40) == horizon


def test_where_an_epoch_is_a_step_a_hundred_of_them_are_few() -> None:
    made = epochs_of(Budget(Config(loop="paced", budget="8000 epochs")), 1, epochs=4)
    assert made.epoch_steps == 1
    assert made.horizon(4) == 1000


@pytest.mark.parametrize("value", ["30 epochs", "auto"])
def test_epochs_become_steps_when_the_first_is_over(value: str) -> None:
    made = budget(value, Script(30, "main.py --epochs") if value == "auto" else None)
    made.note_mode(True, 0)
    assert made.horizon(0) is None, "gamma waits to know"
    assert "30 epochs (" in str(made)
    assert not made.is_settled(9)
    epochs_of(made, 10)
    assert made.total == 300
    assert made.horizon(20) == 75
    source = "main.py --epochs" if value == "auto" else "the setting budget"
    assert str(made) == f"300 steps: 30 epochs ({source}) of 10 steps"


@pytest.mark.parametrize(
    ("script", "steps", "expected"),
    [
        ({}, 10, 10),
        ({"evaluates": False}, 10, 10),
        ({"every_step": True}, 10, 10),
        ({"epochs": 4}, 1, 1),
        ({"every_step": True, "evaluates": False}, 10, None),
    ],
    ids=["usual", "evaluates seldom", "train() before every step", "one step", "nothing to go by"],
)
def test_ways_to_write_an_epoch(script: dict[str, Any], steps: int, expected: int | None) -> None:
    assert epochs_of(budget("30 epochs"), steps, **script).epoch_steps == expected


def test_the_hosts_own_evaluations_are_no_epochs() -> None:
    model = attach(Layered(), **{**FIT, "budget": "5 epochs", "mode": "resilient", "spectral_norm": True})
    model.train()
    model.ace.budget.watching = False
    model.eval()
    assert model.ace.budget._evaluated is False


def test_a_long_first_epoch_is_not_waited_for() -> None:
    made = budget("3 epochs")
    made.note_mode(True, 0)
    assert made.horizon(0) is None
    assert made.horizon(LONG) == 0.25 * 3 * LONG
    assert made.horizon(2 * LONG) == 0.25 * 3 * 2 * LONG, "it is at least as long as that"


def test_nothing_known() -> None:
    made = budget()
    assert made.horizon(0) == 0.25 * ASSUMED
    assert str(made) == "unknown, 2,000 steps assumed; set budget"
    assert made.is_settled(5)


def trained(schedule: Any, steps: int, after: Any = None, **settings: Any) -> Budget:
    model = attach(Layered(), **FIT, **settings)
    if after is not None:
        model.load_state_dict(after)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = schedule(optimizer)
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        if not isinstance(scheduler, CosineAnnealingLR) or step % 4 == 3:
            scheduler.step()
    found: Budget = model.ace.budget
    return found


def test_schedulers_of_known_length() -> None:
    steps = trained(lambda o: OneCycleLR(o, 0.1, total_steps=70), 6)
    assert (steps.total, steps.source) == (70, "the script's OneCycleLR")
    epochs = trained(lambda o: CosineAnnealingLR(o, T_max=9), 6)
    assert (epochs.epochs, epochs.source) == (9, "the script's CosineAnnealingLR")
    assert trained(lambda o: StepLR(o, 30), 6).total is None


def test_lightning(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = type("Trainer", (SimpleNamespace,), {"__module__": "lightning.pytorch.trainer.trainer"})
    trainer = kind(estimated_stepping_batches=320)
    monkeypatch.setitem(sys.modules, "lightning.pytorch", ModuleType("lightning.pytorch"))
    found = trained(lambda o: StepLR(o, 30), 2)
    assert trainer is not None
    assert (found.total, str(found)) == (320, "320 steps (Lightning's trainer)")
    resumed = trained(lambda o: StepLR(o, 30), 2, after=after_three_steps())
    assert (resumed.begun, resumed.total) == (3, 320)


def test_a_run_that_goes_on_waits_for_its_scheduler_to_tell() -> None:
    resumed = trained(lambda o: StepLR(o, 30), 2, after=after_three_steps())
    assert (resumed.begun, resumed.is_settled(5), resumed.is_settled(8)) == (3, False, True)


def after_three_steps() -> dict[str, Any]:
    model = attach(Layered(), **FIT, budget=100)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
    return model.state_dict()


def test_lightning_knows_the_steps_of_an_epoch_which_it_begins_without_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = type("Trainer", (SimpleNamespace,), {"__module__": "pytorch_lightning.trainer.trainer"})
    trainer = kind(estimated_stepping_batches=10**6, num_training_batches=45, accumulate_grad_batches=2)
    monkeypatch.setitem(sys.modules, "pytorch_lightning", ModuleType("pytorch_lightning"))
    found = trained(lambda o: CosineAnnealingLR(o, T_max=9), 6, budget="10 epochs")
    assert trainer is not None
    assert (found.total, str(found)) == (230, "230 steps: 10 epochs (the setting budget) of 23 steps")
    endless = trained(lambda o: StepLR(o, 30), 6)
    assert (endless.total, str(endless)) == (10**6, "1,000,000 steps (Lightning's trainer)")
    assert endless.horizon(6) == 100 * 23, "of epochs until somebody stops it, gamma takes a hundred"


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["/a/main.py", "--lr", "1", "--epochs", "7"], (7, "main.py --epochs")),
        (["main.py", "--epochs=8", "-x"], (8, "main.py --epochs")),
        (["main.py"], (50, "main.py's default")),
        (["main.py", "--epochs", "many"], None),
        (["other.py", "--epochs", "7"], None),
        ([], None),
    ],
)
def test_what_a_command_line_says(argv: list[str], expected: Any) -> None:
    found = Script.with_option(argv, ["main.py", "sub/train.py"], "--epochs", default=50)
    assert (found and (found.epochs, found.source)) == expected
