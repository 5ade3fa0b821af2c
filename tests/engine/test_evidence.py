"""The sequential test of mode auto: its e-values, its level, and what it measures."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from ace_plugins.engine.evidence import FIRST, PRIOR, PROBES, RECENT, Evidence, cycle
from ace_plugins.settings.config import LEVEL


def make(sites: int = 1, holdout: float = 0.5) -> Evidence:
    return Evidence(sites, holdout, dtype=torch.float64, device=torch.device("cpu"))


def feed(evidence: Evidence, b: Tensor, *, loss: float = 1.0, scale: float = 1.0) -> None:
    """Give the evidence one value of b per site: a usual step and a probe, both with the gradient -b at gamma = 1."""
    gamma = torch.ones_like(b)
    for probing in (0.0, 1.0):
        evidence.probing.fill_(probing)
        evidence.add(gamma, -scale * b, torch.tensor(scale * loss, dtype=torch.float64))


@pytest.mark.parametrize(("total", "square"), [(0.0, 5.0), (3.0, 4.0), (12.0, 20.0), (-6.0, 9.0), (25.0, 60.0)])
def test_the_e_value_is_the_mixture_of_likelihood_ratios(total: float, square: float) -> None:
    evidence = make()
    evidence.total.fill_(total)
    evidence.square.fill_(square)
    # The prior of the effect is half of a normal distribution with variance 1 / PRIOR.
    effect = torch.linspace(0, 12 / math.sqrt(PRIOR), 200_001, dtype=torch.float64)
    prior = 2 * torch.sqrt(torch.tensor(PRIOR / (2 * math.pi))) * torch.exp(-PRIOR * effect.square() / 2)
    expected = torch.trapezoid(prior * torch.exp(effect * total - effect.square() * square / 2), effect)
    assert float(evidence.log_e_values()) == pytest.approx(float(expected.log()), abs=1e-5)


@pytest.mark.parametrize("noise", ["normal", "heavy"])
@pytest.mark.parametrize("level", [0.05, 0.01])
def test_without_a_benefit_the_test_is_wrong_no_more_often_than_its_level(noise: str, level: float) -> None:
    runs = 4000
    evidence = make(runs)
    generator = torch.Generator().manual_seed(1)
    largest = torch.full((runs,), -math.inf, dtype=torch.float64)
    for step in range(PROBES):
        drawn = torch.randn(runs, generator=generator, dtype=torch.float64)
        if noise == "heavy":
            drawn = drawn / torch.rand(runs, generator=generator, dtype=torch.float64).clamp_min(1e-3)
        feed(evidence, drawn * (1 + 5 / (1 + step)))  # the size of the noise may change
        largest = torch.maximum(largest, evidence.log_e_values())
    alarms = float((largest >= math.log(1 / level)).double().mean())
    assert alarms <= level
    assert alarms > 0 or level < 0.02  # otherwise the simulation shows nothing


def test_a_benefit_is_found() -> None:
    evidence = make(200)
    generator = torch.Generator().manual_seed(2)
    for _ in range(PROBES):
        feed(evidence, 0.6 + torch.randn(200, generator=generator, dtype=torch.float64))
    assert float((evidence.log_e_values() >= math.log(1 / LEVEL)).double().mean()) > 0.8


def test_the_scale_of_the_loss_does_not_matter() -> None:
    one, two = make(), make()
    generator = torch.Generator().manual_seed(3)
    for _ in range(40):
        b = 0.3 + torch.randn(1, generator=generator, dtype=torch.float64)
        feed(one, b)
        feed(two, b, scale=1024.0)
    assert torch.equal(one.log_e_values(), two.log_e_values())
    assert one.summarise() == two.summarise()


def test_the_benefit_is_the_loss_without_branch_minus_the_loss_with_it() -> None:
    """For a quadratic loss of gamma the trapezoidal rule is exact."""
    evidence, gamma = make(holdout=0.5), torch.tensor([0.3], dtype=torch.float64)

    def loss(value: Tensor) -> Tensor:
        return 2.0 - 3.0 * value + 4.0 * value.square()  # summed over the judges, half of the batch

    for probing, at in ((0.0, gamma), (0.0, gamma), (1.0, 0 * gamma)):
        at = at.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(loss(at).sum(), at)
        evidence.probing.fill_(probing)
        evidence.add(gamma, gradient, torch.tensor(4.0, dtype=torch.float64))
    reduction = float(loss(0 * gamma) - loss(gamma))
    assert evidence.summarise()["benefit"] == pytest.approx([reduction / (0.5 * 4.0 + reduction)])


def test_decisions_follow_the_e_bh_procedure() -> None:
    evidence = make(4)

    def set_log_e(values: list[float]) -> None:
        """Choose S so that the e-values are these, by bisection."""
        evidence.square.fill_(50.0)
        low, high = torch.full((4,), -60.0, dtype=torch.float64), torch.full((4,), 120.0, dtype=torch.float64)
        for _ in range(80):
            evidence.total.copy_((low + high) / 2)
            below = evidence.log_e_values() < torch.tensor(values, dtype=torch.float64)
            low, high = torch.where(below, evidence.total, low), torch.where(below, high, evidence.total)

    alone, both = math.log(4 / LEVEL), math.log(4 / (2 * LEVEL))
    set_log_e([alone - 0.1, 0.0, 0.0, 0.0])
    assert not evidence.decide()
    set_log_e([both + 0.1, 0.0, both + 0.2, 0.0])
    assert evidence.decide()
    assert evidence.kept_sites == {0, 2}
    set_log_e([0.0, math.log(4 / (3 * LEVEL)) + 0.1, 0.0, 0.0])  # kept sites stay kept, and count
    assert evidence.decide()
    assert evidence.kept_sites == {0, 1, 2}


def test_the_first_probes_only_measure_the_size() -> None:
    evidence = make()
    for _ in range(FIRST):
        feed(evidence, torch.tensor([1.0], dtype=torch.float64))
    assert float(evidence.square) == 0
    feed(evidence, torch.tensor([1.0], dtype=torch.float64))
    assert float(evidence.square) == pytest.approx(1.0)


def test_a_site_without_a_gradient_is_unused() -> None:
    evidence = make(2)
    for _ in range(5):
        feed(evidence, torch.tensor([1.0, 0.0], dtype=torch.float64))
    assert evidence.summarise()["used"] == [1.0, 0.0]
    assert all(math.isfinite(value) for value in evidence.summarise()["log_e"])


def test_the_limit_is_for_all_undecided_branches_together() -> None:
    """Four branches that each lower the loss by 0.4 % can lower it by 1.6 %: none of them alone fits the data."""
    evidence = make(4, holdout=1.0)
    generator = torch.Generator().manual_seed(4)
    for _ in range(PROBES):
        feed(evidence, 0.004 + 1e-4 * torch.randn(4, generator=generator, dtype=torch.float64))
    found = evidence.summarise()
    assert found["benefit"] == pytest.approx([0.004 / 1.016] * 4, rel=0.02)
    assert found["limit"] == pytest.approx([0.016 / 1.016] * 4, rel=0.02)
    assert min(found["limit"]) > 0.016 / 1.016 - 1e-5


def test_noise_is_no_benefit_whatever_its_size() -> None:
    evidence = make(2, holdout=1.0)
    generator = torch.Generator().manual_seed(7)
    for _ in range(2000):
        feed(evidence, 0.3 * torch.randn(2, generator=generator, dtype=torch.float64))
    assert evidence.summarise()["benefit"] == pytest.approx([0.0, 0.0], abs=3 * 0.3 / math.sqrt(2000))


def test_the_limit_is_about_recent_probes_and_begins_again_at_a_decision() -> None:
    evidence = make(2, holdout=1.0)
    for share in (0.001, 0.1):  # the branches have learned something in the second half
        for _ in range(PROBES):
            feed(evidence, torch.tensor([share, 0.0], dtype=torch.float64))
    assert evidence.summarise()["limit"] == pytest.approx([0.1 / 1.1] * 2, rel=0.05)
    assert evidence.decide()
    assert evidence.kept_sites == {0}
    assert all(map(math.isnan, evidence.summarise()["limit"]))
    for _ in range(FIRST + 1):
        feed(evidence, torch.tensor([0.0, 0.002], dtype=torch.float64))
    assert evidence.summarise()["limit"][1] == pytest.approx(0.002 / 1.002, rel=0.05)


def test_the_limit_covers_the_true_benefit_as_often_as_stated() -> None:
    runs, true = 2000, 0.01
    generator = torch.Generator().manual_seed(5)
    drawn = true + 0.05 * torch.randn(60, runs, generator=generator, dtype=torch.float64)
    evidence = make(runs)
    for count, values in enumerate(drawn, 1):
        evidence.joint.lerp_(values, 1 / min(count, RECENT))
        evidence.joint_square.lerp_(values.square(), 1 / min(count, RECENT))
    evidence.joint_probes.fill_(len(drawn))
    assert float((evidence.limits() >= true).double().mean()) > 0.975


def test_branches_that_raise_the_loss_are_hopeless() -> None:
    generator = torch.Generator().manual_seed(6)
    for mean, expected in ((-0.5, True), (0.5, False)):
        evidence = make(3)
        for number in range(4 * FIRST):
            feed(evidence, mean + 0.3 * torch.randn(3, generator=generator, dtype=torch.float64))
            assert evidence.is_hopeless() == (expected and number >= FIRST)
    assert evidence.decide()
    assert not evidence.is_hopeless()  # all sites are kept
    evidence.kept[0] = 0
    assert not evidence.is_hopeless()  # no probes since the decision


@pytest.mark.parametrize(("horizon", "expected"), [(10.0, 2), (750.0, 6), (128_000.0, 1000)])
def test_probes_are_as_rare_as_the_exploration_is_long(horizon: float, expected: int) -> None:
    assert cycle(horizon) == expected


@pytest.mark.parametrize("horizon", [None, 75.0, 1280.0])
def test_the_probes_that_measure_the_size_come_first(horizon: float | None) -> None:
    """They need no horizon, so none are lost while the length of an epoch is unknown."""
    evidence = make()
    probes = []
    for count in range(200):
        evidence.plan(count, True, horizon, torch.zeros(1))
        if evidence.probing.any():
            probes.append(count + 1)
    assert probes[:FIRST] == list(range(2, 2 * FIRST + 1, 2))
    steps = horizon and cycle(horizon)
    assert probes[FIRST:] == [step for step in range(2 * FIRST + 1, 201) if steps and step % steps == 0]
