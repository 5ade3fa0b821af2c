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


@pytest.mark.parametrize("field", [0.0, BROKEN])
def test_a_strict_run_lands_and_claims_nothing_about_the_data(field: float) -> None:
    for frames in ("off", "auto"):
        ended = trained(400, field, budget=400, frames=frames)
        assert (ended.words, ended.whole, ended.landed) == ({"landed"}, "", True)
    assert "mode auto tests whether the data break the symmetry" in explain("landed", "strict")


def test_a_resilient_run_lowers_the_loss_where_the_symmetry_is_broken() -> None:
    strict, resilient = (trained(1250, BROKEN, budget=1250, **mode) for mode in ({"mode": "strict"}, BOUNDED))
    assert resilient.words == {"kept"}
    assert resilient.loss < 0.3 * strict.loss


def test_too_few_steps_and_more_of_them_as_advised() -> None:
    ended = trained(20, 0.0, budget=1000, frames="off")
    assert ended.words == {"moving"}
    advice = re.search(r"train longer, with budget = (\d+)", ended.whole)
    assert advice, ended.whole
    better = trained(int(advice[1]), 0.0, budget=int(advice[1]), frames="off")
    assert better.landed
    assert not ended.landed
    assert better.words == {"landed"}
    assert better.whole == ""


def test_diverged_and_a_lower_rate_as_advised() -> None:
    with pytest.warns(UserWarning, match="not finite in .* steps.*lower the learning rate"):
        ended = trained(400, 0.0, rate=1e6, budget=400, frames="off", trace_every=10)
    assert ended.words == {"diverged"}
    assert "lower the learning rate" in explain("diverged", "strict")
    assert trained(400, 0.0, budget=400, frames="off").words == {"landed"}


@pytest.mark.parametrize("frames", ["off", "auto"])
def test_a_killed_run_is_judged_as_it_would_have_judged_itself(frames: str, tmp_path: Path) -> None:
    ended = trained(400, BROKEN, budget=400, frames=frames, trace_every=50)
    project(ended.model)
    folder = find_run(tmp_path / "runs")
    lines = [json.loads(line) for line in (folder / "trace.jsonl").read_text().splitlines()]
    assert lines[-1].pop("finished")
    (folder / "trace.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines[:-1]))
    found = judge_saved(read_run(folder))
    assert {layer.verdict for layer in found.sites} == ended.words
