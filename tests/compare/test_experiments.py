"""Experiment files: those of this repository are valid, and errors in others are reported."""

from __future__ import annotations

from pathlib import Path

import pytest

from ace_plugins import AceError
from ace_plugins.compare.experiment import compile_pattern, read_experiments
from ace_plugins.compare.plan import SEED
from ace_plugins.compare.trial import MetricReader
from ace_plugins.plugins.registry import registry

FILES = sorted((Path(__file__).parents[2] / "experiments").glob("*.toml"))
GOOD = """
adapter = "segnn"
command = "main.py --epochs={epochs} --max_samples={samples}"
epochs = 50
[vary]
samples = [1000, 3000]
[runs.off]
[runs.slow]
mode = "strict"
horizon = 0.9
[paper.3000]
off = "5.6"
"""


BEST = "*** Best Val Loss: {} \t Best Test Loss: {} \t Best epoch 5"


def written(folder: Path, text: str) -> Path:
    path = folder / "x.toml"
    path.write_text(text)
    return path


def test_there_are_files() -> None:
    assert len(FILES) >= 9


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_file_is_sound(path: Path) -> None:
    for experiment in read_experiments(path, 0.1):
        plugin = registry().plugins[experiment.adapter]
        if plugin.problem is not None:
            pytest.skip(f"needs the adapter: {plugin.problem}")
        for settings in experiment.runs.values():
            plugin.resolve(options=settings)
        script = plugin.call("ace_script", argv=experiment.words) if plugin.has("ace_script") else None
        metrics = experiment.metrics or script.metrics
        assert metrics
        for metric in metrics:
            compile_pattern(metric, metric.pattern)
        assert set(experiment.about["paper"]) <= set(experiment.runs)
        assert {"title", "needs", "hours"} <= experiment.about.keys()
        assert not any("{" in word.replace(SEED, "") for word in experiment.words)


def test_what_varies_is_one_comparison_each(tmp_path: Path) -> None:
    small, large = read_experiments(written(tmp_path, GOOD), 0.1)
    assert small.words == ("main.py", "--epochs=5", "--max_samples=1000")
    assert (small.label, large.label) == ("samples 1000", "samples 3000")
    assert (small.about["paper"], large.about["paper"]) == ({}, {"off": "5.6"})
    assert large.runs == {"off": {"mode": "off"}, "slow": {"mode": "strict", "horizon": 0.9}}
    assert large.seeds == (1, 2, 3, 4, 5)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (("adapter =", "adaptr ="), "unknown key 'adaptr'.*did you mean 'adapter'"),
        (('adapter = "segnn"', ""), "the key 'adapter' is missing"),
        (("epochs = 50", ""), "{epochs} in the command"),
        (("epochs = 50", "epochs = 0"), "epochs: expected a whole number of at least 1, found 0"),
        (("[1000, 3000]", "[]"), "vary: expected one placeholder"),
        (("--max_samples={samples}", ""), "vary: expected {samples} in the command"),
        (("[runs.off]", "[runs.of]"), "unknown run 'of'.*did you mean 'off'"),
        (("horizon", "horizn"), "run 'slow': unknown setting 'horizn'"),
        (("[runs.off]", "[runs]\noff = 3"), "run 'off': expected a table of settings, found 3"),
        (('"segnn"', "segnn"), "x.toml is not valid TOML"),
        (("epochs = 50", "epochs = 50\nseeds = 0"), "seeds '0': expected a number of seeds"),
        (("[runs.off]", "[metrics.a]\npatern = 'x'\n[runs.off]"), "metrics: .*expected the key .pattern"),
    ],
)
def test_mistakes(tmp_path: Path, change: tuple[str, str], told: str) -> None:
    assert change[0] in GOOD
    with pytest.raises(AceError, match=told):
        read_experiments(written(tmp_path, GOOD.replace(*change)))


def test_a_grid(tmp_path: Path) -> None:
    first, _ = read_experiments(written(tmp_path, GOOD + "[grid]\nlr = [5e-4, 9e-4]\n"))
    assert first.grid == {"lr": ("0.0005", "0.0009")}
    with pytest.raises(AceError, match="two or more different values"):
        read_experiments(written(tmp_path, GOOD + "[grid]\nlr = [5e-4]\n"))


def test_a_file_without_epochs_cannot_be_scaled(tmp_path: Path) -> None:
    text = GOOD.replace("epochs = 50", "").replace("--epochs={epochs}", "")
    assert len(read_experiments(written(tmp_path, text))) == 2
    with pytest.raises(AceError, match="no epochs.*--budget-scale"):
        read_experiments(written(tmp_path, text), 0.5)


@pytest.mark.parametrize(
    ("adapter", "script", "lines", "expected"),
    [
        (
            "segnn",
            "main.py",
            ["==> val epoch 5 avg loss: 0.02", "==> test epoch 5 avg loss: 0.03", BEST.format(0.02, 0.03)],
            {"test": 0.03, "validation": 0.02},
        ),
        (
            "segnn",
            "main.py",
            ["VALIDATION: epoch: 3  step:  12  alpha-MAE:0.5", "TEST: epoch: 9  step:  40  alpha-MAE:0.4"],
            {"test": 0.4, "validation": 0.5},
        ),
        (
            "egno",
            "main_mocap_no.py",
            ["==> test epoch 5 avg loss: 1.2e+01 avg lploss: 0.0", BEST.format("nan", "1.2e+01")],
            {"test": 12.0, "validation": pytest.approx(float("nan"), nan_ok=True)},
        ),
        (
            "vn_dgcnn",
            "train_cls.py",
            ["Test Instance Accuracy: 0.5, Class Accuracy: 0.4", "Best Instance Accuracy: 0.75, Class Accuracy: 0.4"],
            {"accuracy": 0.75},
        ),
        (
            "vn_dgcnn",
            "train_partseg.py",
            ["Epoch 2 test Accuracy: 0.5  Class avg mIOU: 0.1", "Best accuracy is: 0.62500"],
            {"accuracy": 0.625},
        ),
    ],
)
def test_adapters_know_how_their_upstreams_print(
    adapter: str, script: str, lines: list[str], expected: dict[str, float]
) -> None:
    told = registry().adapter(adapter).call("ace_script", argv=(script,))
    reading = MetricReader(told.metrics)
    for line in lines:
        reading.feed(line + "\n", 1.0)
    assert reading.values == expected
    assert reading.curves[told.metrics[0].name]
