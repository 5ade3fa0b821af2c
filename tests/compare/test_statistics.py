"""Statistics over seeds and the sentences about them."""

from __future__ import annotations

import math
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ace_plugins.adapter import Metric
from ace_plugins.compare.plan import TrialResult
from ace_plugins.compare.statistics import bootstrap_interval, compare_runs, summarise

TEST = Metric("test", "(x)")


def results(**values: list[float]) -> list[TrialResult]:
    return [TrialResult(run, seed, {"test": v}) for run, all_ in values.items() for seed, v in enumerate(all_, 1)]


def told(metric: Metric = TEST, **values: list[float]) -> list[str]:
    names = list(values)
    return [each.sentence() for each in compare_runs(summarise(results(**values), names, [metric]), names[0], metric)]


def test_better_in_all_seeds() -> None:
    (sentence,) = told(off=[1.0, 2.0, 4.0], strict=[0.5, 1.2, 2.8])
    assert sentence == "strict is better than off in 3 of 3 seeds, by 40 % (30 to 50 %)"


def test_worse_in_all_seeds() -> None:
    assert told(off=[1.0, 1.0], strict=[1.05, 1.03]) == [
        "strict is worse than off in 2 of 2 seeds, by 4.0 % (3.0 to 5.0 %)"
    ]


def test_seeds_that_disagree_show_nothing() -> None:
    (sentence,) = told(off=[1.0, 1.0, 1.0], strict=[0.9, 1.05, 0.99])
    assert sentence.startswith(
        "no clear difference between strict and off: better in 2 of 3 seeds, mean change −2.0 % (−"
    )


def test_one_seed_proves_nothing() -> None:
    assert told(off=[1.0], strict=[0.9]) == [
        "strict is better by 10 % than off in one seed, and one seed proves nothing"
    ]
    assert told(off=[1.0], strict=[1.0]) == ["strict is as good as off in one seed, and one seed proves nothing"]


def test_equal_results_are_called_that() -> None:
    assert told(off=[1.0, 2.0], strict=[1.0, 2.0]) == ["strict and off are the same in 2 of 2 seeds"]


def test_where_higher_is_better() -> None:
    (sentence,) = told(Metric("test", "(x)", higher=True), off=[0.8, 0.8], strict=[0.88, 0.84])
    assert sentence == "strict is better than off in 2 of 2 seeds, by 7.5 % (5.0 to 10 %)"


def test_only_seeds_that_both_have_are_compared() -> None:
    found = summarise(results(off=[1.0, 2.0], strict=[0.5]), ["off", "strict"], [TEST])
    (difference,) = compare_runs(found, "off", TEST)
    assert difference.changes == (-0.5,)


def test_without_the_first_run_there_is_nothing_to_compare_with() -> None:
    assert compare_runs(summarise(results(strict=[1.0]), ["off", "strict"], [TEST]), "off", TEST) == []


def test_results_that_are_no_numbers_are_told() -> None:
    (sentence,) = told(off=[1.0, 1.0], strict=[math.nan, 0.5])
    assert sentence.startswith("strict: no conclusion, because the results of 1 of 2 seeds are not finite")
    (sentence,) = told(off=[0.0, 1.0], strict=[1.0, 0.5])
    assert sentence.endswith("1 of 2 seeds are not finite, or 0 for off")


@settings(max_examples=25, deadline=None)
@given(st.lists(st.floats(-1, 1), min_size=2, max_size=6), st.floats(0.1, 10))
def test_the_interval_is_around_the_mean_and_scales(changes: list[float], scale: float) -> None:
    low, high = bootstrap_interval(changes)
    assert min(changes) - 1e-12 <= low <= high <= max(changes) + 1e-12
    assert low - 1e-12 <= statistics.fmean(changes) <= high + 1e-12
    assert bootstrap_interval([scale * change for change in changes]) == pytest.approx((scale * low, scale * high))


def test_the_interval_of_many_is_that_of_the_normal_law() -> None:
    """For many samples, the bootstrap agrees with the normal approximation."""
    changes = [math.sin(n * 12.9898) * 43758.5453 % 1 for n in range(400)]
    low, high = bootstrap_interval(changes)
    half = 1.96 * statistics.stdev(changes) / math.sqrt(len(changes))
    assert (high - low) / 2 == pytest.approx(half, rel=0.06)


def test_time_is_a_ratio_of_gaps_between_evaluations() -> None:
    made = [
        TrialResult("off", 1, {"test": 1.0}, {"test": [[10.0, 1], [12.0, 1], [14.0, 1], [30.0, 1]]}),
        TrialResult("strict", 1, {"test": 1.0}, {"test": [[20.0, 1], [23.0, 1], [26.0, 1], [29.0, 1]]}, error=0.25),
    ]
    off, strict = summarise(made, ["off", "strict"], [TEST])
    assert off.time == 1
    assert strict.time == 1.5
    assert (off.equivariance_error, strict.equivariance_error) == (None, 0.25)


def test_changes_are_told_as_the_metric_shows_them() -> None:
    (sentence,) = told(Metric("test", "(x)", higher=True), off=[0.5, 0.5, 0.5], strict=[0.55, 0.49, 0.52])
    assert "better in 2 of 3 seeds, mean change +4.0 % (−2.0 % to +10 %)" in sentence
