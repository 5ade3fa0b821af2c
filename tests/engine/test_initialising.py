"""Scripts that initialise all parameters of a model themselves overwrite gamma, which starts at its own value again."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from toy import Layered

from ace_plugins import AceWarning, attach, status

X = torch.randn(12, 3, generator=torch.Generator().manual_seed(1))


def loop(model: nn.Module) -> None:
    for p in model.parameters():
        nn.init.xavier_uniform_(p) if p.dim() > 1 else nn.init.constant_(p, 0.01)


def vector(model: nn.Module) -> None:
    nn.utils.vector_to_parameters(torch.rand(sum(p.numel() for p in model.parameters())), model.parameters())


def train(model: Any, steps: int = 1) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    for _ in range(steps):
        optimizer.zero_grad()
        (model(X) - 1).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("initialise", [loop, vector])
@pytest.mark.parametrize("mode", ["auto", "strict", "resilient", "bounded"])
def test_gamma_starts_at_its_own_value(mode: str, initialise: Callable[[nn.Module], None]) -> None:
    model: Any = attach(Layered(), preset="fit", loop="paced", mode=mode, budget=6000, trace=False)
    initialise(model)
    with pytest.warns(AceWarning, match="changed gamma .* before the first step") as caught:
        train(model, 3)
    assert len(caught) == 1
    assert [site.gamma for site in status(model).sites] == pytest.approx([0.1] * 3, abs=0.005)


def test_nothing_is_said_of_other_models() -> None:
    """Of models as they were attached, of frozen gammas, and of models whose other layers were initialised."""
    plain, frozen, applied = (attach(Layered(), trace=False, gamma_init=0.3) for _ in range(3))
    nn.init.constant_(frozen.ace.gamma.requires_grad_(False), 0.5)
    applied.apply(lambda m: nn.init.zeros_(m.weight) if isinstance(m, nn.Linear) else None)  # type: ignore[arg-type]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for model in (plain, frozen, applied):
            train(model)
    assert frozen.ace.gamma.tolist() == [0.5] * 3


def test_a_checkpoint_decides_over_the_settings() -> None:
    """Also one of a run whose optimizer has made no step yet, and one with a part of ACE's entries."""
    trained: Any = attach(Layered(), trace=False, dual_lr=0.01)
    fresh = copy.deepcopy(trained.state_dict())
    train(trained, 4)
    part = {name: value for name, value in trained.state_dict().items() if "manifest" not in name}
    for state in (trained.state_dict(), fresh, {**part, "ace.duals.steps": torch.zeros(())}):
        resumed: Any = attach(Layered(), trace=False, dual_lr=0.01, gamma_init=0.3)
        resumed.load_state_dict(state, strict=False)
        gamma = resumed.ace.gamma.detach().clone()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            train(resumed)
        assert torch.equal(resumed.ace.gamma, gamma) is False
        assert torch.allclose(resumed.ace.gamma, gamma, atol=0.05)
