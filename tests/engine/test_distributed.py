"""Ranks that train one model together, with the messages between them played back in one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, distributed
from toy import Layered

from ace_plugins import attach
from ace_plugins.engine.distributed import Ranks


@pytest.fixture
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "get_world_size", lambda group: 2)
    monkeypatch.setattr(distributed, "get_global_rank", lambda group, rank: rank)


def layered(seed: int, **settings: Any) -> Any:
    torch.manual_seed(seed)
    return attach(Layered(), trace=False, **settings)


def agree(monkeypatch: pytest.MonkeyPatch, ranks: Ranks, first: Any, second: Any) -> None:
    """Let the second model agree with the first one, which is rank 0's."""
    messages: list[Tensor] = []
    monkeypatch.setattr(distributed, "broadcast", lambda flat, source, group: messages.append(flat.clone()))
    ranks.agree(first.ace)

    def receive(flat: Tensor, source: int, group: Any) -> None:
        assert source == 0
        flat.copy_(messages.pop(0))

    monkeypatch.setattr(distributed, "broadcast", receive)
    ranks.agree(second.ace)
    assert not messages


@pytest.mark.usefixtures("two_ranks")
def test_gradients_of_ace_are_averaged_where_the_model_is_sharded(monkeypatch: pytest.MonkeyPatch) -> None:
    model = layered(0)
    model(torch.randn(4, 3)).square().mean().backward()
    before = [parameter.grad.clone() for parameter in model.ace.parameters()]
    assert any(gradient.any() for gradient in before)
    other = [torch.randn_like(gradient) for gradient in before]
    flat = torch.cat([gradient.flatten() for gradient in other])
    monkeypatch.setattr(distributed, "all_reduce", lambda tensor, group: tensor.add_(flat))
    Ranks().reduce(model.ace)
    for parameter, mine, theirs in zip(model.ace.parameters(), before, other, strict=True):
        torch.testing.assert_close(parameter.grad, (mine + theirs) / 2)


@pytest.mark.usefixtures("two_ranks")
def test_without_gradients_nothing_is_sent() -> None:
    model = layered(0)
    Ranks().reduce(model.ace)  # all_reduce would raise: there is no process group
    assert all(parameter.grad is None for parameter in model.ace.parameters())


@pytest.mark.usefixtures("two_ranks")
def test_ranks_take_gamma_the_duals_and_the_budget_from_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = layered(0, budget=300), layered(1)
    with torch.no_grad():
        first.ace.gamma.uniform_()
        first.ace.duals.lambda_.uniform_()
        first.ace.duals.steps.fill_(7)
    branches = copy.deepcopy(second.ace.branches.state_dict())
    ranks = Ranks()
    ranks.steps = 1
    agree(monkeypatch, ranks, first, second)
    assert torch.equal(second.ace.gamma, first.ace.gamma)
    assert torch.equal(second.ace.duals.lambda_, first.ace.duals.lambda_)
    assert second.ace.duals.count == 7
    assert second.ace.budget.agreed == first.ace.budget.facts
    assert all(torch.equal(branches[name], value) for name, value in second.ace.branches.state_dict().items())


@pytest.mark.usefixtures("two_ranks")
def test_sharded_ranks_begin_with_the_branches_of_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = layered(0), layered(1)
    agree(monkeypatch, Ranks(), first, second)
    for mine, theirs in zip(second.ace.parameters(), first.ace.parameters(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.usefixtures("two_ranks")
def test_agreeing_leaves_equal_parameters_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A write raises a tensor's version, by which bounded branches see that their weight was set."""
    model = layered(0)
    versions = [parameter._version for parameter in model.ace.parameters()]
    monkeypatch.setattr(distributed, "broadcast", lambda flat, source, group: None)
    Ranks().agree(model.ace)
    assert [parameter._version for parameter in model.ace.parameters()] == versions
