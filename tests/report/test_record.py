"""The record of a run: advice, summary, status and announcements."""

from __future__ import annotations

import copy
import gc
import json
import math
import re
from typing import Any

import pytest
import torch
from toy import Layered

from ace_plugins import attach, project, read_trace, status
from ace_plugins.engine.duals import Duals
from ace_plugins.report.observers import ANNOUNCER
from ace_plugins.report.record import RECORDER
from ace_plugins.report.terminal import print_report, print_summary
from ace_plugins.report.trace import read_run
from ace_plugins.report.verdicts import judge_saved
from ace_plugins.settings.config import Config


def trained(steps: int, **settings: Any) -> Any:
    model = attach(Layered(), **settings)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        (model(torch.randn(6, 3)) - 1).square().mean().backward()
        optimizer.step()
    return model


FIT: dict[str, Any] = {"preset": "fit", "loop": "paced"}


@pytest.mark.parametrize(
    "first",
    [
        {},
        {"budget": 1000},
        {"budget": "90 epochs"},
        {"mode": "scheduled", "budget": 300},
        {"frames": "off", "budget": 600},
        {"horizon": 0.9, "budget": 5000},
        {"mode": "resilient", "spectral_norm": True, "gamma_init": 1.0, "budget": 4000},
        {"mode": "bounded", "spectral_norm": True, "gamma_init": 1.0, "budget": 3000},
        {"preset": "none", "loop": "paper", "dual_lr": 1e-4},
        {"preset": "none", "loop": "paper"},
    ],
    ids=str,
)
def test_advice_that_is_followed_helps(first: dict[str, Any]) -> None:
    """Ten runs of sixty steps, each with settings that do not fit it. What is told is done, to the letter."""
    told = RECORDER.get_record(trained(60, **{**FIT, **first})).to_dict()
    advice = told["verdict"]
    budget, preset = re.search(r"budget = (\d+)", advice), re.search(r"preset '(\w+)' paces", advice)
    if budget:
        second = {**FIT, **first, "budget": int(budget[1])}
    else:
        assert preset, advice
        second = {key: value for key, value in first.items() if key not in ("dual_lr", "loop")}
        second = {**second, "preset": preset[1], "loop": "paced", "budget": 60}
    better = RECORDER.get_record(trained(max(60, second["budget"]), **second)).to_dict()
    if better["mode"] == "strict":
        assert better["landed"]
        assert not told["landed"]
    assert better["verdict"] != advice
    assert "expected steps" not in better["verdict"]
    far, near = (max(abs(site["gamma"]) for site in run["sites"]) for run in (told, better))
    assert near < far


def test_status_has_the_verdicts_of_the_table() -> None:
    model = trained(60, **FIT, budget=60)
    told, run = status(model), RECORDER.get_record(model).to_dict()
    assert [site.verdict for site in told.sites] == [site["verdict"] for site in run["sites"]]
    assert {site.verdict for site in told.sites} == {"landed"}
    assert str(told).splitlines()[2].endswith(told.sites[0].verdict)
    early = status(trained(20, **FIT, budget=1000))
    assert {site.verdict for site in early.sites} == {"moving"}
    assert early.verdict in str(early)
    assert status(attach(Layered())).sites[0].verdict == ""


def test_a_strict_run_that_did_not_converge_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    record = RECORDER.get_record(trained(15))
    told = record.to_dict()
    assert told["verdict"].startswith("|gamma| is still up to 0.9")
    assert told["verdict"].endswith("preset 'fit' paces gamma by the length of the run")
    assert {site["verdict"] for site in told["sites"]} == {"moving"}
    print_summary(record)
    printed = " ".join(capsys.readouterr().err.split())
    assert "ACE strict, 15 steps, trace in" in printed
    assert "moving: gamma has not landed" in printed
    assert "|gamma| is still up to 0.9" in printed


def test_a_landing_from_far_away_is_no_success(capsys: pytest.CaptureFixture[str]) -> None:
    print_summary(RECORDER.get_record(trained(5, land_at=3, trace=False)))
    printed = capsys.readouterr().err
    assert "ACE strict, landed at step 3, 5 steps\n" in printed
    assert "landed: gamma stays 0" in printed


def test_a_status_is_json_also_if_values_are_not_finite() -> None:
    model = trained(3, trace=False)
    with torch.no_grad():
        model.ace.gamma[0] = torch.nan
    told = json.loads(json.dumps(status(model).to_dict(), allow_nan=False))
    assert (told["sites"][0]["gamma"], told["sites"][0]["verdict"]) == (None, "diverged")


def test_a_checkpoint_loaded_after_the_last_step_is_named() -> None:
    model = trained(3, budget=8)
    early = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.randn(6, 3)).square().mean().backward()
        optimizer.step()
    assert "checkpoint" not in status(model).verdict
    model.load_state_dict(early)
    told = RECORDER.get_record(model).to_dict()
    assert told["steps"] == 8
    assert "checkpoint of step 3" in told["verdict"]


@pytest.mark.parametrize("mode", ["strict", "auto"])
def test_steps_and_loss_are_recorded_after_the_landing(mode: str, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    more = {"mode": mode, "frames": "off"}
    model = trained(120, **FIT, budget=120, **more)
    record = RECORDER.get_record(model)
    assert record.folder is not None
    assert record.duals.landed
    landed = record.landed_at
    assert landed is not None
    assert landed < 100
    assert (status(model).steps, record.to_dict()["steps"], model.ace.duals.steps.item()) == (120, 120, 120)
    lines = read_trace(record.folder)
    assert [line["step"] for line in lines][-3:] == [100, 110, 120]
    assert all(math.isfinite(line["loss"]) for line in lines)
    assert lines[-1]["loss"] != lines[-2]["loss"]
    alive = read_run(record.folder)
    assert alive.landed_at == landed
    print_report(alive)
    assert f"landed at step {landed}, now 120 of 120 steps, " in capsys.readouterr().out
    print_summary(record)
    assert f"ACE {mode}, landed at step {landed}, 120 of 120 steps, trace in" in capsys.readouterr().err
    before = [site.verdict for site in record.judge().sites]
    assert [site.verdict for site in judge_saved(alive).sites] == before
    torch.manual_seed(0)
    short = RECORDER.get_record(trained(landed, **FIT, budget=120, **more))
    assert [site.verdict for site in short.judge().sites] == before


def test_a_step_after_the_landing_counts_once_and_waits_only_when_it_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    class Twice(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    model = attach(Layered(), **FIT, budget=50, trace_every=1000)
    optimizer = Twice(model.parameters(), lr=1e-3)

    def train(steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.randn(6, 3)).square().mean().backward()
            optimizer.step()

    train(50)
    assert model.ace.landed
    with monkeypatch.context() as patch:
        for name in ("tolist", "item", "__float__", "__bool__"):
            patch.setattr(torch.Tensor, name, lambda tensor: pytest.fail("waits for the device"), raising=False)
        train(20)
    assert model.ace.duals.count == 70
    copied = copy.deepcopy(model)
    torch.optim.SGD(copied.parameters(), lr=1e-3).step()  # a model that resumes after its landing
    assert copied.ace.duals.count == 71


@pytest.mark.parametrize(
    "settings",
    [
        {**FIT, "budget": 60, "frames": "off"},
        {**FIT, "budget": 60, "mode": "resilient", "frames": "off"},
        {**FIT, "budget": 60, "mode": "bounded"},
        {**FIT, "budget": 60, "mode": "scheduled"},
        {**FIT, "budget": 150, "mode": "auto"},
        {"dual_optimizer": "adam", "land_at": 50},
        {},
    ],
    ids=str,
)
def test_a_site_without_a_gradient_is_unused_in_every_mode(settings: dict[str, Any]) -> None:
    model = attach(Layered(), trace_every=1, **settings)
    model.layers[2].register_forward_hook(lambda module, args, output: output.detach() * 0)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(150):
        optimizer.zero_grad()
        (model(torch.randn(6, 3)) - 1).square().mean().backward()
        optimizer.step()
    record = RECORDER.get_record(model)
    outcome = record.judge()
    words = [site.verdict for site in outcome.sites]
    assert words[2] == "unused"
    assert "unused" not in words[:2]
    assert "leave the site out" in outcome.meanings["unused"]
    assert record.folder is not None
    assert [site.verdict for site in judge_saved(read_run(record.folder)).sites][2] == "unused", "also of a killed run"


def test_land_at_that_was_not_reached_is_reported() -> None:
    told = RECORDER.get_record(trained(14, land_at=100)).to_dict()
    assert told["verdict"].endswith("land_at = 100 was not reached in 14 steps")


def test_a_record_outlives_its_model_and_holds_no_model() -> None:
    model = trained(3)
    record = RECORDER.get_record(model)
    assert RECORDER.get_record(model) is record
    assert record.folder is not None
    del model
    gc.collect()
    assert record.finished
    assert record.to_dict()["steps"] == 3
    assert record not in RECORDER.records.values()


def test_a_projected_model_begins_a_new_record_when_attached_again() -> None:
    model = trained(2)
    first = RECORDER.get_record(model)
    project(model)
    attach(model)
    assert RECORDER.get_record(model) is not first
    assert first.finished


@pytest.mark.parametrize(("mode", "slack"), [("strict", 0.0), ("resilient", 0.3), ("bounded", 0.1)])
def test_slack_starts_at_its_setting(mode: str, slack: float) -> None:
    config = Config(mode=mode, u_init=0.3, epsilon=0.1)
    duals = Duals(2, config, dtype=torch.float64, device=torch.device("cpu"))
    assert duals.bound.tolist() == [slack, slack]


def test_attach_prints_what_the_command_prints_and_can_be_silenced(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ANNOUNCER, "silent", False)
    model = trained(60, **FIT, budget=60)
    project(model)
    told = capsys.readouterr().err.splitlines()
    assert told[0].startswith("ace: layered: attached to Layered, 3 sites, ")
    assert told[1] == "ace: budget: 60 steps (the setting budget)"
    assert told[2].startswith("ACE strict, landed at step ")
    assert any("layers.0" in line and "landed" in line for line in told)
    project(trained(60, **FIT, budget=60, tell=False))
    monkeypatch.setenv("ACE_QUIET", "1")
    project(trained(60, **FIT, budget=60))
    assert capsys.readouterr().err == ""
