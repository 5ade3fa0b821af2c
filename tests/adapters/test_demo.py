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


def run(*arguments: str, folder: Path) -> Result:
    picture = str(folder / "picture.png")
    return CliRunner().invoke(demo, ["--picture", picture, "--device", "cpu", *arguments])


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("demo")
    result = run("--molecules", "36", "--epochs", "2", "--json", folder=folder)
    assert result.exception is None
    assert result.exit_code == 0
    parsed: dict[str, Any] = json.loads(result.stdout)
    return parsed


def test_json_has_the_three_runs(report: dict[str, Any]) -> None:
    upstream, strict, resilient = report["runs"]
    assert [entry["name"] for entry in report["runs"]] == ["upstream", "ACE strict", "ACE resilient"]
    assert report["molecules"] == {"train": 24, "validation": 6, "test": 6}
    assert report["steps"] == 4
    assert upstream["sites"] == []
    assert upstream["test_mae"]["f_eq+gamma*f_neq"] is None
    for entry in (strict, resilient):
        assert [site["name"] for site in entry["sites"]] == [f"interactions.{n}" for n in range(6)]
    assert [site["gamma"] for site in strict["sites"]] == [0.0] * 6
    assert (upstream["deployed"], strict["deployed"]) == ("f_eq", "f_eq")
    assert resilient["deployed"] == "f_eq+gamma*f_neq"


def test_the_deployed_model_is_what_selects_the_epoch(report: dict[str, Any]) -> None:
    for entry in report["runs"]:
        best = min(entry["validation_curve"])
        assert entry["validation_curve"].index(best) == entry["best_epoch"] - 1
        assert entry["validation_mae"][entry["deployed"]] == pytest.approx(best, rel=1e-4)


def test_only_resilient_deploys_a_model_that_is_not_equivariant(report: dict[str, Any]) -> None:
    upstream, strict, resilient = (entry["equivariance_error"] for entry in report["runs"])
    assert upstream < 1e-3
    assert strict < 1e-3
    assert resilient > 1e-2


def test_the_picture_is_a_png(report: dict[str, Any]) -> None:
    assert Path(report["picture"]).read_bytes().startswith(b"\x89PNG\r\n")


def test_a_line_for_every_epoch_where_there_is_no_terminal(tmp_path: Path) -> None:
    result = run("--molecules", "30", "--epochs", "2", folder=tmp_path)
    told = [line for line in result.stderr.splitlines() if line.startswith("SchNet, epoch")]
    assert [line.partition(",")[2].partition(",")[0] for line in told] == [" epoch 1/2", " epoch 2/2"]
    assert all(name in told[0] for name in command.MODES)


def test_the_picture_has_the_validation_curves(report: dict[str, Any], tmp_path: Path) -> None:
    device = torch.device("cpu")
    runs = [training.start(name, command.settings(mode, 90), 90, 0, device) for name, mode in command.MODES.items()]
    for each, error in zip(runs, (3.0, 2.0, 1.0), strict=True):
        each.curve += [error, error / 2]
        each.record()
    picture.draw(runs, "title", "validation MAE (bohr^3)", tmp_path / "curves.svg")
    drawn = (tmp_path / "curves.svg").read_text()
    assert "validation MAE (bohr^3)" in drawn
    assert all(f"<!-- {name} -->" in drawn for name in command.MODES)


def test_the_table_fits_and_no_global_state_is_left(tmp_path: Path) -> None:
    threads, stream = torch.get_num_threads(), torch.random.get_rng_state()
    result = run("--molecules", "30", "--epochs", "1", "--target", "gap", folder=tmp_path)
    assert result.exception is None
    for words in ("Errors in Hartree", "upstream", "ACE strict", "ACE resilient", "Strict: ", "Resilient: "):
        assert words in result.stdout
    assert "…" not in result.stdout
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.random.get_rng_state(), stream)
    assert [path.name for path in tmp_path.iterdir()] == ["picture.png"]


def test_the_runs_start_from_the_same_upstream_weights() -> None:
    models = [
        training.start(name, command.settings(mode, 90), 90, 5, torch.device("cpu")).model
        for name, mode in command.MODES.items()
    ]
    plain = models[0].state_dict()
    for model in models[1:]:
        state = model.state_dict()
        assert all(torch.equal(state[key], value) for key, value in plain.items())


def test_standardising_uses_training_molecules_only() -> None:
    data = qm9.load(60, "u0", 0)
    task = training.standardise(data, torch.device("cpu"))
    changed = data.y.clone()
    changed[task.test] += 1000.0
    other = training.standardise(qm9.Molecules(data.z, data.pos, changed, data.sizes, data.rows), torch.device("cpu"))
    assert other.scale == task.scale
    assert torch.equal(other.data.y[task.train], task.data.y[task.train])
    assert torch.equal(torch.cat([task.train, task.validation, task.test]), torch.arange(60))
    assert float(task.data.y[task.train].std()) == pytest.approx(1.0, abs=1e-4)


def results(strict: float, resilient: float) -> list[training.Result]:
    return [
        training.Result("upstream", 1, (1.0, None), (1.0, None), 0, 1.0, 0.0),
        training.Result("ACE strict", 1, (strict, strict), (strict, strict), 0, 1.0, 0.0),
        training.Result("ACE resilient", 1, (9.0, resilient), (9.0, resilient), 1, 1.0, 0.1),
    ]


@pytest.mark.parametrize(
    ("value", "words"),
    [(0.9, "0.9, 10.0 % lower"), (1.2, "1.2, 20.0 % higher"), (1.0, "1, the same"), (float("nan"), "diverged")],
)
def test_the_comparison_says_what_the_numbers_say(value: float, words: str) -> None:
    plain, strict, resilient = results(value, value)
    assert command._compare(strict, plain) == f"ACE strict {words}"
    assert command._compare(resilient, plain) == f"ACE resilient {words}"


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
def test_mistakes_are_told_before_training(arguments: list[str], message: str, tmp_path: Path) -> None:
    result = run(*arguments, folder=tmp_path)
    assert isinstance(result.exception, ConfigError)
    with pytest.raises(ConfigError, match=message):
        raise result.exception


def test_what_is_missing_is_told_with_the_extra_that_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"matplotlib.*adapters/schnet\[demo\]"):
        check_picture(Path("x.png"), qm9.INSTALL)

    def missing(name: str) -> Any:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.distribution", missing)
    with pytest.raises(AdapterError, match=r"qm9pack.*adapters/schnet\[demo\]"):
        qm9.load(40, "alpha", 0)


def test_a_tie_is_called_a_tie() -> None:
    def told(value: float, steps: int = 1500, tested: int = 500) -> str:
        return command._caution(results(value, 1.01), steps, tested)

    assert "a tie" in told(0.98)
    for value in (0.8, 1.2, float("nan")):
        assert "one seed" in told(value)
        assert "a tie" not in told(value)
    for few in (told(0.98, tested=50), told(0.98, steps=50)):
        assert "not meaningful" in few


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
