"""Parsing of runs, seeds and metrics, and reading metrics from the output of a script."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ace_plugins import AceError
from ace_plugins.adapter import Metric
from ace_plugins.compare.experiment import compile_pattern, parse_metric, parse_runs, parse_seeds
from ace_plugins.compare.trial import MetricReader


def test_names_and_settings() -> None:
    runs = parse_runs("off, strict,mine:horizon=0.1,rho=2x,spectral_norm=yes,resilient")
    assert list(runs) == ["off", "strict", "mine", "resilient"]
    assert runs["mine"] == {"horizon": 0.1, "rho": "2x", "spectral_norm": True}
    assert runs["off"] == {"mode": "off"}
    assert runs["resilient"] == {"mode": "resilient"}
    assert parse_runs({"off": {}, "mine": {"horizon": 0.1}}) == {"off": {"mode": "off"}, "mine": {"horizon": 0.1}}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("off,off", "run 'off' is given twice"),
        ("strct", "unknown run 'strct': .*did you mean 'strict'"),
        ("a b:mode=off", "run 'a b': expected a name of letters"),
        ("", "run '': expected a name"),
        ("mine:horizn=1", "run 'mine': unknown setting 'horizn': .*did you mean 'horizon'"),
        ("mine:horizon", "run 'mine': expected key=value with different keys, found 'horizon'"),
        ("mine:horizon=", "run 'mine': expected key=value with different keys, found 'horizon='"),
        ("mine:horizon=x", "run 'mine': horizon 'x': expected a finite number above 0"),
        ("mine:horizon=1,horizon=2", "run 'mine': expected .*different keys, found 'horizon=1,horizon=2'"),
        ("mode=off", "unknown run 'mode=off'|run 'mode=off': expected a name"),
    ],
)
def test_mistakes_in_runs(text: str, told: str) -> None:
    with pytest.raises(AceError, match=told):
        parse_runs(text)


def test_seeds() -> None:
    assert parse_seeds("3") == (1, 2, 3)
    assert parse_seeds("7,11") == (7, 11)
    assert parse_seeds("7,") == (7,)
    assert parse_seeds("0,") == (0,)


@pytest.mark.parametrize("text", ["0", "-1", "x", "1,1", "1,-2", "", "1,,2", "1,,", ",", "100000000"])
def test_mistakes_in_seeds(text: str) -> None:
    with pytest.raises(AceError, match="expected a number of seeds"):
        parse_seeds(text)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("test=MAE: ([0-9", "metric 'test': .* is not a regular expression"),
        ("test=MAE: [0-9.]+", "metric 'test': .*found 0 groups"),
        ("test=(MAE): ([0-9.]+)", "metric 'test': .*found 2 groups"),
    ],
)
def test_mistakes_in_metrics(text: str, told: str) -> None:
    with pytest.raises(AceError, match=told):
        compile_pattern(metric := parse_metric(text), metric.pattern)


def test_a_metric_with_and_without_a_name() -> None:
    assert parse_metric(r"val loss=loss=(\d+)") == Metric("val loss", r"loss=(\d+)")
    assert parse_metric("test=MAE {number}") == Metric("test", "MAE {number}")
    assert parse_metric(r"(?:loss)=(\d+)", higher=True) == Metric("metric", r"(?:loss)=(\d+)", higher=True)


@given(st.lists(st.floats(allow_nan=False, width=32), min_size=1, max_size=8))
def test_the_last_match_counts_and_curves_have_all(values: list[float]) -> None:
    metric = Metric("test", r"best (\S+)", r"now (\S+)")
    reading = MetricReader([metric])
    for number, value in enumerate(values):
        reading.feed(f"Epoch: {number + 1} now {value!r} best {min(values[: number + 1])!r}\n", float(number))
    assert reading.values == {"test": min(values)}
    assert reading.curves == {"test": [[number, value] for number, value in enumerate(values)]}
    assert reading.epoch == len(values)


@pytest.mark.parametrize("text", ["-", "high,", "9" * 5000, "1e999", "n/a"])
def test_what_is_no_number_is_skipped(text: str) -> None:
    reading = MetricReader([Metric("test", r"MAE: (\S+)")])
    reading.feed("epoch 3 MAE: 0.5\n", 1.0)
    reading.feed(f"epoch {'9' * 5000} MAE: {text}\n", 2.0)
    assert (reading.values, reading.curves, reading.epoch) == ({"test": 0.5}, {"test": [[1.0, 0.5]]}, 3)


def test_what_is_printed_as_not_finite_is_kept() -> None:
    reading = MetricReader([Metric("test", "MAE: {number}")])
    for text in ("nan", "inf", "-inf"):
        reading.feed(f"MAE: {text}\n", 1.0)
        assert str(reading.values["test"]) == text
