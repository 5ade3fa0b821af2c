"""The trace of a run: lines, events and errors, in every way that a run ends."""

from __future__ import annotations

import copy
import gc
import itertools
import json
import os
import signal
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from clones import python
from toy import Free, Layered

from ace_plugins import AceError, AceWarning, attach, equivariance_error, project, read_trace
from ace_plugins.adapter import hookimpl
from ace_plugins.engine.step import STEPS
from ace_plugins.plugins.registry import registry
from ace_plugins.report.record import RECORDER
from ace_plugins.report.terminal import print_report
from ace_plugins.report.trace import read_run


def train(model: Any, steps: int, *args: Any) -> None:
    optimizer = torch.optim.Adam(model.parameters())
    args = args or (torch.randn(8, 3),)
    for _ in range(steps):
        optimizer.zero_grad()
        model(*args).square().mean().backward()
        optimizer.step()


def runs(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "runs").glob("*"))


def test_every_tenth_step_and_the_last(tmp_path: Path) -> None:
    model = attach(Layered(), mode="bounded", eval_branches="off")
    assert runs(tmp_path) == [], "a model that is not trained leaves nothing"
    train(model, 25)
    (folder,) = runs(tmp_path)
    assert folder.name.endswith("-layered")
    assert [line["step"] for line in read_trace(folder)] == [1, 10, 20]
    gamma = model.ace.gamma.tolist()
    project(model)
    last = read_trace(folder)[-1]
    assert (last["step"], last["finished"], last["gamma"]) == (25, True, gamma)
    about = json.loads((folder / "run.json").read_text())
    assert (about["adapter"], about["config"]["mode"]) == ("layered", "bounded")
    assert about["sites"] == ["layers.0", "layers.1", "layers.2"]


def test_a_long_trace_is_thinned_and_keeps_events_and_landings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ace_plugins.report.record.MOST_LINES", 20)
    torch.manual_seed(0)
    model = attach(Layered(), "layered", loop="paced", mode="strict", budget=400, trace_every=1)
    record = RECORDER.get_record(model)
    train(model, 30)
    assert (record.lines, record.every) == (len(read_trace(runs(tmp_path)[0])), 2)
    earlier = {key: value.clone() for key, value in model.state_dict().items()}
    train(model, 1)
    model.load_state_dict(earlier)
    train(model, 600)
    project(model)
    (folder,) = runs(tmp_path)
    lines = read_trace(folder)
    steps = [line["step"] for line in lines]
    assert len(lines) <= 20
    assert (steps[0], steps[-1]) == (1, 631), "the ends stay"
    assert max(b - a for a, b in itertools.pairwise(steps)) <= 2 * record.every, "no gap"
    assert [line["step"] for line in lines if "event" in line], "the loaded checkpoint"
    assert read_run(folder).landed_at == record.landed_at
    assert not list(folder.glob(".*.part"))


def test_a_dropped_model_still_gets_its_last_line(tmp_path: Path) -> None:
    def main() -> None:
        train(attach(Layered()), 3)

    main()
    gc.collect()
    (folder,) = runs(tmp_path)
    assert [(line["step"], line.get("finished", False)) for line in read_trace(folder)] == [(1, False), (3, True)]


def test_two_models_two_folders_and_off_switches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models = [attach(Layered()), attach(Layered())]
    for model in models:
        train(model, 1)
    assert len(runs(tmp_path)) == 2
    train(attach(Layered(), trace=False), 1)
    monkeypatch.setenv("ACE_TRACE", "0")
    train(attach(Layered()), 1)
    monkeypatch.setenv("ACE_TRACE", "1")
    monkeypatch.setenv("RANK", "1")
    train(attach(Layered()), 1)
    assert len(runs(tmp_path)) == 2


def test_a_folder_that_cannot_be_written_costs_no_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ACE_RUNS", str(tmp_path / "file" / "runs"))
    model = attach(Layered())
    with pytest.warns(AceWarning, match="no trace .*training continues"):
        train(model, 12)


def test_the_equivariance_error_is_measured_where_it_is_asked_for(tmp_path: Path) -> None:
    """On the batch of that step, with the branches, in every mode; and training does not notice."""
    torch.manual_seed(0)
    plain = Layered()
    gammas = []
    for every in (0, 10):
        torch.manual_seed(1)
        model = attach(copy.deepcopy(plain), mode="resilient", spectral_norm=True, trace_every=4, error_every=every)
        train(model, 25)
        gammas.append(model.ace.gamma.tolist())
    assert gammas[0] == gammas[1]
    without, measured = (read_trace(folder) for folder in runs(tmp_path))
    assert not any("error" in line for line in without)
    assert [(line["step"], "error" in line) for line in measured] == [
        *((step, step in (1, 10, 20)) for step in (1, 4, 8, 10, 12, 16, 20, 24))
    ]
    torch.manual_seed(1)
    again = attach(copy.deepcopy(plain), mode="resilient", spectral_norm=True, trace=False)
    optimizer, x = torch.optim.Adam(again.parameters()), torch.randn(8, 3)
    again(x).square().mean().backward()
    optimizer.step()
    expected = equivariance_error(again, x, branches_on=True)
    assert measured[0]["error"] == expected.to_dict()
    assert expected.relative > 1e-3


def test_the_batch_is_as_it_was_in_the_forward(tmp_path: Path) -> None:
    model = attach(Layered(), error_every=1, trace_every=1)
    optimizer, x = torch.optim.SGD(model.parameters(), lr=0.0), torch.randn(8, 3)
    expected = equivariance_error(model, x, branches_on=True)
    model(x).square().mean().backward()
    x.fill_(1e6)
    optimizer.step()
    assert read_trace(runs(tmp_path)[0])[0]["error"]["relative"] == pytest.approx(expected.relative, rel=1e-3)
    assert model.ace.passes.batch is None
    with torch.no_grad():
        model(x)
    model.eval()(x)
    assert model.ace.passes.batch is None, "only what is trained on"


class Odd(Layered):
    def forward(self, x: torch.Tensor, more: Any = None) -> torch.Tensor:
        return super().forward(x)


def test_a_frozen_gamma_keeps_no_batch() -> None:
    model = attach(Layered(), error_every=1)
    model.ace.gamma.requires_grad_(False)
    train(model, 2)
    assert model.ace.passes.batch is None


@pytest.mark.parametrize(
    ("model", "adapter", "args", "reason"),
    [
        (Odd(), "layered", (torch.ones(4, 3), (i for i in range(3))), "Odd cannot be measured: .*generator"),
        (Free(torch.ones(2), 1), "free", (torch.ones(4, 1),), "Free cannot be measured: "),
    ],
)
def test_an_error_that_cannot_be_measured_is_reported_once(
    tmp_path: Path, model: Any, adapter: str, args: Any, reason: str
) -> None:
    """A batch that cannot be copied, and an adapter that knows no group."""
    attach(model, adapter, error_every=1)
    with pytest.warns(AceWarning, match=f"the equivariance error of {reason}.*training continues") as caught:
        train(model, 3, *args)
    assert len(caught) == 1
    assert [line["step"] for line in read_trace(runs(tmp_path)[0])] == [1, 2, 3]


def test_values_that_are_not_finite_are_null(tmp_path: Path) -> None:
    model = attach(Layered())
    train(model, 1)
    with torch.no_grad():
        model.ace.gamma[1] = float("nan")
    with pytest.warns(AceWarning, match="not finite in 9 of 10 steps"):
        train(model, 9)
    assert read_trace(runs(tmp_path)[0])[-1]["gamma"][1] is None


def test_lines_survive_a_kill(tmp_path: Path) -> None:
    code = (
        "import os, signal, torch\n"
        "from toy import ADAPTERS, Layered\n"
        "from ace_plugins import attach\n"
        "from ace_plugins.plugins.registry import registry\n"
        "registry().add(ADAPTERS['layered'](), 'layered')\n"
        "m = attach(Layered(), trace_every=1); o = torch.optim.SGD(m.parameters(), lr=.01)\n"
        "for i in range(7):\n"
        "    o.zero_grad(); m(torch.randn(4, 3)).square().mean().backward(); o.step()\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = python(Path(__file__).parents[1], "-c", code, ACE_RUNS=str(tmp_path / "runs"))
    assert done.returncode == -signal.SIGKILL
    (folder,) = runs(tmp_path)
    assert [line["step"] for line in read_trace(folder)] == [1, 2, 3, 4, 5, 6, 7]
    with (folder / "trace.jsonl").open("a") as file:
        file.write('{"step": 8, "gam')
    assert len(read_trace(folder)) == 7, "a torn last line is left out"


def test_a_forked_child_does_not_end_the_run(tmp_path: Path) -> None:
    model = attach(Layered())
    train(model, 2)
    child = os.fork()
    if child == 0:  # must never return to pytest
        try:
            STEPS.finish()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    (folder,) = runs(tmp_path)
    assert not any("finished" in line for line in read_trace(folder))


def test_project_frees_the_branches(tmp_path: Path) -> None:
    model = attach(Layered())
    train(model, 2)
    ace = weakref.ref(model.ace)
    project(model)
    gc.collect()
    assert ace() is None


def test_no_trace_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(AceError, match="expected trace.jsonl"):
        read_trace(tmp_path)


def test_observers_hear_everything() -> None:
    heard: list[Any] = []

    class Listener:
        @hookimpl
        def ace_attached(self, model: Any) -> None:
            heard.append("attached")

        @hookimpl
        def ace_stepped(self, step: int) -> None:
            heard.append(step)

        @hookimpl
        def ace_finished(self) -> None:
            heard.append("finished")

    registry().add(Listener(), "listener")
    try:
        model = attach(Layered())
        train(model, 3)
        project(model)
    finally:
        registry().remove("listener")
    assert heard == ["attached", 1, 2, 3, "finished"]


def test_a_line_has_the_loss_its_gradient_at_gamma_and_the_rates(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model: Any = attach(Layered(), trace_every=1)
    rest = [p for name, p in model.named_parameters() if not name.startswith("layers")]
    optimizer = torch.optim.Adam([{"params": model.layers.parameters(), "lr": 0.5}, {"params": rest}])
    printed, gradients = [], []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(torch.randn(8, 3)).square().mean()
        loss.backward()
        printed.append(loss.item())
        gradients.append(model.ace.gamma.grad.tolist())
        optimizer.step()
    lines = trace_of(model)
    assert [line["loss"] for line in lines] == printed
    assert [line["gradient"] for line in lines] == gradients
    assert [line["lr"] for line in lines] == [[0.5, 1e-3]] * 3


@pytest.mark.parametrize("steps", [1, 9, 10])
def test_the_last_line_has_the_loss_of_the_last_step_once(steps: int, capsys: pytest.CaptureFixture[str]) -> None:
    model: Any = attach(Layered())
    train(model, steps)
    last = float(model.ace.session.observed.loss)
    record = RECORDER.get_record(model)
    project(model)
    assert record.folder is not None
    curve = read_run(record.folder).curve("loss")
    assert [step for step, _ in curve] == {1: [1], 9: [1, 9], 10: [1, 10]}[steps]
    assert curve[-1][1] == pytest.approx(last)
    print_report(read_run(record.folder))
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("loss: ")]
    assert len(line.split()) == (2 if steps == 1 else 4)


def trace_of(model: Any) -> list[dict[str, Any]]:
    folder = RECORDER.get_record(model).folder
    assert folder is not None
    return read_trace(folder)


def test_the_loss_is_the_scripts_own_under_a_grad_scaler() -> None:
    torch.manual_seed(0)
    model = attach(Layered(), trace_every=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    loss = model(torch.randn(8, 3)).square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    assert trace_of(model)[0]["loss"] == loss.item()


def test_what_is_no_loss_is_not_taken_for_one() -> None:
    model = attach(Layered(), trace_every=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    model(torch.randn(8, 3)).backward(torch.ones(8, 1))
    optimizer.step()
    assert "loss" not in trace_of(model)[0]


def test_the_trace_never_runs_backwards() -> None:
    """A checkpoint of an earlier step is loaded: training goes on from it, or it is what is tested in the end."""
    torch.manual_seed(0)
    model = attach(Layered(), trace_every=1)
    train(model, 3)
    kept = copy.deepcopy(model.state_dict())
    train(model, 3)
    model.load_state_dict(kept)
    train(model, 2)
    lines = trace_of(model)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [line.get("event") for line in lines] == [None] * 6 + ["a checkpoint of step 3 was loaded", None]
    model.load_state_dict(kept)
    folder = RECORDER.get_record(model).folder
    assert folder is not None
    project(model)
    last = read_trace(folder)[-1]
    assert (last["step"], last["finished"], last["event"]) == (8, True, "a checkpoint of step 3 was loaded")


def test_contents_of_a_record() -> None:
    torch.manual_seed(123)
    model = attach(Layered())
    train(model, 1)
    folder = RECORDER.get_record(model).folder
    assert folder is not None
    about = json.loads((folder / "run.json").read_text())
    assert about["seed"] == 123
    assert about["versions"]["torch"] == torch.__version__
    assert about["versions"]["ace-plugins"]


def test_torn_lines_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "trace.jsonl").write_bytes(b'{"step": 1}\n{"st\n\xff\xfe\n3\n{"step": 2}\n{"step": 3')
    assert read_trace(tmp_path) == [{"step": 1}, {"step": 2}]
