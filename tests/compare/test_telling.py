"""Display of a comparison: progress and table."""

from __future__ import annotations

import pytest
from rich.console import Console

from ace_plugins.adapter import Metric, Script
from ace_plugins.compare import trial
from ace_plugins.compare.page import ComparisonResult, print_comparison
from ace_plugins.compare.plan import Comparison, Trial, TrialResult
from ace_plugins.compare.results import Progress
from ace_plugins.compare.trial import Event, MetricReader, choose_jobs
from ace_plugins.report.tables import format_duration

METRICS = (Metric("test", r"test (\S+)"), Metric("validation", r"val (\S+)"))


def comparison(**about: object) -> Comparison:
    runs = {"off": {"mode": "off"}, "strict": {"mode": "strict"}}
    script = Script(epochs=10)
    return Comparison("segnn", ("main.py",), runs, (1, 2), METRICS, about, script=script)


def result(run: str, seed: int, value: float, *, error: float | None = None) -> TrialResult:
    curve = [[10.0 * n, value + 1 / (n + 1)] for n in range(5)]
    return TrialResult(run, seed, {"test": value, "validation": 2 * value}, {"test": curve}, 60.0, error)


def reading(epoch: int, seconds: float) -> MetricReader:
    made = MetricReader(METRICS)
    made.feed(f"epoch {epoch} test 0.5\n", seconds)
    return made


def text_of(renderable: object) -> str:
    console = Console(width=100)
    with console.capture() as capture:
        console.print(renderable)
    return capture.get()


def test_the_end_is_estimated_from_the_first_epoch_on() -> None:
    screen = Progress(comparison(), {}, jobs=1, live=True)
    assert screen.seconds_left() is None
    screen.update(Event(Trial("off", 1), reading(1, 6.0)))
    assert screen.seconds_left() == pytest.approx(6.0 * 10 * 4 - 6.0, rel=0.05), (
        "four runs of ten epochs, one epoch done"
    )
    screen.update(Event(Trial("off", 1), result=result("off", 1, 0.5)))
    assert screen.seconds_left() == pytest.approx(180)
    drawn = text_of(screen.draw())
    assert "1 of 4 runs" in drawn
    assert "about 3 min to go" in drawn
    screen.update(Event(Trial("strict", 1), failed="out of luck"))
    screen.update(Event(Trial("off", 2), reading(5, 30.0)))
    drawn = text_of(screen.draw())
    assert "failed" in drawn
    assert "0.5 50 %" in drawn


def test_lines_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    lines = Progress(comparison(), {Trial("off", 1): result("off", 1, 0.5)}, jobs=2, live=False)
    clock = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    lines.update(Event(Trial("strict", 1), MetricReader(METRICS)))
    lines.update(Event(Trial("strict", 1), reading(1, 6.0)))  # too early for another line
    clock[0] = 200.0
    lines.update(Event(Trial("strict", 1), reading(5, 200.0)))
    lines.update(Event(Trial("strict", 1), reading(5, 201.0)))
    lines.update(Event(Trial("strict", 1), result=result("strict", 1, 0.25)))
    lines.update(Event(Trial("off", 2), failed="ended with exit code 1"))
    told = capsys.readouterr().err.splitlines()
    assert told == [
        "ace: strict seed 1: started (1 of 4 runs; about 2 min to go)",
        "ace: strict seed 1: test 0.5 in epoch 5 (1 of 4 runs; about 5 min to go)",
        "ace: strict seed 1: test 0.25 after 60 s (2 of 4 runs; about 60 s to go)",
        "ace: off seed 2 failed (3 of 4 runs; about 60 s to go): ended with exit code 1",
    ]


def test_the_table_has_what_was_measured_and_the_results_of_the_paper(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    results = [
        result("off", 1, 0.5),
        result("off", 2, 0.7),
        result("strict", 1, 0.25, error=0.125),
    ]
    answer = ComparisonResult(comparison(paper={"off": "0.6 ± 0.1"}), results, {"strict seed 2": "lost"})
    print_comparison(answer)
    drawn = capsys.readouterr().out
    for expected in ("0.6 ± 0.14", "0.25", "−50 %", "× 1.00", "0.12", "0.6 ± 0.1", "lower is better"):
        assert expected in drawn
    assert answer.sentences == [
        "strict is better than off by 50 % in one seed, which proves nothing. But strict has no result (seed 2).",
    ]
    told = answer.to_dict()
    assert told["differences"][0]["better"] == 1
    assert told["runs"][1]["equivariance_error"] == 0.125


def test_a_narrow_terminal_wraps_numbers_and_cuts_none_off(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "70")
    results = [result("off", 1, 0.5), result("off", 2, 0.7), result("strict", 1, 0.25), result("strict", 2, 0.35)]
    print_comparison(ComparisonResult(comparison(paper={"off": "0.6 ± 0.1"}), results, {}))
    words = capsys.readouterr().out.split()
    assert {"strict", "0.14", "0.071", "−50", "1.00"} <= set(words)


def test_the_number_of_simultaneous_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "count_processors", lambda: 8)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert (choose_jobs(None, 100), choose_jobs(None, 3), choose_jobs(5, 100)) == (4, 3, 5)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0, 1")
    assert choose_jobs(None, 100) == 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    monkeypatch.setattr(trial, "count_processors", lambda: 1)
    assert choose_jobs(None, 100) == 1


@pytest.mark.parametrize(("seconds", "told"), [(42, "42 s"), (600, "10 min"), (9000, "2.5 h")])
def test_durations(seconds: float, told: str) -> None:
    assert format_duration(seconds) == told


def test_a_metric_may_have_the_name_of_another_column() -> None:
    metrics = (Metric("time", r"t (\S+)"), Metric("seeds", r"s (\S+)"))
    results = [TrialResult("off", seed, {"time": 0.5, "seeds": 7.0}) for seed in (1, 2)]
    table = ComparisonResult(Comparison("a", (), {"off": {}}, (1, 2), metrics), results).table()
    assert list(table.headers) == ["run", "seeds", "time", "change", "seeds"]
    assert list(table.rows) == [("off", "2", "0.5 ± 0", "", "7")]
