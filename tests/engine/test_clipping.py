"""Gradient clipping by norm: gamma and the branches do not shrink upstream's step."""

from __future__ import annotations

import copy
import gc
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_ as imported
from toy import Layered

from ace_plugins import attach, project
from ace_plugins.engine.state import LIVE

X = torch.randn(12, 3, generator=torch.Generator().manual_seed(1))
MODES = ["auto", "strict", "resilient", "bounded"]


def by_module(model: nn.Module, norm: float) -> Tensor:
    return torch.nn.utils.clip_grad_norm_(model.parameters(), norm)


def by_name(model: nn.Module, norm: float) -> Tensor:
    """As after ``from torch.nn.utils import clip_grad_norm_``: the script's module has the function by name."""
    return sys.modules["a_script"].clip_grad_norm_(model.parameters(), max_norm=norm)  # type: ignore[no-any-return]


@pytest.fixture(autouse=True)
def _script(monkeypatch: pytest.MonkeyPatch) -> None:
    gc.collect()
    assert not list(LIVE.aces), "a test before this one keeps a model alive"
    script: Any = ModuleType("a_script")
    script.clip_grad_norm_ = imported
    monkeypatch.setitem(sys.modules, "a_script", script)


def own(model: Any) -> set[int]:
    return {id(p) for p in model.ace.parameters()}


@pytest.mark.parametrize("clip", [by_module, by_name])
@pytest.mark.parametrize("mode", MODES)
def test_upstreams_step_is_clipped_by_upstreams_norm(mode: str, clip: Callable[..., Tensor]) -> None:
    model: Any = attach(Layered(), preset="fit", loop="paced", mode=mode, budget=60, trace=False)
    twin = copy.deepcopy(model)
    for each, alone in ((model, False), (twin, True)):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        (each(X) - 100).square().mean().backward()
        parts = [p for p in each.parameters() if id(p) not in own(each)]
        norm = imported(parts, 0.5) if alone else clip(each, 0.5)
        expected = norm if alone else expected_norm(parts)
        assert alone or norm > 2 > expected, "returns the norm of upstream's gradients, before clipping"
        added = [p.grad for p in each.ace.parameters()]
        assert alone or torch.nn.utils.get_total_norm(added) == pytest.approx(0.5), "ACE's, as a group"
        optimizer.step()
    for (name, one), two in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert name.startswith("ace.") or torch.equal(one, two), name


def expected_norm(parts: list[nn.Parameter]) -> Tensor:
    return torch.nn.utils.get_total_norm([p.grad for p in parts])


def test_norms_of_some_parameters() -> None:
    model: Any = attach(Layered(), trace=False)
    (model(X) - 100).square().mean().backward()
    for part in (model.ace, model.head, model.lift.bias):
        parameters = [part] if isinstance(part, Tensor) else list(part.parameters())
        before = expected_norm(parameters)
        assert clipped(part if isinstance(part, Tensor) else part.parameters(), 0.01) == before
        assert expected_norm(parameters) == pytest.approx(0.01, rel=1e-3)


def clipped(*args: Any) -> Tensor:
    return sys.modules["a_script"].clip_grad_norm_(*args)  # type: ignore[no-any-return]


def test_every_reference_is_given_back() -> None:
    modules = [torch.nn.utils, torch.nn.utils.clip_grad, sys.modules["a_script"]]
    model = attach(Layered(), trace=False)
    during = {vars(module)["clip_grad_norm_"] for module in modules}
    assert len(during) == 1
    assert imported not in during
    script: Any = ModuleType("a_later_script")
    script.clip_grad_norm_ = torch.nn.utils.clip_grad_norm_
    sys.modules["a_later_script"] = script
    project(model)
    assert {vars(module)["clip_grad_norm_"] for module in [*modules, sys.modules.pop("a_later_script")]} == {imported}


def test_mode_off_patches_nothing() -> None:
    attach(Layered(), mode="off")
    assert torch.nn.utils.clip_grad_norm_ is imported
