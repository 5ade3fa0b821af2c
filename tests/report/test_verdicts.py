"""Verdicts of mode auto, which are outcomes of its test, and those of other modes, which are states of a branch."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ace_plugins import Config
from ace_plugins.report.verdicts import TEST, RunOutcome, explain, judge

AUTO = Config(mode="auto", loop="paced")
OTHERS = [Config(mode="strict"), Config(mode="bounded", spectral_norm=True), Config(mode="resilient", loop="paced")]
OTHERS += [Config(mode="strict", loop="paced"), Config(mode="scheduled")]


def outcome(config: Config, gamma: list[float], *, ended: bool = True, **more: Any) -> RunOutcome:
    names, zeros = [f"layers.{n}" for n in range(len(gamma))], [0.0] * len(gamma)
    line = {"step": 500, "gamma": gamma, "lambda": zeros, "u": zeros, **more.pop("test", {}), **more}
    return judge(config, names, line, ended=ended)


def words(config: Config, gamma: list[float], **more: Any) -> list[str]:
    return [site.verdict for site in outcome(config, gamma, **more).sites]


def sample_test(**rows: list[float]) -> dict[str, list[float]]:
    """The outcome of the test at one or more sites, by default: undecided, without evidence."""
    size = max((len(row) for row in rows.values()), default=1)
    usual = {"log_e": 0.0, "benefit": math.nan, "limit": math.nan, "kept": 0.0, "used": 1.0}
    assert usual.keys() == {*TEST}
    return {name: rows.get(name, [value] * size) for name, value in usual.items()}


@pytest.mark.parametrize("config", OTHERS, ids=lambda config: f"{config.mode}-{config.loop}")
def test_modes_without_a_test_only_state_what_became_of_the_branch(config: Config) -> None:
    left = "moving" if config.lands else "kept"
    for gamma in (0.9, 0.0, -0.001):
        assert words(config, [0.0, gamma], landed=[0]) == ["landed", left]
    assert words(config, [0.9, 0.9], unused=[1]) == [left, "unused"]
    for verdict in ("landed", left):
        assert "breaks the symmetry" not in explain(verdict, config.mode).replace("tests if the data breaks", "")


def test_a_verdict_of_mode_auto_is_the_outcome_of_its_test() -> None:
    test = sample_test(
        kept=[1.0, 0.0, 0.0], log_e=[9.0, 1.0, 0.0], benefit=[0.2, 0.001, 0.0], limit=[math.nan, 0.005, 0.02]
    )
    found = outcome(AUTO, [0.2, 0.0, 0.0], test=test, landed=[1, 2])
    assert [site.verdict for site in found.sites] == ["breaks", "fits", "undecided"]
    assert [site.p for site in found.sites] == pytest.approx([math.exp(-9), math.exp(-1), 1.0])
    assert "lower the loss together by 20 % (p < 0.001)" in found.meanings["breaks"]
    assert "at most 0.5 %" in found.meanings["fits"]
    assert "too few samples or steps" in found.meanings["undecided"]
    assert not found.exploring
    assert words(AUTO, [0.1, 0.1], test=sample_test(used=[0.0, 1.0])) == ["unused", "undecided"]


def test_before_the_decision_nothing_fits() -> None:
    found = outcome(AUTO, [0.1, 0.1], test=sample_test(limit=[-0.1, -0.1]), expected=1000)
    assert [site.verdict for site in found.sites] == ["undecided"] * 2
    assert found.exploring
    assert "before ACE could decide; set budget = 500" in found.advice
    assert "no decision up to this step" in found.meanings["undecided"]
    assert "train longer" in outcome(AUTO, [0.1], test=sample_test(), expected=1000, step=60).advice
    assert outcome(AUTO, [0.1], test=sample_test(), expected=1000, ended=False).advice == ""


@pytest.mark.parametrize("config", [AUTO, *OTHERS], ids=lambda config: f"{config.mode}-{config.loop}")
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_go_before_all_else(config: Config, bad: float) -> None:
    test = {"test": sample_test(kept=[1.0, 1.0])} if config.mode == "auto" else {}
    found = words(config, [0.5, bad], landed=[1], **test)
    assert found[1] == "diverged"
    assert found[0] != "diverged"
    assert words(config, [0.5, 0.5], diverged=True, landed=[0], **test) == ["diverged"] * 2
    assert "lower the learning rate" in explain("diverged", config.mode)


def test_every_verdict_is_explained_in_one_line() -> None:
    for word in ("landed", "moving", "kept", "unused", "diverged"):
        for mode in ("auto", "strict", "resilient"):
            assert explain(word, mode)
            assert "\n" not in explain(word, mode)
    assert explain("a word of another version", "strict") == ""


def test_results_of_an_earlier_checkpoint_are_called_so() -> None:
    assert "checkpoint of step 120 after step 500" in outcome(OTHERS[0], [0.5], loaded=120).advice


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from([AUTO, *OTHERS]),
    st.lists(st.floats(), min_size=1, max_size=5),
    st.sets(st.integers(0, 4)),
    st.integers(0, 10**6),
    st.none() | st.integers(1, 10**6),
    st.booleans(),
)
def test_no_run_is_too_odd(
    config: Config, gamma: list[float], landed: set[int], step: int, expected: int | None, ended: bool
) -> None:
    test = sample_test(log_e=gamma) if config.mode == "auto" else {}
    given = sorted(landed & {*range(len(gamma))})
    found = outcome(config, gamma, landed=given, step=step, expected=expected, ended=ended, test=test)
    for site, value in zip(found.sites, gamma, strict=True):
        assert (site.verdict == "diverged") == (not math.isfinite(value))
        assert found.meanings[site.verdict]
    assert ended or not found.advice
