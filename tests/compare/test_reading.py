"""Reading a comparison from its folder, and reporting it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from traces import write_run

from ace_plugins import AceError
from ace_plugins.adapter import Metric
from ace_plugins.cli.main import cli
from ace_plugins.compare.page import is_comparison, read_comparison, render_comparison
from ace_plugins.compare.plan import Comparison, Store, Trial, TrialResult


def written(folder: Path, *, higher: bool = False, traces: bool = True) -> Path:
    """Write results of two runs with three seeds, of which one trial is missing."""
    runs = {"off": {"mode": "off"}, "fit<b": {"preset": "fit"}}
    metrics = (Metric("test", r"t (\S+)", higher=higher), Metric("validation", r"v (\S+)"))
    store = Store(Comparison("egno", ("main.py", "a b"), runs, (1, 2, 3), metrics), folder)
    store.describe(threads=1)
    for trial in store.comparison.trials[:-1]:
        value = 1.0 + 0.1 * trial.seed - (0.5 if trial.run == "fit<b" else 0.0)
        curve = [[float(n), value + 1 / (n + 1)] for n in range(30)]
        place = store.trial_folder(trial)
        place.mkdir(parents=True)
        store.save(
            trial, TrialResult(trial.run, trial.seed, {"test": value, "validation": value}, {"test": curve}, 9.0, 0.25)
        )
        if traces and trial.run != "off":
            write_run(place / f"work-1-{trial.seed}" / "ace-runs" / "1-egno")
    return folder


def test_results_and_traces_are_found(tmp_path: Path) -> None:
    folder = written(tmp_path / "c")
    assert is_comparison(folder)
    found = read_comparison(folder)
    assert [(row.run, len(row.values)) for row in found.rows] == [("off", 3), ("fit<b", 2)]
    assert found.sentences == [
        "fit<b is better than off by 44 % (95 % interval 14 % to 63 %; better in 2 of 2 seeds). "
        "But fit<b has no result (seed 3).",
    ]
    assert [(run, trace.parts[-3]) for run, trace in found.traces().items()] == [("fit<b seed 1", "work-1-1")]


def test_the_direction_of_a_metric_is_read(tmp_path: Path) -> None:
    found = read_comparison(written(tmp_path / "up", higher=True))
    assert "worse" in found.sentences[0]


def test_the_section_has_table_sentences_and_curves(tmp_path: Path) -> None:
    drawn = render_comparison(read_comparison(written(tmp_path / "c")))
    assert "fit&lt;b is better than off by 44 %" in drawn
    assert "<b" not in drawn
    assert "mean over seeds" in drawn
    assert "<code>main.py &#39;a b&#39;</code>" in drawn
    assert "evaluations" in drawn


def test_a_folder_that_is_broken_is_refused_in_one_line(tmp_path: Path) -> None:
    no_metrics = '{"runs": {"off": {}}, "seeds": [1], "command": [], "metrics": []}'
    for text in ("", "[]", "{}", '{"runs": {}, "seeds": [1], "command": []}', '{"runs": 3}', no_metrics):
        (tmp_path / "comparison.json").write_text(text)
        with pytest.raises(AceError, match="comparison.json .*run 'ace-patch compare' again"):
            read_comparison(tmp_path)


def test_a_comparison_without_results_is_reported(tmp_path: Path) -> None:
    comparison = Comparison("egno", ("m.py",), {"off": {}}, (1,), (Metric("test", ""),))
    Store(comparison, tmp_path).describe(threads=1)
    assert Trial("off", 1) not in Store(comparison, tmp_path).load()
    assert "No run has finished yet." in render_comparison(read_comparison(tmp_path))


def test_report_of_a_comparison(tmp_path: Path) -> None:
    folder = written(tmp_path / "c")
    done = CliRunner().invoke(cli, ["report", str(folder)])
    assert done.exit_code == 0
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert "egno: off, fit&lt;b" in page
    assert "<h2>fit&lt;b seed 1</h2>" in page, "the trace of a run is in it too"
    done = CliRunner().invoke(cli, ["report", str(folder), "--text"])
    assert "fit<b is better than off by 44 %" in done.stdout
    told = json.loads(CliRunner().invoke(cli, ["report", str(folder), "--json"]).stdout)
    assert told["comparisons"][0]["runs"][0]["mean"] == pytest.approx(1.2)
    assert len(told["runs"]) == 1
