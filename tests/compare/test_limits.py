"""What limits the result of a run, in the sentence, the table and the JSON; and the control ``branches``."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from traces import write_run

from ace_c4.net import C4Net
from ace_plugins import attach, status
from ace_plugins.adapter import Metric
from ace_plugins.cli.main import cli
from ace_plugins.compare.experiment import parse_runs
from ace_plugins.compare.page import ComparisonResult
from ace_plugins.compare.plan import Comparison, TrialResult
from ace_plugins.compare.trial import list_notes
from ace_plugins.report.trace import read_run
from ace_plugins.settings.config import Config

SHORT = "made 60 of 100 steps"


def outcome(*results: TrialResult, failed: dict[str, str] | None = None) -> ComparisonResult:
    runs = {"off": {"mode": "off"}, "strict": {"mode": "strict"}, "auto": {"mode": "auto"}}
    return ComparisonResult(Comparison("c4", ("t.py",), runs, (1, 2), (Metric("test", "(x)"),)), results, failed or {})


def result(run: str, seed: int, *notes: str) -> TrialResult:
    return TrialResult(run, seed, {"test": seed + len(run) / 10}, notes=notes)


def test_the_sentence_names_what_limits_both_runs() -> None:
    found = outcome(
        *(result("off", 1), result("strict", 1, "did not land", SHORT), result("strict", 2, "did not land")),
        failed={"off seed 2": "ended with exit code 1"},
    )
    first, last = found.sentences
    assert first.startswith("strict is worse than off by 23 % in one seed")
    assert first.endswith(
        ". But off has no result (seed 2), and strict did not land (seed 1, 2) and made 60 of 100 steps (seed 1)."
    )
    assert last == "auto has no result (seed 1, 2).", "a run without any result is named as well"
    rows = dict(zip((row[0] for row in found.table().rows), (row[-1] for row in found.table().rows), strict=True))
    assert rows == {"off": "has no result (seed 2)", "strict": f"did not land (seed 1, 2); {SHORT} (seed 1)"}
    printed = found.to_dict()
    assert printed["notes"]["strict"] == ["did not land (seed 1, 2)", f"{SHORT} (seed 1)"]
    assert printed == json.loads(json.dumps(printed))


def test_nothing_is_named_if_every_run_is_complete() -> None:
    found = outcome(*(result(run, seed) for run in ("off", "strict", "auto") for seed in (1, 2)))
    assert not any("But" in sentence for sentence in found.sentences)
    assert "notes" not in found.table().headers


def edited(folder: Path, **last: Any) -> Path:
    """Change entries of the last line of a trace."""
    *lines, end = (folder / "trace.jsonl").read_text().splitlines()
    (folder / "trace.jsonl").write_text("\n".join([*lines, json.dumps(json.loads(end) | last)]) + "\n")
    return folder


@pytest.mark.parametrize(
    ("mode", "last", "expected"),
    [
        ("strict", {}, ["did not land"]),
        ("strict", {"landed": [0, 1, 2]}, []),
        ("strict", {"landed": [0, 1, 2], "budget": 601}, []),  # one step is within the tolerance
        ("resilient", {"budget": 1200}, ["made 600 of 1,200 steps"]),
        ("resilient", {"finished": False, "interrupted": True}, ["was interrupted"]),
        ("resilient", {"budget": 600}, []),
    ],
)
def test_notes_are_read_from_the_trace(tmp_path: Path, mode: str, last: dict[str, Any], expected: list[str]) -> None:
    assert [*list_notes(read_run(edited(write_run(tmp_path / "run", mode=mode), **last)))] == expected


@pytest.mark.parametrize(("gamma", "expected"), [(0.01, []), (0.5, ["did not land"])])
def test_in_the_papers_loop_gamma_near_0_counts_as_landed(tmp_path: Path, gamma: float, expected: list[str]) -> None:
    folder = edited(write_run(tmp_path / "run", mode="strict"), gamma=[gamma] * 3, landed=[])
    about = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(about | {"config": asdict(Config(mode="strict", loop="paper"))}))
    assert [*list_notes(read_run(folder))] == expected


SCRIPT = """
import torch
from ace_c4.net import C4Net
torch.manual_seed(0)
model, x = C4Net(), torch.randn(4, 1, 9, 9)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(20):
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("test", loss.item())
"""


def test_a_strict_run_that_is_shorter_than_its_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    words = ["--json", "--metric", "test=test {number}", "--seeds", "1", "--runs", "off,strict", "--budget", "200"]
    done = CliRunner().invoke(cli, ["compare", "c4", *words, "--", "train.py"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["notes"] == {"strict": ["did not land (seed 1)", "made 20 of 200 steps (seed 1)"]}
    assert found["sentences"][0].endswith("But strict did not land (seed 1) and made 20 of 200 steps (seed 1).")
    assert "did not land, made 20 of 200 steps" in done.stderr


@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_in_the_control_branches_gamma_is_constant_and_all_samples_train_the_branches(name: str) -> None:
    torch.manual_seed(0)
    model = attach(C4Net(), **parse_runs("off,branches")["branches"], trace=False)
    before = [weight.detach().clone() for weight in model.ace.branches.parameters()]
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.1, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)
    for _ in range(30):
        loss = model(torch.randn(8, 1, 9, 9)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    assert torch.equal(model.ace.gamma, torch.full_like(model.ace.gamma, 0.1)), "as at the start of mode auto"
    assert not model.ace.duals.lambda_.any()
    after = [weight.detach() for weight in model.ace.branches.parameters()]
    assert all(not torch.equal(*pair) for pair in zip(before, after, strict=True))
    assert {site.verdict for site in status(model).sites} == {"kept"}
    x = torch.randn(8, 1, 9, 9)
    with_branches = model.eval()(x)
    model.ace.gamma.data.zero_()
    model.ace.sync()
    assert not torch.equal(with_branches, model(x)), "the branches are evaluated"


def test_a_name_that_is_a_mode_keeps_it_if_settings_follow() -> None:
    runs = parse_runs("off:frames=on,strict:horizon=0.1,branches:gamma_init=1,auto:mode=resilient")
    assert runs["off"] == {"mode": "off", "frames": "on"}
    assert runs["strict"] == {"mode": "strict", "horizon": 0.1}
    assert runs["branches"]["mode"] == "bounded"
    assert Config(**runs["branches"]).gamma_start == 1.0
    assert runs["auto"] == {"mode": "resilient"}
