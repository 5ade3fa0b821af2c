"""How long a run is: what is said, what is found out, and what is assumed."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, OneCycleLR, SequentialLR, StepLR
from toy import Layered

from ace_plugins import AceWarning, Config, attach
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
            made.note_batch((torch.ones(4, 3),), {})
            made.horizon(count)
            count += 1
        if evaluates:
            made.note_mode(False, count)
    made.note_mode(True, count)
    return made


def test_steps_given_by_the_user() -> None:
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


def test_evaluating_in_every_step_makes_no_epoch_of_one_step() -> None:
    made = budget("30 epochs")
    for count in range(8):
        made.note_mode(True, count)
        made.note_batch((torch.randn(4, 3),), {})
        made.note_mode(False, count + 1)
    assert made.epoch_steps is None


def test_a_script_that_evaluates_in_every_step_is_watched_through_the_model() -> None:
    for full in (True, False):
        model = attach(Layered(), **FIT, budget="20 epochs")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        x = torch.randn(6, 3)
        for _ in range(5):
            model.train()
            optimizer.zero_grad()
            model(x[torch.randperm(6)] if full else torch.randn(6, 3)).sum().backward()
            optimizer.step()
            model.eval()
        assert model.ace.budget.epoch_steps == (1 if full else None)


def test_without_calls_of_train_and_eval_the_length_is_assumed_and_said_once() -> None:
    made = budget("3 epochs")
    made.note_mode(True, 0)  # by attach
    assert made.horizon(0) is None
    with pytest.warns(
        AceWarning, match=r"no epoch has ended after 1,000 steps.*set budget to a number of steps"
    ) as said:
        horizons = [made.horizon(count) for count in (LONG, 2 * LONG)]
    assert len(said) == 1
    assert horizons == [0.25 * 3 * LONG] * 2
    assert str(made) == "3,000 steps: 3 epochs (the setting budget) of 1,000 steps"


def test_the_hosts_own_evaluations_are_no_epochs() -> None:
    model = attach(Layered(), **{**FIT, "budget": "5 epochs", "mode": "resilient", "spectral_norm": True})
    model.train()
    model.ace.budget.watching = False
    model.eval()
    assert model.ace.budget._evaluated is False


def test_a_long_first_epoch_is_not_waited_for() -> None:
    made = budget("3 epochs")
    made.note_mode(True, 0)
    made.note_mode(True, 0)
    assert made.horizon(0) is None
    with pytest.warns(AceWarning, match="no epoch has ended"):
        assert made.horizon(LONG) == 0.25 * 3 * LONG
    assert made.horizon(2 * LONG) == 0.25 * 3 * 2 * LONG, "it is at least as long as that"


def test_nothing_known() -> None:
    made = budget()
    assert made.horizon(0) == 0.25 * ASSUMED
    assert str(made) == "unknown, 2,000 steps assumed; set budget"
    assert made.is_settled(5)


def trained(schedule: Any, steps: int, after: Any = None, every: int = 1, **settings: Any) -> Budget:
    model = attach(Layered(), **FIT, **settings)
    if after is not None:
        model.load_state_dict(after)
    return train(model, schedule, steps, every)


def train(model: Any, schedule: Any, steps: int, every: int = 1) -> Budget:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = schedule(optimizer)
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        if step % every == every - 1:
            scheduler.step()
    found: Budget = model.ace.budget
    return found


def test_schedulers_of_known_length() -> None:
    steps = trained(lambda o: OneCycleLR(o, 0.1, total_steps=70), 6)
    assert (steps.total, steps.source) == (70, "the script's OneCycleLR")
    epochs = trained(lambda o: CosineAnnealingLR(o, T_max=9), 6, every=4)
    assert (epochs.epochs, epochs.source) == (9, "the script's CosineAnnealingLR")
    assert trained(lambda o: StepLR(o, 30), 6).total is None


def warm_up(optimizer: torch.optim.Optimizer) -> SequentialLR:
    parts = [LinearLR(optimizer, total_iters=100), CosineAnnealingLR(optimizer, T_max=1900)]
    return SequentialLR(optimizer, parts, milestones=[100])


def test_a_schedule_in_parts() -> None:
    assert trained(warm_up, 6).total == 2000
    assert trained(warm_up, 6, every=3).epochs == 2000


def moved_on(make: Any, steps: int) -> Any:
    """A scheduler as a script that resumes loads it."""

    def schedule(optimizer: torch.optim.Optimizer) -> Any:
        made = make(optimizer)
        made.load_state_dict({**made.state_dict(), "last_epoch": steps})
        return made

    return schedule


def cycle(optimizer: torch.optim.Optimizer) -> OneCycleLR:
    return OneCycleLR(optimizer, 0.1, total_steps=400, cycle_momentum=False)


def test_schedulers_of_a_run_that_goes_on() -> None:
    before = after_steps(8)
    assert trained(moved_on(cycle, 8), 1, after=before).total == 400, "at once"
    assert trained(cycle, 6, after=before).total == 408, "a new schedule, of as many steps again"
    assert trained(moved_on(warm_up, 8), 1, after=before).total == 2000
    epochs = trained(moved_on(lambda o: CosineAnnealingLR(o, T_max=9), 4), 6, after=before, every=4)
    assert (epochs.steps, epochs.epochs) == (None, 9)


@pytest.mark.parametrize("stop", [3, 4, 5, 8])
def test_a_run_that_goes_on_under_its_scheduler_is_the_whole_run_bit_for_bit(stop: int) -> None:
    torch.manual_seed(0)
    whole = attach(Layered(), **FIT, frames="off")
    parts = [attach(Layered(), **FIT, frames="off") for _ in range(2)]
    parts[0].load_state_dict(whole.state_dict())
    x = torch.randn(4, 3)

    def train_on(model: Any, first: int, last: int) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        scheduler = moved_on(cycle, first)(optimizer) if first else cycle(optimizer)
        for _ in range(first, last):
            for group in optimizer.param_groups:
                group["lr"] = 0.01
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
            scheduler.step()

    train_on(whole, 0, 12)
    train_on(parts[0], 0, stop)
    parts[1].load_state_dict(parts[0].state_dict())
    train_on(parts[1], stop, 12)
    for name, value in whole.state_dict().items():
        assert torch.equal(value, parts[1].state_dict()[name]), name


class Trainer:
    """As Lightning's, with the module that contains the model."""

    def __init__(self, model: nn.Module, **values: Any) -> None:
        self.lightning_module = sys.modules[type(self).__module__.partition(".trainer")[0]].LightningModule()
        self.lightning_module.net = model
        self.lightning_module._trainer = self
        vars(self).update(values)


def of_lightning(monkeypatch: pytest.MonkeyPatch, package: str = "lightning.pytorch") -> type[Trainer]:
    module = ModuleType(package)
    module.LightningModule = type("LightningModule", (nn.Module,), {})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, package, module)
    return type("Trainer", (Trainer,), {"__module__": f"{package}.trainer.trainer"})


def test_lightning(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = of_lightning(monkeypatch)
    for after, begun in ((None, 0), (after_steps(3), 3)):
        model = attach(Layered(), **FIT)
        if after is not None:
            model.load_state_dict(after)
        trainer = kind(model, estimated_stepping_batches=320)
        found = train(model, lambda o: StepLR(o, 30), 2)
        assert trainer is not None
        assert (found.begun, found.total, str(found)) == (begun, 320, "320 steps (Lightning's trainer)")


def test_only_the_trainer_of_the_model_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = of_lightning(monkeypatch)
    model = attach(Layered(), **FIT)
    trainers = [kind(Layered(), estimated_stepping_batches=10), kind(model, estimated_stepping_batches=50)]
    trainers += [kind(model, estimated_stepping_batches=5000), kind(Layered(), estimated_stepping_batches=20)]
    trainers[1].lightning_module = trainers[2].lightning_module  # trained before, by another trainer
    assert train(model, lambda o: StepLR(o, 30), 2).total == 5000


def test_a_run_that_goes_on_waits_for_its_scheduler() -> None:
    resumed = trained(lambda o: StepLR(o, 30), 2, after=after_steps(3))
    assert (resumed.begun, resumed.is_settled(5), resumed.is_settled(8)) == (3, False, True)


def test_the_length_is_read_after_the_landing_too() -> None:
    model = attach(Layered(), **FIT, budget=40)
    train(model, lambda o: StepLR(o, 30), 60)
    assert model.ace.landed
    resumed = attach(Layered(), **FIT)
    resumed.load_state_dict(model.state_dict())
    with pytest.warns(AceWarning, match="had landed before"):
        found = train(resumed, lambda o: OneCycleLR(o, 0.1, total_steps=340), 6)
    assert (found.begun, str(found)) == (60, "400 steps (the script's OneCycleLR)")


def after_steps(count: int) -> dict[str, Any]:
    model = attach(Layered(), **FIT, budget=100)
    train(model, lambda o: StepLR(o, 30), count)
    return model.state_dict()


def test_lightning_gives_the_steps_of_an_epoch_without_calls_of_train(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = of_lightning(monkeypatch, "pytorch_lightning")
    lengths = {"estimated_stepping_batches": 10**6, "num_training_batches": 45, "accumulate_grad_batches": 2}
    model, endless = attach(Layered(), **FIT, budget="10 epochs"), attach(Layered(), **FIT)
    trainers = [kind(each, **lengths) for each in (model, endless)]
    found = train(model, lambda o: CosineAnnealingLR(o, T_max=9), 6, every=4)
    assert (found.total, str(found)) == (230, "230 steps: 10 epochs (the setting budget) of 23 steps")
    found = train(endless, lambda o: StepLR(o, 30), 6)
    assert trainers
    assert (found.total, str(found)) == (10**6, "1,000,000 steps (Lightning's trainer)")
    assert found.horizon(6) == 100 * 23, "of epochs until somebody stops it, gamma takes a hundred"


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
def test_epochs_of_a_command_line(argv: list[str], expected: Any) -> None:
    found = Script.with_option(argv, ["main.py", "sub/train.py"], "--epochs", default=50)
    assert (found and (found.epochs, found.source)) == expected
