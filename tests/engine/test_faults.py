"""Steps that go wrong: a loss or a gradient that is not finite."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from toy import Layered

from ace_plugins import AceWarning, attach, status

PRINTED: dict[str, Any] = {"dual_lr": 0.01, "trace": False}
FIT: dict[str, Any] = {"preset": "fit", "loop": "fitted", "budget": 200, "trace": False, "frames": "off"}
LOOPS = [
    {**PRINTED, "mode": "strict"},
    {**PRINTED, "mode": "strict", "dual_optimizer": "adam", "gamma_lr": 3.0},
    {**PRINTED, "mode": "bounded", "dual_optimizer": "nupi", "augmented": 1.0},
    {**PRINTED, "mode": "resilient"},
    {**FIT, "mode": "strict"},
    {**FIT, "mode": "bounded"},
    {**FIT, "mode": "resilient"},
]


def model_of_gamma(**config: Any) -> Any:
    """Only gamma is trained, so that what a bad step leaves behind is ACE's own."""
    model = attach(Layered().double(), **config)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name == "ace.gamma")
    return model


def values(model: Any) -> torch.Tensor:
    duals = model.ace.duals
    state = [model.ace.gamma, duals.lambda_, duals.u, duals.mean, duals.square, duals.error]
    return torch.stack([tensor.detach() for tensor in state])


def steps(model: Any, optimizer: Any, count: int) -> None:
    for _ in range(count):
        step(model, optimizer)


def step(model: Any, optimizer: Any, bad: float | None = None) -> None:
    x = torch.randn(12, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    optimizer.zero_grad()
    loss = (model(x) - 1).square().mean()
    (loss if bad is None else loss * bad).backward()
    optimizer.step()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1e200])
@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adam])
@pytest.mark.parametrize("config", LOOPS)
def test_a_step_that_is_not_finite_moves_nothing(config: Any, make: Any, bad: float) -> None:
    if config.get("dual_optimizer") == "nupi":
        pytest.importorskip("cooper")
    model = model_of_gamma(**config)
    optimizer = make(model.parameters(), lr=0.01)
    steps(model, optimizer, 4)
    before = values(model).clone()
    step(model, optimizer, bad)
    assert torch.equal(values(model), before)
    with pytest.warns(AceWarning, match=r"gradient at gamma was not finite in 1 of 10 steps") as told:
        steps(model, optimizer, 25)
    assert len(told) == 1, "told once"
    assert torch.isfinite(values(model)).all()
    assert not torch.equal(values(model)[0], before[0])
    assert {site.verdict for site in status(model).sites} != {"diverged"}


def test_afterwards_the_run_is_the_one_without_that_step() -> None:
    model = model_of_gamma(**PRINTED, mode="resilient", dual_optimizer="sgd")
    twin = copy.deepcopy(model)
    one, two = (torch.optim.SGD(m.parameters(), lr=0.01) for m in (model, twin))
    for number in range(8):
        if number == 4:
            step(model, one, float("nan"))
        step(model, one)
        step(twin, two)
    assert torch.equal(values(model), values(twin))


def test_a_run_that_stays_so_is_called_diverged() -> None:
    model = attach(Layered(), **FIT)
    model = model.double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    steps(model, optimizer, 15)
    step(model, optimizer, float("nan"))
    with pytest.warns(AceWarning, match="lower the learning rate"):
        steps(model, optimizer, 15)
    assert torch.isfinite(model.ace.gamma).all()
    assert {site.verdict for site in status(model).sites} == {"diverged"}


def test_good_steps_tell_nothing() -> None:
    model = model_of_gamma(**FIT)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        steps(model, optimizer, 30)
