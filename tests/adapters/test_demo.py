"""The SchNet demo from end to end on a few molecules, and its conclusions."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

torch = pytest.importorskip("torch")
pytest.importorskip("matplotlib")
pytest.importorskip("torch_geometric")

from ace_plugins.adapter import AdapterError, ConfigError, check_picture
from ace_schnet.demo import command, picture, qm9, training
from ace_schnet.demo.command import demo

try:
    importlib.metadata.distribution("qm9pack")
except importlib.metadata.PackageNotFoundError:
    pytest.skip("qm9pack is not installed (pip install qm9pack)", allow_module_level=True)


FIELDS = (1.0, 0.0)


def run(*arguments: str, folder: Path) -> Result:
    picture = str(folder / "picture.png")
    return CliRunner().invoke(demo, ["--picture", picture, "--device", "cpu", "--jobs", "1", *arguments])


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("demo")
    result = run("--molecules", "36", "--epochs", "2", "--json", folder=folder)
    assert result.exception is None
    assert result.exit_code == 0
    parsed: dict[str, Any] = json.loads(result.stdout)
    return parsed


def test_json_has_both_runs_of_both_tasks(report: dict[str, Any]) -> None:
    runs = report["runs"]
    assert [(entry["field"], entry["name"]) for entry in runs] == [
        (field, name) for field in FIELDS for name in ("upstream", "ACE")
    ]
    for entry in runs:
        assert entry["molecules"] == [24, 6, 6]
        assert entry["steps"] == 4
        assert entry["curve"].index(min(entry["curve"])) == entry["best_epoch"] - 1
        assert entry["validation"] == pytest.approx(min(entry["curve"]), rel=1e-4)
        names = [site["name"] for site in entry["sites"]]
        assert names == ([] if entry["name"] == "upstream" else [f"interactions.{n}" for n in range(6)])


def test_upstream_has_no_preferred_axis(report: dict[str, Any]) -> None:
    for entry in report["runs"]:
        if entry["name"] == "upstream":
            assert entry["equivariance"] < 1e-3
            assert max(change for _, change in entry["turns"]) < 1e-3


def test_the_picture_is_a_png(report: dict[str, Any]) -> None:
    assert Path(report["picture"]).read_bytes().startswith(b"\x89PNG\r\n")


def test_two_processes_give_the_results_of_one(report: dict[str, Any], tmp_path: Path) -> None:
    result = run("--molecules", "36", "--epochs", "2", "--json", "--jobs", "2", folder=tmp_path)
    assert result.exception is None
    found = json.loads(result.stdout)
    assert [entry["test"] for entry in found["runs"]] == [entry["test"] for entry in report["runs"]]
    lines = [line for line in result.stderr.splitlines() if line.startswith("field")]
    assert sorted(line.partition(", validation")[0] for line in lines) == [
        f"field {field}, epoch {epoch}/2" for field in (0, 1) for epoch in (1, 2)
    ]
    assert all(name in lines[0] for name in training.RUNS)


def make_result(field: float, test: float, verdict: str = "", steps: int = 1500, tested: int = 500) -> training.Result:
    sites = [training.Site(f"interactions.{n}", verdict, 0.05, 0.01, 0.001) for n in range(2)] if verdict else []
    return training.Result(
        name="ACE" if verdict else "upstream",
        field=field,
        molecules=(2000, 500, tested),
        steps=steps,
        best_epoch=2,
        validation=test,
        test=test,
        seconds=1.0,
        equivariance=0.0,
        curve=[2 * test, test],
        gammas=[(0, [0.1, 0.1]), (9, [0.05, 0.05])] if verdict else [],
        sites=sites,
        turns=[(6.0, 0.1), (88.0, 1.5)] if verdict == "breaks" else [(6.0, 0.0), (88.0, 0.0)],
    )


def test_the_picture_has_the_curves_and_every_layer(tmp_path: Path) -> None:
    tasks = {field: [make_result(field, 0.8), make_result(field, 0.2, "breaks")] for field in FIELDS}
    picture.draw(tasks, "title", tmp_path / "curves.svg")
    drawn = (tmp_path / "curves.svg").read_text()
    for words in ("upstream", "ACE", "interactions.1", "no field", "field of strength 1"):
        assert f"<!-- {words} -->" in drawn


def test_the_tables_fit_and_no_global_state_is_left(tmp_path: Path) -> None:
    threads, stream = torch.get_num_threads(), torch.random.get_rng_state()
    result = run("--molecules", "30", "--epochs", "1", "--target", "gap", folder=tmp_path)
    assert result.exception is None
    for words in ("gap between HOMO and LUMO", "upstream", "interactions.5", "not meaningful"):
        assert words in result.stdout
    assert "…" not in result.stdout
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.random.get_rng_state(), stream)
    assert [path.name for path in tmp_path.iterdir()] == ["picture.png"]


def test_the_runs_start_from_the_same_upstream_weights() -> None:
    plain, ours = (
        training.start(name, settings, 90, 5, torch.device("cpu")).model.state_dict()
        for name, settings in training.RUNS.items()
    )
    assert all(torch.equal(ours[key], value) for key, value in plain.items())


def standardised(molecules: int, target: str = "u0", seed: int = 0) -> training.Task:
    return training.standardise(qm9.load(molecules, target, seed), torch.device("cpu"))


def test_standardising_uses_training_molecules_only() -> None:
    data, task = qm9.load(60, "u0", 0), standardised(60)
    changed = data.y.clone()
    changed[task.test] += 1000.0
    other = training.standardise(qm9.Molecules(data.z, data.pos, changed, data.sizes, data.rows), torch.device("cpu"))
    assert other.scale == task.scale
    assert torch.equal(other.data.y[task.train], task.data.y[task.train])
    assert torch.equal(torch.cat([task.train, task.validation, task.test]), torch.arange(60))
    assert float(task.data.y[task.train].std()) == pytest.approx(1.0, abs=1e-4)


def test_the_field_adds_the_energy_of_charges_molecule_by_molecule() -> None:
    task = standardised(40)
    energies = []
    for molecule in range(40):
        z, pos, _, _ = task.data.batch(torch.tensor([molecule]))
        heights = pos[:, 2] - pos[:, 2].mean()
        energies.append(sum(training.CHARGES[int(n)] * float(h) for n, h in zip(z, heights, strict=True)))
    energy = torch.tensor(energies)
    expected = (energy - energy[task.train].mean()) / energy[task.train].std()
    added = training.add_field(task, 0.5).data.y - task.data.y
    assert torch.allclose(added, 0.5 * expected, atol=1e-4)


def test_the_axis_that_is_left_is_found() -> None:
    class Height(torch.nn.Module):
        """A model that breaks the symmetry along z: charges times heights."""

        def forward(self, z: Any, pos: Any, batch: Any) -> Any:
            return pos.new_zeros(int(batch[-1]) + 1).index_add_(0, batch, z * pos[:, 2])

    z, pos, batch, _ = standardised(40).data.batch(torch.arange(20))
    turns = training.measure_turns(Height(), z, pos, batch)
    assert len(turns) == training.DIRECTIONS
    angle, least = min(((training.angle_to_field(axis), change) for axis, change in turns), key=lambda turn: turn[1])
    assert angle < 10
    assert least < 0.2 * max(change for _, change in turns)
    axes = torch.stack([axis for axis, _ in turns])
    assert torch.allclose(axes.norm(dim=1), torch.ones(len(axes)))


@pytest.mark.parametrize(
    ("field", "test", "verdict", "words"),
    [
        (1.0, 0.2, "breaks", ("0.25 times", "ACE wins", "2 of 2 branches", "6 degrees from the field")),
        (0.0, 0.81, "undecided", ("1.01 times", "a tie", "kept no branch")),
        (0.0, 1.2, "breaks", ("1.50 times", "ACE loses", "2 of 2 branches")),
        (1.0, float("nan"), "undecided", ("a run diverged",)),
    ],
)
def test_the_conclusion_agrees_with_the_numbers(field: float, test: float, verdict: str, words: tuple[str]) -> None:
    told, caution = command.conclude({field: [make_result(field, 0.8), make_result(field, test, verdict)]})
    assert all(word in told for word in words)
    assert "one seed" in caution


@pytest.mark.parametrize("few", [{"steps": 50}, {"tested": 50}])
def test_short_runs_are_not_compared(few: dict[str, int]) -> None:
    results = [make_result(1.0, 0.8, **few), make_result(1.0, 0.2, "breaks", **few)]
    (told,) = command.conclude({1.0: results})
    assert "not meaningful" in told


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--target", "alhpa"], "alhpa.*did you mean 'alpha'"),
        (["--molecules", "29"], "molecules 29.*at least 30"),
        (["--molecules", "200000"], "molecules 200000.*at most 130831"),
        (["--device", "tpu"], "device 'tpu'.*auto, cpu, cuda"),
        (["--picture", "demo.txt"], r"demo\.txt.*\.png"),
        (["--picture", "no/such/place/demo.png"], "folder"),
    ],
)
def test_mistakes_are_reported_before_training(arguments: list[str], message: str, tmp_path: Path) -> None:
    result = run(*arguments, folder=tmp_path)
    assert isinstance(result.exception, ConfigError)
    with pytest.raises(ConfigError, match=message):
        raise result.exception


def test_missing_packages_are_reported_with_their_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"matplotlib.*adapters/schnet\[demo\]"):
        check_picture(Path("x.png"), qm9.INSTALL)

    def missing(name: str) -> Any:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.distribution", missing)
    with pytest.raises(AdapterError, match=r"qm9pack.*adapters/schnet\[demo\]"):
        qm9.load(40, "alpha", 0)


def test_a_gpu_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = run("--device", "cuda", folder=tmp_path)
    assert isinstance(result.exception, ConfigError)
    assert "expected a GPU" in str(result.exception)


def test_help_does_not_import_torch() -> None:
    code = (
        "import sys; from ace_schnet.demo.command import demo; demo(['--help'], standalone_mode=False); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, capture_output=True).returncode == 0
