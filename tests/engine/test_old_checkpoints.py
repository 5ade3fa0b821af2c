"""Checkpoints that version 0.1.0 wrote load, and training goes on to the same numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from toy import Layered

from ace_plugins import attach
from ace_plugins.plugins.registry import registry

SAVED = Path(__file__).parents[1] / "data" / "checkpoints-0.1.0.pt"


@pytest.mark.parametrize("adapter", ["layered", "two_outputs"])  # the third, "vector_maps", is of nuPI, which is gone
def test_a_run_of_0_1_0_goes_on_as_it_would_have(adapter: str) -> None:
    saved = torch.load(SAVED, weights_only=True)[adapter]
    example = registry().adapter(adapter).example(1)
    model: Any = attach(example.model.double(), adapter, trace=False, **saved["settings"])
    optimizer = torch.optim.Adam(model.parameters(), lr=1.0)
    model.load_state_dict(saved["model"], strict=True)
    optimizer.load_state_dict(saved["optimizer"])
    made = registry().adapter(adapter).example(0)
    args = tuple(tensor.double() for tensor in made.args)
    kwargs = {name: tensor.double() for name, tensor in made.kwargs.items()}
    losses = []
    for _ in saved["losses"]:
        optimizer.zero_grad()
        output = model(*args, **kwargs)
        outputs = output if isinstance(output, tuple) else (output,)
        loss = sum((tensor - 1).square().mean() for tensor in outputs)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses == pytest.approx(saved["losses"], rel=1e-10)
    for name, value in (("gamma", model.ace.gamma), ("lambda", model.ace.duals.lambda_), ("u", model.ace.duals.u)):
        assert torch.allclose(value.detach(), saved[name], rtol=1e-9, atol=1e-12), name


LOOPS = torch.load(Path(__file__).parents[1] / "data" / "checkpoints-0.1.0-loops.pt", weights_only=True)
"""One checkpoint for each way that 0.1.0 used the buffer ``duals.error``, with the state after 12 more steps."""


@pytest.mark.parametrize("name", LOOPS)
def test_every_loop_of_0_1_0_goes_on_to_the_same_numbers(name: str) -> None:
    saved = LOOPS[name]
    model: Any = attach(Layered().double(), trace=False, **saved["settings"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    model.load_state_dict(saved["model"], strict=True)
    optimizer.load_state_dict(saved["optimizer"])
    x = torch.randn(16, 3, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    for _ in range(12):
        optimizer.zero_grad()
        (model(x) - x[:, :1].sin()).square().mean().backward()
        optimizer.step()
    duals = model.ace.duals
    weights = [p.detach().flatten() for name, p in model.named_parameters() if not name.startswith("ace.")]
    found = {"gamma": model.ace.gamma.detach(), "lambda": duals.lambda_, "u": duals.u, "weights": torch.cat(weights)}
    for key, value in saved["after"].items():
        assert torch.allclose(found[key], value, rtol=1e-12, atol=1e-14), key
