"""A run that goes on from a checkpoint: settings come from the user, state from the checkpoint."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from toy import Layered

from ace_plugins import AceWarning, attach, export, status
from ace_plugins.errors import CheckpointError

BOUND = {"mode": "bounded", "dual_lr": 0.01, "trace": False}
# Branches are bounded or not in all of them: a checkpoint of other branches is refused.
FIT: dict[str, Any] = {
    "preset": "fit",
    "loop": "paced",
    "mode": "strict",
    "trace": False,
    "frames": "off",
    "spectral_norm": False,
}


def made(**config: Any) -> Any:
    torch.manual_seed(0)
    return attach(Layered().double(), **{"trace": False, **config})


def trained(steps: int, model: Any = None, **config: Any) -> Any:
    model = made(**config) if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.randn(12, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for _ in range(steps):
        optimizer.zero_grad()
        (model(x) - 1).square().mean().backward()
        optimizer.step()
    return model


@pytest.mark.parametrize("earlier", [{**BOUND, "epsilon": 0.1}, {"mode": "strict"}, {"mode": "resilient"}])
@pytest.mark.parametrize("loop", [{}, FIT])
def test_epsilon_is_the_users_whatever_the_checkpoint_was_trained_with(earlier: Any, loop: Any) -> None:
    """lambda of a bounded run grows by dual_lr * (|gamma| - epsilon), with the epsilon that is set now."""
    settings = {"mode": "bounded", "epsilon": 0.5, **({} if loop else {"dual_lr": 0.01})}
    settings, before = {**loop, **settings}, {**loop, **earlier}
    if loop:
        before.pop("dual_lr", None)
    resumed = made(**settings)
    resumed.load_state_dict(trained(5, **before).state_dict())
    assert [site.u for site in status(resumed).sites] == [0.5] * 3
    gamma = torch.tensor([0.5, 0.75, 0.25], dtype=torch.float64)
    assert torch.equal(resumed.ace.duals.slack(gamma), torch.tensor([0.0, 0.25, -0.25], dtype=torch.float64))
    if not loop:
        with torch.no_grad():
            resumed.ace.gamma.copy_(gamma)
        resumed.ace.duals.lambda_.fill_(1.0)
        trained(1, resumed)
        expected = torch.tensor([1.0, 1.0025, 0.9975], dtype=torch.float64)
        assert torch.allclose(resumed.ace.duals.lambda_, expected, atol=1e-12)


def test_a_bounded_checkpoint_leaves_no_epsilon_in_a_resilient_run() -> None:
    resumed = made(mode="resilient")
    resumed.load_state_dict(trained(5, **BOUND, epsilon=0.3).state_dict())
    assert resumed.ace.duals.u.tolist() == [0.0] * 3


def test_a_checkpoint_of_other_branches_is_refused() -> None:
    """By default strict mode has no spectral normalisation, and modes that deploy branches have it."""
    settings = {name: value for name, value in FIT.items() if name != "spectral_norm"}
    state = made(**settings, budget=300).state_dict()
    with pytest.raises(CheckpointError, match="branches are not the model's.*attach with the settings"):
        made(**{**settings, "mode": "bounded"}, budget=300).load_state_dict(state)


def test_training_from_a_landed_checkpoint_warns_once() -> None:
    state = trained(300, **FIT, budget=300).state_dict()
    model = made(**FIT, budget=300)
    model.load_state_dict(state)
    with pytest.warns(AceWarning, match="had landed before this training began.*load the weights without ACE") as said:
        trained(3, trained(3, model))
    assert len(said) == 1
    again = made(**FIT, budget=300)
    with pytest.warns(AceWarning, match="checkpoint without ACE loaded"):
        again.load_state_dict(export(state))
    trained(3, again)
    assert not status(again).landed


@pytest.mark.parametrize("mode", ["bounded", "resilient"])
def test_a_strict_run_that_has_landed_may_go_on_in_another_mode(mode: str) -> None:
    """What the report advises where the data breaks the symmetry."""
    strict = trained(300, **FIT, budget=300)
    assert status(strict).landed
    resumed = made(**{**FIT, "mode": mode}, budget=600)
    resumed.load_state_dict(strict.state_dict())
    assert not status(resumed).landed
    trained(20, resumed)
    values = resumed.ace.duals.snapshot(resumed.ace.gamma)
    assert torch.isfinite(values).all()
    assert resumed.ace.gamma.grad is not None


def test_resuming_past_the_landing_lands() -> None:
    resumed = made(land_at=100)
    resumed.load_state_dict(trained(150).state_dict())
    assert status(resumed).landed
    assert resumed.ace.gamma.tolist() == [0.0] * 3
    with pytest.warns(AceWarning, match="had landed before"):
        trained(2, resumed)
    assert resumed.ace.gamma.tolist() == [0.0] * 3
