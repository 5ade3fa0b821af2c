"""Reports of runs in mode auto: the verdicts with their numbers, and the chart of the evidence."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from clouds import CloudAdapter, start

from ace_plugins import project, status
from ace_plugins.plugins.registry import registry
from ace_plugins.report.page import describe_run, render_report
from ace_plugins.report.record import RECORDER
from ace_plugins.report.tables import build_site_table
from ace_plugins.report.trace import SavedRun, find_run, read_run
from ace_plugins.report.verdicts import RunOutcome, SiteOutcome, judge_saved

STEPS = 600


@pytest.fixture(autouse=True)
def _adapter() -> Iterator[None]:
    registry().add(CloudAdapter(), "cloud")
    yield
    registry().remove("cloud")


def trained(folder: Path, strength: float, steps: int = STEPS, **settings: Any) -> tuple[SavedRun, dict[str, Any]]:
    """Return the saved run of a model in mode auto, and what its record said at the end."""
    run = start(2000, strength, 0, STEPS, mode="auto", trace=True, **settings).train(steps)
    told = RECORDER.get_record(run.model).to_dict()
    RECORDER.get_record(run.model).finish()
    return read_run(find_run(folder / "runs")), told


def words(page: str) -> str:
    """Return the text of a page without its tags."""
    return " ".join(re.sub("<[^>]*>", " ", page).split())


def test_the_page_shows_the_evidence_and_the_size_of_each_verdict(tmp_path: Path) -> None:
    run, told = trained(tmp_path, 1.0)
    page = render_report([run])
    kept = [site for site in told["sites"] if site["verdict"] == "breaks"]
    assert kept
    together = 100 * sum(site["benefit"] for site in kept)
    text = words(page)
    assert f"together by {together:.{0 if together >= 10 else 1}f} % (p &lt; 0.001): they stay in the model" in text
    assert "log10 of the e-value); above 3.5 the site is kept; if all sites are above 3.0, all are kept" in text
    (evidence,) = re.findall(r'<svg[^>]*aria-label="evidence.*?</svg>', page, re.DOTALL)
    assert "boundary" in evidence
    assert all(name in evidence for name in run.sites)
    assert re.search(r"site gamma over time benefit p verdict", text)
    assert not re.search(r"<th[^>]*>\s*(lambda|u)\s*<", page)
    (site, *_) = (site for site in describe_run(run)["sites"] if site["verdict"] == "breaks")
    assert site["benefit"] > 0.01
    assert site["p"] < 0.001
    assert site["gamma"] >= 0.1


def test_a_benefit_that_rounds_to_0_has_no_sign() -> None:
    found = [SiteOutcome("one", 0.0, 0.0, 0.0, "fits", benefit, 0.001, 1.0) for benefit in (-0.0004, 0.0004, -0.004)]
    assert [row[2] for row in build_site_table(RunOutcome("auto", found)).rows] == ["0.0 %", "0.0 %", "−0.4 %"]


def test_symmetric_data_leave_plain_upstream_and_the_page_shows_the_limit(tmp_path: Path) -> None:
    run, told = trained(tmp_path, 0.0)
    assert told["landed"]
    assert {site["verdict"] for site in told["sites"]} <= {"fits", "undecided"}
    text = words(render_report([run]))
    assert re.search(
        r"lower the held-out loss by at most [\d.]+ %|lower the loss \(by up to [\d.]+ % together\)|do not lower", text
    )


@pytest.mark.parametrize("finished", [True, False], ids=["finished", "killed"])
@pytest.mark.parametrize("strength", [0.0, 1.0])
def test_a_saved_run_has_the_verdicts_of_its_record(tmp_path: Path, strength: float, finished: bool) -> None:
    run, told = trained(tmp_path, strength, trace_every=100)
    if not finished:
        path = run.folder / "trace.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines if not line.get("finished")))
        run = read_run(run.folder)
    assert [site.verdict for site in judge_saved(run).sites] == [site["verdict"] for site in told["sites"]]


def test_a_run_that_ends_before_its_budget_decides_once_the_advice_is_followed(tmp_path: Path) -> None:
    run, told = trained(tmp_path, 1.0, 150, budget=10_000)
    assert {site["verdict"] for site in told["sites"]} == {"undecided"}
    assert "no decision up to this step" in words(render_report([run]))
    advice = re.search(r"set budget = (\d+) if runs have this length", told["verdict"])
    assert advice, told["verdict"]
    _, told = trained(tmp_path, 1.0, 150, budget=int(advice[1]))
    assert "breaks" in {site["verdict"] for site in told["sites"]}
    assert told["verdict"] == ""


def test_a_diverged_run_is_diverged_in_its_report_too(tmp_path: Path) -> None:
    run = start(64, 0.0, 0, 60, mode="auto", trace=True)
    run.train(20)
    with torch.no_grad():
        run.model.head.weight.fill_(math.nan)
    with pytest.warns(UserWarning, match="not finite in"):
        run.train(60)
    assert {site.verdict for site in status(run.model).sites} == {"diverged"}
    project(run.model)
    assert {site.verdict for site in judge_saved(read_run(find_run(tmp_path / "runs"))).sites} == {"diverged"}
