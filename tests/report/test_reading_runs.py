"""Runs read back from their folders: finished, killed and partly unreadable."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from pathlib import Path

import pytest
from traces import write_run

from ace_plugins import AceError, attach
from ace_plugins.report.trace import find_run, read_run
from ace_plugins.report.verdicts import judge_saved
from ace_plugins.settings.config import Config


def lines(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "trace.jsonl").read_text().splitlines()]


def rewrite(folder: Path, told: list[dict[str, object]]) -> None:
    (folder / "trace.jsonl").write_text("".join(json.dumps(line) + "\n" for line in told))


def test_a_whole_run_is_read_and_nothing_is_missing(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "a", sites=3, lines=20))
    assert (run.title, run.length, run.duration, run.missing) == ("egno, resilient", 200, 10.0, [])
    assert len(run.lines) == 21
    assert [len(site) for site in run.per_site("gamma")[1]] == [21, 21, 21]
    assert run.changed == {"mode": "resilient", "loop": "paced", "rho": "2x"}
    assert run.group == "SE(3)"
    assert len(run.curve("loss")) == 21


def test_a_killed_run_with_a_line_half_written(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", lines=20, finished=False)
    with (folder / "trace.jsonl").open("a") as file:
        file.write('{"step": 210, "gam')
    run = read_run(folder)
    assert run.length == 200
    cut, ended = run.missing
    assert "left out: 1" in cut
    assert "after step 200" in ended


def test_garbage_in_the_middle_is_left_out_and_reported(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", lines=20)
    path = folder / "trace.jsonl"
    before = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*before[:5], b"\xff\xfe{]\n", b"3\n", *before[5:]]))
    run = read_run(folder)
    assert len(run.lines) == 21
    (note,) = run.missing
    assert "left out: 2" in note


@pytest.mark.parametrize("text", [None, "{", "[]", '{"sites": ["a"]}'])
def test_a_run_without_its_description_is_refused(tmp_path: Path, text: str | None) -> None:
    folder = write_run(tmp_path / "a", sites=2)
    (folder / "run.json").unlink() if text is None else (folder / "run.json").write_text(text)
    with pytest.raises(AceError, match="run.json"):
        read_run(folder)


@pytest.mark.parametrize(
    "changed", [{"nupi_kp": 1.0}, {"horizon": "long"}, {"mode": "lenient"}], ids=["removed", "value", "mode"]
)
def test_a_run_of_another_version_is_refused(tmp_path: Path, changed: dict[str, object]) -> None:
    config = dataclasses.asdict(Config(mode="strict"))
    assert read_run(write_run(tmp_path / "a", config=config)).config == Config(mode="strict")
    with pytest.raises(AceError, match=r"run\.json .*this version"):
        read_run(write_run(tmp_path / "b", config=config | changed))


def test_a_setting_that_is_newer_than_the_run_has_its_default(tmp_path: Path) -> None:
    assert read_run(write_run(tmp_path / "a", config={"mode": "strict"})).config == Config(mode="strict")


def test_values_that_are_not_finite_are_reported_and_judged(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", sites=2, lines=30)
    told = lines(folder)
    for line in told[20:]:
        line["gamma"] = [None, *line["gamma"][1:]]  # type: ignore[index]
        line["loss"] = None
    rewrite(folder, told)
    run = read_run(folder)
    assert math.isnan(run.last("gamma")[0])
    assert judge_saved(run).sites[0].verdict == "diverged"


def test_lines_without_lambda_cannot_be_read(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", sites=2, lines=20)
    whole = lines(folder)
    rewrite(folder, [{key: value for key, value in line.items() if key != "lambda"} for line in whole[:5]] + whole[5:])
    run = read_run(folder)
    assert len(run.lines) == 16
    assert "left out: 5" in run.missing[0]


def test_an_empty_folder_of_a_run_is_reported(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a")
    (folder / "trace.jsonl").write_text("")
    assert read_run(folder).missing == ["trace.jsonl has no lines"]
    (folder / "trace.jsonl").unlink()
    assert read_run(folder).missing == ["trace.jsonl has no lines"]
    assert read_run(folder).length == 0


def test_a_run_that_has_not_ended_gets_no_advice(tmp_path: Path) -> None:
    found = judge_saved(read_run(write_run(tmp_path / "b", sites=2, mode="strict", finished=False)))
    assert [layer.verdict for layer in found.sites] == ["landed", "moving"]
    assert found.advice == ""


def test_a_real_run_is_read_as_it_was_written(tmp_path: Path) -> None:
    import torch
    from toy import Layered

    from ace_plugins.report.record import RECORDER

    model = attach(Layered(), mode="strict", loop="paced", budget=60)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    x = torch.randn(8, 3)
    for _ in range(60):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    record = RECORDER.get_record(model)
    told = record.to_dict()
    record.finish()
    run = read_run(find_run(None))
    found = judge_saved(run)
    assert run.missing == []
    assert [layer.verdict for layer in found.sites] == [site["verdict"] for site in told["sites"]]
    assert found.advice == told["verdict"]


def test_the_pace_is_that_of_this_process_and_the_time_left_that_of_late(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", sites=1, lines=2, mode="strict", finished=False)
    landed = [[], [], [0], [0], [0]]
    seconds = [0.01, 10.0, 20.0, 25.0, 30.0]
    told = [
        {"step": step, "seconds": at, "gamma": [0.1], "lambda": [0.0], "u": [0.0], "landed": sites, "budget": 200}
        for step, at, sites in zip((101, 110, 120, 130, 140), seconds, landed, strict=True)
    ]
    rewrite(folder, told)
    run = read_run(folder)
    assert run.progress == "landed at step 120, now 140 of 200 steps"
    assert run.rate == pytest.approx(40 / 30)
    assert run.left == pytest.approx(60 / 2)
    rewrite(folder, told[2:])
    assert read_run(folder).progress == "landed, now 140 of 200 steps", "before this process"
    rewrite(folder, [*told, {**told[-1], "step": 210, "finished": True}])
    run = read_run(folder)
    assert (run.progress, run.left) == ("landed at step 120, 210 steps", None)


def test_the_newest_run_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = tmp_path / "work" / ".ace" / "runs"
    old, new = write_run(runs / "20260102-egno"), write_run(runs / "20260101-egno")
    for age, folder in ((100, old), (10, new)):
        stamp = (folder / "trace.jsonl").stat().st_mtime - age
        os.utime(folder / "run.json", (stamp, stamp))
    assert find_run(runs) == new, "by when it began, not by its name"
    assert find_run(tmp_path / "work") == new
    assert find_run(old) == old
    assert find_run(old / "trace.jsonl") == old
    monkeypatch.setenv("ACE_RUNS", str(runs))
    assert find_run(None) == new


def test_what_is_no_run_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(AceError, match=r"no runs in .*trace.jsonl"):
        find_run(None)
    with pytest.raises(AceError, match="no runs in nowhere"):
        find_run(Path("nowhere"))
    with pytest.raises(AceError, match="no runs in"):
        find_run(tmp_path)
