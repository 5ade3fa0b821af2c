"""Tests of the adapter: the checks of ace-plugins, and a short training run."""

from __future__ import annotations

from collections.abc import Callable

import torch
from ace_plugins import attach, project, status
from ace_plugins.testing import parametrize_with_checks

from ace_egnn.plugin import ace_example


@parametrize_with_checks("egnn")
def test_contract(check: Callable[[], None]) -> None:
    check()


def test_a_strict_run_ends_as_plain_upstream() -> None:
    example = ace_example(0)
    keys = set(example.model.state_dict())
    model = attach(example.model, trace=False, tell=False, mode="strict", budget=40)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(40):
        optimizer.zero_grad()
        sum(output.square().mean() for output in model(*example.args)).backward()
        optimizer.step()
    assert status(model).landed
    assert all(site.gamma == 0 for site in status(model).sites)
    assert set(project(model).state_dict()) == keys
