"""The dual loop through real optimizers, against an independent implementation and closed forms."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from toy import Free

from ace_plugins import attach, status

MODES = ("strict", "bounded", "resilient")
PROBLEM = reference.random_quadratic(4, 3)


def built(problem: Any, config: dict[str, Any]) -> Free:
    sizes = (4, 3) if problem is PROBLEM else (2, 3)
    model = Free(torch.zeros(sizes[0], dtype=torch.float64), sizes[1])
    return attach(model, dual_optimizer=config.pop("dual_optimizer", "sgd"), trace=False, **config)


def backward(problem: Any, model: Any, scale: float = 1.0) -> None:
    """Leave the objective's gradient where ``loss.backward()`` would."""
    theta, gamma = problem.grad(model.theta.detach().numpy(), model.ace.gamma.detach().numpy())
    for parameter, grad in ((model.theta, theta), (model.ace.gamma, gamma)):
        grad = scale * torch.from_numpy(np.asarray(grad))
        parameter.grad = grad if parameter.grad is None else parameter.grad + grad


def train(problem: Any, model: Any, optimizer: torch.optim.Optimizer, steps: int, scheduler: Any = None) -> Any:
    rows = {"gamma": [], "theta": [], "lambda_": [], "u": []}
    for _ in range(steps):
        optimizer.zero_grad()
        backward(problem, model)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        rows["gamma"].append(model.ace.gamma.detach().numpy().copy())
        rows["theta"].append(model.theta.detach().numpy().copy())
        rows["lambda_"].append(model.ace.duals.lambda_.numpy().copy())
        rows["u"].append(model.ace.duals.bound.numpy().copy())
    return {name: np.array(values) for name, values in rows.items()}


def assert_same(found: Any, expected: reference.Result, tolerance: float = 1e-6) -> None:
    for name, values in found.items():
        np.testing.assert_allclose(values, getattr(expected, name)[1:], rtol=0, atol=tolerance, err_msg=name)


@pytest.mark.parametrize("primal", ["sgd", "adam"])
@pytest.mark.parametrize("dual", ["sgd", "adam"])
@pytest.mark.parametrize("mode", MODES)
def test_equals_the_reference(mode: str, dual: str, primal: str) -> None:
    model = built(PROBLEM, {"mode": mode, "dual_optimizer": dual, "dual_lr": 0.02, "epsilon": 0.2})
    make = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[primal]
    found = train(PROBLEM, model, make(model.parameters(), lr=0.05), 200)
    expected = reference.simulate(
        PROBLEM.grad, np.zeros(4), np.ones(3), steps=200, mode=mode, primal=primal, primal_lr=0.05, dual=dual,
        dual_lr=0.02, epsilon=0.2,
    )  # fmt: skip
    assert_same(found, expected)
    assert np.abs(np.diff(found["lambda_"], axis=0)).max() > 1e-4, "the duals moved"


@settings(deadline=None, max_examples=40)
@given(
    mode=st.sampled_from(MODES),
    dual=st.sampled_from(["sgd", "adam"]),
    primal=st.sampled_from(["sgd", "adam"]),
    rate=st.floats(1e-3, 0.1),
    ratio=st.floats(0.0, 1.0),
    gamma_lr=st.floats(0.0, 4.0),
    augmented=st.floats(0.0, 2.0),
    rho=st.floats(0.1, 3.0),
    weight_decay=st.floats(0.0, 0.3),
    gamma_init=st.floats(-2.0, 2.0),
    decay=st.floats(0.9, 1.0),
)
def test_equals_the_reference_for_all_settings(
    mode: str, dual: str, primal: str, rate: float, ratio: float, gamma_lr: float, augmented: float, rho: float,
    weight_decay: float, gamma_init: float, decay: float,
) -> None:  # fmt: skip
    """Schedules, a relative dual rate, gamma's own rate, weight decay (never on gamma), the augmented term."""
    config = {"mode": mode, "dual_optimizer": dual, "dual_lr": f"{ratio}x", "gamma_lr": gamma_lr}
    model = built(PROBLEM, {**config, "augmented": augmented, "rho": rho, "gamma_init": gamma_init})
    make = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[primal]
    optimizer = make(model.parameters(), lr=rate, weight_decay=weight_decay)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, decay)
    found = train(PROBLEM, model, optimizer, 30, scheduler)
    live = lambda step: rate * decay**step  # noqa: E731
    expected = reference.simulate(
        PROBLEM.grad, np.zeros(4), np.full(3, gamma_init), steps=30, mode=mode, primal=primal, primal_lr=live,
        dual=dual, dual_lr=lambda step: ratio * live(step), rho=rho, augmented=augmented, gamma_lr=gamma_lr,
        weight_decay=weight_decay,
    )  # fmt: skip
    # Adam divides by the size of the gradient: where that vanishes, rounding is all there is.
    assert_same(found, expected, 1e-6)


@pytest.mark.parametrize(
    "make", [torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.NAdam]
)
def test_gamma_steps_as_in_a_separate_group(make: Any) -> None:
    """gamma_lr and weight decay: the same as a script that gave gamma its own group, for any optimizer."""
    one = built(PROBLEM, {"gamma_lr": 3.0, "dual_lr": 0.01})
    two = built(PROBLEM, {"dual_lr": 0.01})
    shared = make(one.parameters(), lr=0.02, weight_decay=0.1)
    rest = [two.theta, *two.ace.branches.parameters()]
    gamma = {"params": [two.ace.gamma], "lr": 0.02 * 3.0, "weight_decay": 0.0}
    split = make([{"params": rest}, gamma], lr=0.02, weight_decay=0.1)
    train(PROBLEM, one, shared, 20)
    train(PROBLEM, two, split, 20)
    assert torch.equal(one.ace.gamma, two.ace.gamma)
    assert torch.equal(one.theta, two.theta)
    assert len(shared.param_groups) == 1
    assert list(map(id, shared.param_groups[0]["params"])) == list(map(id, one.parameters()))


def test_weight_decay_on_gamma_when_asked() -> None:
    model = built(PROBLEM, {"gamma_weight_decay": True, "dual_lr": 0.0})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.5)
    model.ace.gamma.grad = torch.zeros(3, dtype=torch.float64)
    optimizer.step()
    assert torch.allclose(model.ace.gamma, torch.full((3,), 0.95, dtype=torch.float64))


DIAGONAL = reference.diagonal([1, 2], [0.3, -0.7], [1.5, 0.8, 1.0], [0.6, -0.9, 0.05])


@pytest.mark.parametrize("problem", [PROBLEM, DIAGONAL], ids=["quadratic", "diagonal"])
@pytest.mark.parametrize("extra", [{}, {"augmented": 1.0}, {"gamma_lr": 2.0}], ids=str)
def test_strict_reaches_the_saddle_point(problem: Any, extra: dict[str, Any]) -> None:
    model = built(problem, {"mode": "strict", "dual_lr": 0.1, **extra})
    train(problem, model, torch.optim.SGD(model.parameters(), lr=0.1), 1500)
    saddle = problem.strict_saddle()
    np.testing.assert_allclose(model.ace.gamma.detach(), 0, atol=1e-8)
    np.testing.assert_allclose(model.ace.duals.lambda_, saddle.lambda_, atol=1e-8)
    np.testing.assert_allclose(model.theta.detach(), saddle.theta, atol=1e-8)


@pytest.mark.parametrize("problem", [PROBLEM, DIAGONAL], ids=["quadratic", "diagonal"])
@pytest.mark.parametrize("rho", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("augmented", [0.0, 1.0])
def test_resilient_reaches_the_saddle_point(problem: Any, rho: float, augmented: float) -> None:
    model = built(problem, {"mode": "resilient", "dual_lr": 0.1, "rho": rho, "augmented": augmented})
    train(problem, model, torch.optim.SGD(model.parameters(), lr=0.1), 1500)
    saddle = problem.resilient_saddle(rho)
    np.testing.assert_allclose(model.ace.duals.u, model.ace.duals.lambda_ / rho, atol=1e-8)
    np.testing.assert_allclose(model.ace.duals.u, saddle.u, atol=1e-8)
    np.testing.assert_allclose(model.ace.gamma.detach(), saddle.gamma, atol=1e-8)


def test_bounded_reaches_the_saddle_point() -> None:
    model = built(DIAGONAL, {"mode": "bounded", "dual_lr": 0.1, "epsilon": 0.1})
    train(DIAGONAL, model, torch.optim.SGD(model.parameters(), lr=0.1), 1500)
    saddle = DIAGONAL.bounded_saddle(0.1)
    np.testing.assert_allclose(model.ace.gamma.detach(), saddle.gamma, atol=1e-8)
    np.testing.assert_allclose(model.ace.duals.lambda_, saddle.lambda_, atol=1e-8)
    assert 0 in saddle.lambda_, "one site is inside the bound, where nothing may pull"


@pytest.mark.parametrize("config", [{"rho": 25.0}, {"gamma_lr": 3.0, "dual_lr": 0.2}], ids=["u", "lambda"])
def test_clamps_bind_as_in_the_reference(config: dict[str, Any]) -> None:
    rate = 0.1 if "rho" in config else 0.05
    model = built(DIAGONAL, {"mode": "resilient", "dual_lr": 0.1, **config})
    found = train(DIAGONAL, model, torch.optim.SGD(model.parameters(), lr=rate), 60)
    expected = reference.simulate(
        DIAGONAL.grad, np.zeros(2), np.ones(3), steps=60, mode="resilient", primal_lr=rate,
        **{"dual_lr": 0.1, **config},
    )  # fmt: skip
    assert_same(found, expected)
    assert (found["u"][5:] == 0).any() or (found["lambda_"][5:] == 0).any()


@pytest.mark.parametrize("dual", ["sgd", "adam"])
@pytest.mark.parametrize("mode", MODES)
def test_stop_and_resume_equals_going_on(mode: str, dual: str) -> None:
    config = {"mode": mode, "dual_optimizer": dual, "dual_lr": "0.5x", "gamma_lr": 2.0}

    def fresh() -> tuple[Free, torch.optim.Optimizer]:
        model = built(PROBLEM, dict(config))
        return model, torch.optim.Adam(model.parameters(), lr=0.02, weight_decay=0.1)

    whole, optimizer = fresh()
    train(PROBLEM, whole, optimizer, 200)
    half, optimizer = fresh()
    train(PROBLEM, half, optimizer, 100)
    saved = copy.deepcopy((half.state_dict(), optimizer.state_dict()))
    resumed, optimizer = fresh()
    resumed.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    train(PROBLEM, resumed, optimizer, 100)
    assert resumed.state_dict().keys() == whole.state_dict().keys()
    for name, value in whole.state_dict().items():
        if not name.startswith("ace.branches"):
            assert torch.equal(value, resumed.state_dict()[name]), name
    assert status(resumed).steps == 200


def test_landing_sets_gamma_to_zero_for_good() -> None:
    model = built(PROBLEM, {"land_at": 5, "dual_lr": 0.1})
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    train(PROBLEM, model, optimizer, 4)
    assert not status(model).landed
    x = torch.ones(2, 1, dtype=torch.float64)
    assert not torch.equal(model.train()(x), x)
    train(PROBLEM, model, optimizer, 1)
    assert status(model).landed
    assert torch.equal(model.ace.gamma, torch.zeros(3, dtype=torch.float64))
    assert torch.equal(model.train()(x), x), "the branches take no part any more"
    again = built(PROBLEM, {"land_at": 5})
    again.load_state_dict(model.state_dict())
    assert status(again).landed
