"""Verdicts on data with a known symmetry, and runs that follow the advice of the verdicts.

Targets are a function of |x|, and of the first coordinate where the symmetry is broken. Branches read x itself.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from toy import Layered

from ace_plugins import attach, project
from ace_plugins.report.record import RECORDER
from ace_plugins.report.trace import find_run, read_run
from ace_plugins.report.verdicts import explain, judge_saved

BROKEN, NOISE = 0.3, 0.1
FITTED = {"preset": "fit", "loop": "paced"}
BOUNDED = {"mode": "resilient", "spectral_norm": True}


@dataclass
class Ended:
    words: set[str]
    whole: str
    landed: bool
    loss: float
    """Of the last steps, beside the noise."""
    model: Any


def trained(steps: int, field: float, *, rate: float = 3e-3, **settings: Any) -> Ended:
    torch.manual_seed(1)
    model = attach(Layered(layers=1), **{**FITTED, **settings})
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    losses = []
    for _ in range(steps):
        x = torch.randn(32, 3)
        y = torch.tanh(x.square().sum(-1, keepdim=True) / 3) + field * x[:, :1] + NOISE * torch.randn(32, 1)
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()) / NOISE**2)
    told = RECORDER.get_record(model).to_dict()
    words = {site["verdict"] for site in told["sites"]}
    return Ended(words, told["verdict"], told["landed"], sum(losses[-40:]) / 40, model)


def test_symmetric_data_under_strict() -> None:
    ended = trained(1250, 0.0, budget=1250, frames="off")
    assert (ended.words, ended.whole, ended.landed) == ({"fits"}, "", True)
    assert ended.loss < 1.3


def test_broken_data_under_strict_and_resilient_mode_as_advised() -> None:
    ended = trained(1250, BROKEN, budget=1250, frames="off")
    assert (ended.words, ended.landed) == ({"breaks"}, True)
    assert "try mode resilient" in explain("breaks", "strict")
    better = trained(1250, BROKEN, budget=1250, **BOUNDED)
    assert better.words <= {"breaks", "moving"}
    assert "breaks" in better.words
    assert "u measures how much" in explain("breaks", "resilient")
    assert better.loss < 0.3 * ended.loss, "which is what the advice is for"


def test_symmetric_data_under_resilient() -> None:
    assert trained(1250, 0.0, budget=1250, **BOUNDED).words == {"fits"}


@pytest.mark.parametrize("field", [0.0, BROKEN])
def test_in_random_frames_nothing_is_said_of_the_data(field: float) -> None:
    """A branch cannot learn there what breaks the symmetry, so that gamma lands whatever the data are."""
    ended = trained(400, field, budget=400)
    assert (ended.words, ended.landed) == ({"landed"}, True)
    assert trained(400, field, budget=400, frames="on", **BOUNDED).words <= {"settled", "moving"}
    told = explain("landed", "strict")
    assert "random frames" in told
    assert "mode resilient with frames off" in told


def test_too_few_steps_and_more_of_them_as_advised() -> None:
    ended = trained(20, 0.0, budget=1000, frames="off")
    assert ended.words <= {"moving", "too short"}
    advice = re.search(r"train longer, with budget = (\d+)", ended.whole)
    assert advice, ended.whole
    better = trained(int(advice[1]), 0.0, budget=int(advice[1]), frames="off")
    assert better.landed
    assert not ended.landed
    assert better.words <= {"fits", "too short"}, "a symmetric task is not called broken on so few steps"
    assert better.whole == ""


def test_landing_too_early_and_the_preset_as_advised() -> None:
    """The paper's loop with its landing by hand: from far away it is a cut."""
    ended = trained(60, 0.0, loop="paper", land_at=20)
    assert ended.words == {"cut"}
    assert "preset 'fit' lets gamma reach 0" in explain("cut", "strict")
    better = trained(60, 0.0, budget=60, frames="off")
    assert better.landed
    assert better.words <= {"fits", "too short"}


def test_diverged_and_a_lower_rate_as_advised() -> None:
    with pytest.warns(UserWarning, match="not finite in .* steps.*lower the learning rate"):
        ended = trained(400, 0.0, rate=1e6, budget=400, frames="off", trace_every=10)
    assert ended.words == {"diverged"}
    assert "lower the learning rate" in explain("diverged", "strict")
    assert trained(400, 0.0, budget=400, frames="off").words <= {"fits", "too short"}


@pytest.mark.parametrize("frames", ["off", "auto"])
def test_a_killed_run_is_judged_as_it_would_have_judged_itself(frames: str, tmp_path: Path) -> None:
    ended = trained(1250, BROKEN, budget=1250, frames=frames, trace_every=100)
    project(ended.model)
    folder = find_run(tmp_path / "runs")
    lines = [json.loads(line) for line in (folder / "trace.jsonl").read_text().splitlines()]
    assert lines[-1].pop("finished")
    (folder / "trace.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines[:-1]))
    found = judge_saved(read_run(folder))
    assert {layer.verdict for layer in found.sites} == ended.words
