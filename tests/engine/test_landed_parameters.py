"""Loops over ``model.parameters()`` that scripts write by hand go on working when sites land."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.utils._python_dispatch import TorchDispatchMode
from toy import Layered

from ace_plugins import attach

FIT: dict[str, Any] = {
    "preset": "fit",
    "loop": "paced",
    "mode": "strict",
    "frames": "off",
    "trace": False,
    "budget": 60,
}
X = torch.randn(12, 3, generator=torch.Generator().manual_seed(1))


def norm(model: nn.Module) -> None:
    total = sum(p.grad.norm() ** 2 for p in model.parameters()) ** 0.5
    for p in model.parameters():
        p.grad.mul_(min(1.0, 1.0 / float(total)))


def clamp(model: nn.Module) -> None:
    for p in model.parameters():
        p.grad.clamp_(-0.1, 0.1)


def noise(model: nn.Module) -> None:
    for p in model.parameters():
        p.grad += 1e-3 * torch.randn_like(p.grad)


def replace(model: nn.Module) -> None:
    for p in model.parameters():
        p.grad = p.grad / 2


def flatten(model: nn.Module) -> None:
    parameters = list(model.parameters())
    flat = torch.nn.utils.parameters_to_vector([p.grad for p in parameters])
    assert len(flat) == sum(p.numel() for p in parameters)


def reduce(model: nn.Module) -> None:
    for p in model.parameters():
        distributed.all_reduce(p.grad)


class Operators(TorchDispatchMode):
    """Counts the operators that torch calls."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return function(*args, **(kwargs or {}))


@pytest.fixture
def _one_rank() -> Any:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def landed_in_training(idiom: Callable[[nn.Module], None], *, zero_first: bool = True, steps: int = 40) -> Any:
    torch.manual_seed(0)
    model = attach(Layered(), **FIT)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    frozen: list[Tensor] = []
    for _ in range(steps):
        if zero_first:
            optimizer.zero_grad()
        loss = (model(X) - 1).square().mean()
        if not zero_first:
            optimizer.zero_grad()
        loss.backward()
        idiom(model)
        optimizer.step()
        if model.ace.landed:
            weights = [p.detach().clone() for p in model.ace.parameters()]
            assert all(map(torch.equal, frozen, weights)), "the optimizer skips them: no weight decay, no noise"
            frozen = weights
    assert frozen
    return model


@pytest.mark.parametrize("zero_first", [True, False])
@pytest.mark.parametrize("idiom", [norm, clamp, noise, replace, flatten])
def test_gradients_are_there_for_loops_over_all_parameters(idiom: Any, zero_first: bool) -> None:
    landed_in_training(idiom, zero_first=zero_first)


@pytest.mark.usefixtures("_one_rank")
def test_gradients_are_there_to_reduce_them_over_ranks() -> None:
    landed_in_training(reduce)


def test_gradients_are_zero_before_and_after_the_step() -> None:
    model = landed_in_training(noise)
    assert not any(p.grad.any() for p in model.ace.parameters()), "after the step"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(X).sum().backward()
        assert not any(p.grad.any() for p in model.ace.parameters())
        noise(model)
        model(X).sum().backward()
        assert all(p.grad.any() for p in model.ace.parameters()), "a second backward pass adds to them"


def test_a_step_after_the_landing_only_counts_itself() -> None:
    model = landed_in_training(norm)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> int:
        with Operators() as called:
            optimizer.zero_grad()
            model(X).square().mean().backward()
            optimizer.step()
        return called.count

    plain = Layered()
    step(), step()
    landed = step()
    model, optimizer = plain, torch.optim.AdamW(plain.parameters(), lr=1e-3)
    step(), step()
    assert landed <= step() + 2, "one to count the step, one to record the loss"


@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize("mode", ["strict", "auto"])
def test_gradients_from_autograd_grad(mode: str, resumed: bool) -> None:
    """A script that never calls backward passes the parameters of landed branches too."""
    model = attach(Layered(), **{**FIT, "mode": mode})
    plain, saved = Layered(), None
    for _ in range(2 if resumed else 1):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
        if saved is not None:
            optimizer.load_state_dict(saved)
        for _ in range(50):
            parameters = list(model.parameters())
            found = torch.autograd.grad((model(X) - 1).square().mean(), parameters)
            for p, gradient in zip(parameters, found, strict=True):
                p.grad = gradient
            before = [p.detach().clone() for p in model.ace.parameters()] if model.ace.landed else []
            optimizer.step()
        assert before
        assert all(map(torch.equal, before, model.ace.parameters())), "the optimizer skips them"
        state, saved = model.state_dict(), optimizer.state_dict()
        model = attach(Layered(), **{**FIT, "mode": mode})
        model.load_state_dict(state)
    plain.load_state_dict({name: value for name, value in state.items() if not name.startswith("ace.")})
    assert torch.equal(model(X), plain(X))


def test_landed_parameters_are_not_in_the_graph_of_a_script_that_calls_backward() -> None:
    model = landed_in_training(norm)
    found = torch.autograd.grad(model(X).sum(), list(model.parameters()), allow_unused=True)
    own = {id(p) for p in model.ace.parameters()}
    assert [g is None for g in found] == [id(p) in own for p in model.parameters()]


def test_a_closure_sees_them_and_the_step_does_not() -> None:
    model = landed_in_training(norm)
    before = copy.deepcopy(list(model.ace.parameters()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(X).sum()
        loss.backward()
        norm(model)
        return loss

    optimizer.step(closure)
    assert all(map(torch.equal, before, model.ace.parameters()))


def test_copies_conversions_and_models_that_do_not_train() -> None:
    model = copy.deepcopy(landed_in_training(norm)).double()
    model(X.double()).sum().backward()
    norm(model)
    other = model.eval()
    other.zero_grad()
    Layered()(X).sum().backward()
    assert all(p.grad is None for p in other.ace.parameters())
