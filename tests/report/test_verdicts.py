"""Verdicts on constructed and simulated courses, and the history that they are derived from."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ace_plugins import Config
from ace_plugins.engine.duals import Duals
from ace_plugins.report.record import History
from ace_plugins.report.verdicts import FEWEST, FEWEST_TO_BREAK, NEAR, explain, judge_course

Curve = Callable[[float], float]


def course(curve: Curve, points: int) -> list[float]:
    """A function of the time from 0 to 1."""
    return [curve(number / (points - 1)) for number in range(points)]


def strict(gamma: Curve, lambda_: Curve, points: int = 200) -> str:
    return judge_course("strict", course(gamma, points), course(lambda_, points), 0.0)


def swing(times: float, decay: float = 0.0, size: float = 1.0) -> Curve:
    return lambda t: size * math.exp(-decay * t) * math.cos(2 * math.pi * times * t)


def flat(value: float) -> Curve:
    return lambda t: value


def growing(t: float) -> float:
    return 3 * t


@pytest.mark.parametrize("points", [FEWEST_TO_BREAK, 65, 100, 257])
@pytest.mark.parametrize(
    ("gamma", "lambda_", "said"),
    [
        (lambda t: math.exp(-20 * t), lambda t: 1 - math.exp(-20 * t), "fits"),
        (flat(0.0), flat(0.0), "fits"),
        (lambda t: math.exp(-20 * t), growing, "fits"),
        (swing(1.5, size=0.04), swing(1.5, size=2), "fits"),
        (lambda t: 0.5 + 0.5 * math.exp(-20 * t), growing, "breaks"),
        (lambda t: -0.5 + 1.5 * math.exp(-20 * t), lambda t: -growing(t), "breaks"),
        (flat(0.7), growing, "breaks"),
        (lambda t: 1 - 0.6 * t, growing, "moving"),
        (lambda t: 1 - 0.01 * t, growing, "moving"),
        (lambda t: math.exp(-2 * t), growing, "moving"),
        (lambda t: math.cos(2.5 * t), lambda t: math.sin(2.5 * t), "moving"),
        (lambda t: math.cos(4 * t), lambda t: math.sin(4 * t), "moving"),
        (lambda t: 0.5 + 0.5 * math.exp(-20 * t), flat(0.3), "moving"),
    ],
)
def test_courses_without_many_swings(points: int, gamma: Curve, lambda_: Curve, said: str) -> None:
    assert strict(gamma, lambda_, points) == said
    assert strict(lambda t: -gamma(t), lambda t: -lambda_(t), points) == said, "whatever the sign"


@pytest.mark.parametrize("times", [2.6, 3, 3.3, 5, 8.1, 20])
def test_a_swing_that_goes_on_and_one_that_dies_down(times: float) -> None:
    quarter_later: Curve = lambda t: swing(times)(t - 0.25 / times)  # noqa: E731
    assert strict(swing(times), quarter_later) == "breaks"
    assert strict(swing(times, decay=-0.5), quarter_later) == "breaks"
    assert strict(swing(times, decay=1.3), quarter_later) == "moving"
    assert strict(swing(times, decay=30), growing) == "fits"
    assert strict(swing(times, decay=30), flat(1.0)) == "fits"


@pytest.mark.parametrize("times", [number / 20 for number in range(5, 30)])
def test_a_first_swing_is_not_called_swinging(times: float) -> None:
    assert strict(swing(times), lambda t: swing(times)(t - 0.25 / times)) == "moving"


def test_a_swing_that_died_down_to_one_that_goes_on() -> None:
    steady = lambda t: swing(40)(t) * (0.3 + 0.7 * math.exp(-10 * t))  # noqa: E731
    assert strict(steady, swing(40)) == "breaks"


@pytest.mark.parametrize(
    ("mode", "gamma", "lambda_", "bound", "said"),
    [
        ("bounded", lambda t: 1 - t / 2, growing, 0.1, "moving"),
        ("bounded", lambda t: 0.1 + 0.9 * math.exp(-20 * t), growing, 0.1, "breaks"),
        ("bounded", lambda t: -0.1 + math.exp(-20 * t), growing, 0.1, "breaks"),
        ("bounded", lambda t: math.exp(-20 * t), flat(0.0), 0.1, "fits"),
        ("bounded", flat(0.04), growing, 0.001, "moving"),
        ("resilient", lambda t: 1 - t / 2, growing, 0.1, "moving"),
        ("resilient", swing(2.25, size=0.5), swing(2), 0.1, "moving"),
        ("resilient", lambda t: 0.3 + 0.7 * math.exp(-20 * t), lambda t: 0.3 - 0.3 * math.exp(-20 * t), 0.3, "breaks"),
        ("resilient", lambda t: -0.03 + math.exp(-20 * t), lambda t: math.exp(-20 * t), 0.03, "breaks"),
        ("resilient", lambda t: math.exp(-20 * t), lambda t: math.exp(-20 * t), 0.0, "fits"),
        ("resilient", flat(0.0), flat(0.0), 0.0, "fits"),
        ("resilient", flat(0.01), growing, 0.001, "fits"),
        ("resilient", flat(0.2), growing, 0.3, "moving"),
        ("resilient", flat(0.001), flat(0.0), 0.17, "fits"),
        ("resilient", flat(0.1), flat(0.0), 0.3, "moving"),
    ],
)
def test_the_other_modes(mode: str, gamma: Curve, lambda_: Curve, bound: float, said: str) -> None:
    for points in (FEWEST, 64, 257):
        assert judge_course(mode, course(gamma, points), course(lambda_, points), bound) == said


@pytest.mark.parametrize("mode", ["strict", "bounded", "resilient"])
def test_what_goes_before_all_else(mode: str) -> None:
    zeros = [0.0] * 50
    assert judge_course(mode, zeros, zeros, 0.1, landed=True) == "fits"
    assert judge_course(mode, [1.0, 0.5, 0.02, 0.0], [0.0] * 4, 0.1, landed=True) == "fits"
    assert judge_course(mode, [1.0, -0.9, 0.0, 0.0], [0.0] * 4, 0.1, landed=True) == "cut"
    for length in range(FEWEST):
        assert judge_course(mode, [1.0] * length, [0.0] * length, 0.1) == "too short"
    for bad in (math.nan, math.inf, -math.inf):
        for at in (0, 25, -1):
            odd = zeros.copy()
            odd[at] = bad
            assert judge_course(mode, odd, zeros, 0.1) == "diverged"
            assert judge_course(mode, zeros, odd, 0.1, landed=True) == "diverged"
        assert judge_course(mode, zeros, zeros, bad) == "diverged"


WORDS = {"strict": ("fits", "moving", "breaks", "cut"), "bounded": ("fits", "moving", "breaks")}
WORDS["resilient"] = WORDS["bounded"]


def test_every_verdict_is_explained_in_every_mode() -> None:
    for mode, words in WORDS.items():
        for word in (*words, "too short", "landed", "settled", "scheduled", "diverged"):
            assert explain(word, mode)
            assert "\n" not in explain(word, mode)


finite = st.floats(-1e300, 1e300) | st.floats(-2, 2) | st.sampled_from([0.0, -0.0, NEAR, -NEAR, 1.0])
points = st.lists(st.tuples(finite, finite), max_size=60)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(["strict", "bounded", "resilient"]), points, st.floats(0, 1e30), st.booleans())
def test_no_run_is_too_odd(mode: str, run: list[tuple[float, float]], bound: float, landed: bool) -> None:
    gamma, lambda_ = [g for g, _ in run], [la for _, la in run]
    said = judge_course(mode, gamma, lambda_, bound, landed=landed)
    assert explain(said, "strict")
    turned = judge_course(mode, [-g for g in gamma], [-la for la in lambda_], bound, landed=landed)
    assert turned == said, "no side of 0 is better than the other"


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.tuples(st.floats(-2, 2), st.floats(-9, 9)), min_size=FEWEST, max_size=60),
    st.sampled_from([0.125, 0.5, 2.0, 64.0]),
)
def test_the_scale_of_lambda_does_not_matter(run: list[tuple[float, float]], scale: float) -> None:
    gamma, lambda_ = [g for g, _ in run], [la if abs(la) > 1e-3 else 0.0 for _, la in run]
    for mode, bound in (("strict", 0.0), ("resilient", 0.2)):
        assert judge_course(mode, gamma, lambda_, bound) == judge_course(
            mode, gamma, [scale * la for la in lambda_], bound
        )


@settings(max_examples=80, deadline=None)
@given(st.lists(st.floats(-2, 2), min_size=FEWEST, max_size=60), st.sampled_from([0.0, 0.01, 0.5]))
def test_a_smaller_gamma_is_never_further_from_0(gamma: list[float], scale: float) -> None:
    lambda_ = [1.0] * len(gamma)
    if judge_course("strict", gamma, lambda_, 0.0) == "fits":
        assert judge_course("strict", [scale * g for g in gamma], lambda_, 0.0) == "fits"
    order = ("fits", "breaks", "moving")
    smaller, larger = (judge_course("bounded", [s * g for g in gamma], lambda_, 0.3) for s in (scale, 1.0))
    assert order.index(smaller) <= order.index(larger)


OBJECTIVES = ((0.5, 0.0), (1.0, 0.0), (5.0, 0.0), (0.5, 0.5), (1.0, 0.5), (5.0, 0.5), (0.5, -1.0), (1.0, -1.0))
"""Curvature, and where gamma would go by itself."""


def simulated(mode: str, steps: int, objectives: Sequence[tuple[float, float]] = OBJECTIVES) -> list[str]:
    """The paper's loop, one site for each objective."""
    rate, generator = 0.01, torch.Generator().manual_seed(0)
    curvature, wanted = torch.tensor(objectives).T
    duals = Duals(len(curvature), Config(mode=mode), dtype=torch.float32, device=torch.device("cpu"))
    gamma, history = torch.ones(len(curvature)), History()
    for step in range(1, steps + 1):
        grad = curvature * (gamma - wanted + 0.02 * torch.randn(gamma.shape, generator=generator))
        before = gamma
        gamma = gamma - rate * (grad + duals.pull(before))
        duals.ascend(before, rate)
        history.record(step, duals.snapshot(gamma))
    sites = history.per_site(now=duals.snapshot(gamma))
    return [judge_course(mode, g, la, 0.1 if mode == "bounded" else u[-1]) for g, la, u in sites]


def test_a_strict_run_on_data_that_the_symmetry_fits() -> None:
    for steps in (20, 100, 300, 600):
        assert set(simulated("strict", steps)) <= {"moving", "fits"}, "nothing breaks in a short run"
    assert set(simulated("strict", 3000)) == {"fits"}


def test_a_strict_run_without_damping_swings() -> None:
    assert simulated("strict", 3000, [(0.0, 0.0)]) == ["breaks"]
    assert simulated("strict", 3000, [(0.1, 0.0)]) == ["moving"]


def test_resilient_and_bounded_runs() -> None:
    assert set(simulated("resilient", 50)) == {"moving"}
    assert set(simulated("resilient", 300)[:3]) <= {"moving", "fits"}, "u is on its way down again"
    assert simulated("resilient", 3000) == ["fits"] * 3 + ["breaks"] * 5
    assert simulated("bounded", 3000) == ["fits"] * 3 + ["breaks"] * 5


def taken_by(history: History, first: int, *steps: int) -> list[int]:
    for step in (first, *steps):
        history.record(step, torch.full((3, 2), float(step)))
    return [round(gamma) for gamma in history.per_site(now=torch.zeros(3, 2))[0][0][:-1]]


@pytest.mark.parametrize("first", [0, 1, 1000, 12345])
@pytest.mark.parametrize("count", [1, 7, 8, 9, 100, 5000])
def test_a_history_is_evenly_spaced_and_bounded(first: int, count: int) -> None:
    history = History(points=8)
    taken = taken_by(history, *range(first, first + count))
    assert min(count, 4) <= len(taken) == len(history.taken) <= 8
    assert {later - earlier for earlier, later in pairwise(taken)} <= {history.every}
    assert first + count - 1 - taken[-1] < history.every, "up to the end"
    assert taken[0] - first < history.every, "and from the start"


def test_a_history_that_starts_over() -> None:
    history = History(points=8)
    taken = taken_by(history, *range(1, 30), *range(10, 60))
    assert 4 <= len(history.taken) <= 8
    assert taken[-1] > 60 - history.every - 1


def test_a_history_keeps_copies() -> None:
    history = History()
    duals = Duals(2, Config(mode="strict"), dtype=torch.float64, device=torch.device("cpu"))
    gamma = torch.ones(2, dtype=torch.float64, requires_grad=True)
    history.record(1, duals.snapshot(gamma))
    with torch.no_grad():
        gamma.fill_(0.5)
    duals.lambda_ += 3
    assert history.per_site(now=duals.snapshot(gamma)) == [[[1.0, 0.5], [0.0, 3.0], [0.0, 0.0]]] * 2


def test_a_gamma_that_has_hardly_begun_to_move_breaks_nothing() -> None:
    """Twenty steps of a slow gamma look like one that is held: lambda grows, and gamma stays."""
    assert strict(lambda t: 1 - 0.001 * t, lambda t: t, 20) == "moving"
