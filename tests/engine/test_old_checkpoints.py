"""Checkpoints that version 0.1.0 wrote load, and training goes on to the same numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ace_plugins import attach
from ace_plugins.plugins.registry import registry

SAVED = Path(__file__).parents[1] / "data" / "checkpoints-0.1.0.pt"


@pytest.mark.parametrize("adapter", ["layered", "two_outputs", "vector_maps"])
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
