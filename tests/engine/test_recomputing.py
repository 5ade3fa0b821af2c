"""Activation checkpointing of a whole model: the recomputed forward pass is the one that was made."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from toy import Layered, VectorMaps

from ace_plugins import attach
from ace_plugins.errors import StepError

FRAMES: dict[str, Any] = {"preset": "fit", "loop": "paced", "mode": "strict", "trace": False, "budget": 400}
Loss = Callable[[Callable[[Tensor], Tensor]], Tensor]


def gradients(model: nn.Module, loss: Loss, reentrant: bool | None = None) -> Tensor:
    """Return all gradients of a loss of the model; of the checkpointed model unless ``reentrant`` is None."""
    model = copy.deepcopy(model)

    def call(x: Tensor) -> Tensor:
        made: Tensor = model(x) if reentrant is None else checkpoint(model, x, use_reentrant=reentrant)
        return made

    loss(call).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def one_forward(call: Callable[[Tensor], Tensor]) -> Tensor:
    return (call(X) - 1).square().sum()


def several_forwards(call: Callable[[Tensor], Tensor]) -> Tensor:
    """Two batches, and one batch twice."""
    return (call(X) * call(2 * X)).sum() + (call(X) - 1).square().sum()


X = torch.randn(6, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1), requires_grad=True)


@pytest.mark.parametrize("loss", [one_forward, several_forwards])
def test_a_recomputation_has_the_frame_of_its_forward(loss: Loss) -> None:
    model = attach(VectorMaps().double(), **FRAMES, frames="on")
    assert torch.allclose(gradients(model, loss, False), gradients(model, loss), rtol=1e-12)


@pytest.mark.parametrize("loss", [one_forward, several_forwards])
def test_a_forward_without_gradients_is_recomputed_without_frame(loss: Loss) -> None:
    model = attach(VectorMaps().double(), **FRAMES, frames="on")
    plain = copy.deepcopy(model)
    plain.ace.action = None
    assert torch.allclose(gradients(model, loss, True), gradients(plain, loss), rtol=1e-12)


def test_forwards_with_and_without_frame_in_one_step_are_refused_if_their_frames_are_unknown() -> None:
    model = attach(VectorMaps().double(), **FRAMES, frames="on")
    plain = model(X.detach()).sum()
    with pytest.raises(StepError, match="cannot tell which random frame"):
        (plain + checkpoint(model, X, use_reentrant=True).sum()).backward()


def test_an_input_that_is_recomputed_too() -> None:
    model = attach(VectorMaps().double(), **FRAMES, frames="on")
    twin = copy.deepcopy(model)
    for _ in range(2):
        checkpoint(lambda x: model(2 * x), X, use_reentrant=False).square().sum().backward()
        twin(2 * X).square().sum().backward()
        assert torch.allclose(model.ace.gamma.grad, twin.ace.gamma.grad, rtol=1e-12)
        for each in (model, twin):
            each.ace.passes.forget_frames()
    two = [checkpoint(lambda x: model(2 * x), X, use_reentrant=False).sum() for _ in range(2)]
    with pytest.raises(StepError, match="cannot tell which random frame"):
        sum(two).backward()


@pytest.mark.parametrize("probing", [0.0, 1.0])
@pytest.mark.parametrize("reentrant", [False, True])
def test_samples_have_the_same_part_in_a_recomputation(reentrant: bool, probing: float) -> None:
    model = attach(Layered().double(), mode="auto", loop="paced", trace=False, budget=400)
    model.ace.duals.evidence.probing.fill_(probing)
    x = torch.randn(12, 3, dtype=torch.float64, requires_grad=True)

    def loss(call: Callable[[Tensor], Tensor]) -> Tensor:
        return (call(x) - 1).square().sum()

    found, expected = gradients(model, loss, reentrant), gradients(model, loss)
    assert torch.allclose(found, expected, rtol=1e-12)
