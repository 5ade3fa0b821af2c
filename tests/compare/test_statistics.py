"""Statistics over seeds and the sentences about them."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ace_plugins.adapter import Metric
from ace_plugins.compare.plan import TrialResult
from ace_plugins.compare.statistics import Row, compare_runs, summarise
from ace_plugins.statistics import t_interval, t_quantile

TEST = Metric("test", "(x)")


def results(**values: list[float]) -> list[TrialResult]:
    return [TrialResult(run, seed, {"test": v}) for run, all_ in values.items() for seed, v in enumerate(all_, 1)]


def told(metric: Metric = TEST, **values: list[float]) -> list[str]:
    names = list(values)
    return [each.sentence() for each in compare_runs(summarise(results(**values), names, [metric]), names[0], metric)]


def test_better_beyond_the_noise() -> None:
    (sentence,) = told(off=[1.0, 2.0, 4.0], strict=[0.5, 1.1, 2.3])
    assert sentence == "strict is better than off by 46 % (95 % interval 35 % to 55 %; better in 3 of 3 seeds)"


def test_worse_beyond_the_noise() -> None:
    (sentence,) = told(off=[1.0, 1.0], strict=[1.04, 1.041])
    assert sentence == "strict is worse than off by 4.0 % (95 % interval 3.4 % to 4.7 %; better in 0 of 2 seeds)"


@pytest.mark.parametrize("strict", [[0.9, 1.05, 0.99], [0.5, 0.6, 0.9], [0.5, 0.8]])
def test_few_seeds_that_scatter_show_nothing(strict: list[float]) -> None:
    (sentence,) = told(off=[1.0] * len(strict), strict=strict)
    assert sentence.startswith("strict and off cannot be told apart: mean change −")


def test_one_seed_proves_nothing() -> None:
    assert told(off=[1.0], strict=[0.9]) == ["strict is better than off by 10 % in one seed, which proves nothing"]
    assert told(off=[1.0], strict=[1.0]) == ["strict and off have the same results in 1 of 1 seeds"]


def test_seeds_that_change_nothing_count_as_one() -> None:
    (sentence,) = told(off=[1.0, 1.0, 1.0], strict=[0.9, 0.9, 0.9])
    assert sentence == "strict is better than off by 10 % in 3 seeds with the same results, which proves nothing"


def test_equal_results_are_called_that() -> None:
    assert told(off=[1.0, 2.0], strict=[1.0, 2.0]) == ["strict and off have the same results in 2 of 2 seeds"]


def test_where_higher_is_better() -> None:
    (sentence,) = told(Metric("test", "(x)", higher=True), off=[0.8, 0.8, 0.81], strict=[0.88, 0.87, 0.88])
    assert sentence == "strict is better than off by 9.1 % (95 % interval 7.3 % to 11 %; better in 3 of 3 seeds)"


def test_only_seeds_that_both_have_are_compared() -> None:
    found = summarise(results(off=[1.0, 2.0], strict=[0.5]), ["off", "strict"], [TEST])
    (difference,) = compare_runs(found, "off", TEST)
    assert difference.changes == pytest.approx((-0.5,))


def test_without_the_first_run_there_is_nothing_to_compare_with() -> None:
    assert compare_runs(summarise(results(strict=[1.0]), ["off", "strict"], [TEST]), "off", TEST) == []


@pytest.mark.parametrize("pair", [(1.0, math.nan), (0.0, 1.0), (1.0, 0.0), (1.0, -1.0), (1.0, math.inf)])
def test_results_without_a_ratio_are_reported(pair: tuple[float, float]) -> None:
    (sentence,) = told(off=[pair[0], 1.0], strict=[pair[1], 0.5])
    expected = "strict: no conclusion, because the results of 1 of 2 seeds are not finite numbers above 0"
    assert sentence == expected


def test_changes_of_any_size_have_a_sentence() -> None:
    (sentence,) = told(off=[1e-300, 1.0], strict=[1e300, 1.0])
    assert "cannot be told apart" in sentence


@given(st.lists(st.floats(-1, 1), min_size=2, max_size=6), st.floats(0.1, 10))
def test_the_interval_is_around_the_mean_and_scales(values: list[float], scale: float) -> None:
    low, high = t_interval(values)
    assert (low + high) / 2 == pytest.approx(statistics.fmean(values), abs=1e-12)
    assert t_interval([scale * value for value in values]) == pytest.approx((scale * low, scale * high), abs=1e-9)


@pytest.mark.parametrize("freedom", [*range(1, 31), 31, 40, 60, 120, 1000])
def test_the_quantiles_are_those_of_students_distribution(freedom: int) -> None:
    known = {1: 12.706, 2: 4.303, 4: 2.776, 9: 2.262, 40: 2.021, 60: 2.000, 120: 1.980}
    quantile = t_quantile(freedom)
    assert quantile == pytest.approx(known.get(freedom, quantile), abs=6e-4)

    def density(t: float) -> float:
        gammas = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)
        return math.exp(gammas) / math.sqrt(freedom * math.pi) * (1 + t * t / freedom) ** (-(freedom + 1) / 2)

    step = quantile / 1000  # Simpson's rule
    weighted = (density(n * step) * (1 if n in (0, 1000) else 2 + 2 * (n % 2)) for n in range(1001))
    assert 2 * step / 3 * sum(weighted) == pytest.approx(0.95, abs=5e-5)


ERRORS: dict[str, Callable[[random.Random], float]] = {
    "normal": lambda generator: generator.gauss(0, 0.1),
    # Student's distribution with 3 degrees of freedom
    "heavy tails": lambda generator: 0.1 * generator.gauss(0, 1) / math.sqrt(generator.gammavariate(1.5, 2) / 3),
}


@pytest.mark.parametrize("seeds", [2, 3, 5, 10])
@pytest.mark.parametrize("errors", ERRORS)
def test_at_most_one_claim_in_twenty_is_false(errors: str, seeds: int) -> None:
    """Simulates comparisons without an effect and with one, in which logarithms of results have random errors."""
    generator, draw, count = random.Random(seeds), ERRORS[errors], 2000
    bound = 3 * math.sqrt(0.05 * 0.95 / count)  # of the random error of a share of 5 %
    for effect in (0.0, -0.2):
        claims = covered = 0
        for _ in range(count):
            levels = [generator.gauss(0, 1) for _ in range(seeds)]  # a seed changes both runs, for example by its split
            off = {seed: math.exp(level + draw(generator)) for seed, level in enumerate(levels)}
            auto = {seed: math.exp(level + effect + draw(generator)) for seed, level in enumerate(levels)}
            rows = [Row(run, values, {}, None, None) for run, values in (("off", off), ("auto", auto))]
            (difference,) = compare_runs(rows, "off", TEST)
            assert difference.low is not None
            assert difference.high is not None
            covered += difference.low <= math.expm1(effect) <= difference.high
            claims += "cannot be told apart" not in difference.sentence()
        assert covered / count >= 0.95 - bound
        if not effect:
            assert claims / count <= 0.05 + bound
            assert claims == count - covered, "a claim is an interval without 0"
        if errors == "normal":
            assert covered / count <= 0.95 + bound, "intervals are no longer than they need to be"


def test_time_is_a_ratio_of_gaps_between_evaluations() -> None:
    made = [
        TrialResult("off", 1, {"test": 1.0}, {"test": [[10.0, 1], [12.0, 1], [14.0, 1], [30.0, 1]]}),
        TrialResult("strict", 1, {"test": 1.0}, {"test": [[20.0, 1], [23.0, 1], [26.0, 1], [29.0, 1]]}, error=0.25),
    ]
    off, strict = summarise(made, ["off", "strict"], [TEST])
    assert off.time == 1
    assert strict.time == 1.5
    assert (off.equivariance_error, strict.equivariance_error) == (None, 0.25)


def test_changes_have_the_sign_of_the_metric() -> None:
    (sentence,) = told(Metric("test", "(x)", higher=True), off=[0.5, 0.5, 0.5], strict=[0.55, 0.49, 0.52])
    assert sentence == (
        "strict and off cannot be told apart: mean change +3.9 % (95 % interval −10 % to +20 %; better in 2 of 3 seeds)"
    )
