"""The README's own adapter, as printed, on a network whose layers return tuples."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ace_plugins import attach, status
from ace_plugins.plugins.registry import registry
from ace_plugins.testing import check_adapter
from ace_plugins.testing.doctor import diagnose

MYNET = """
import torch
from torch import nn
class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.scale = nn.Parameter(torch.rand(1))
    def forward(self, pos, vel):
        return pos + self.scale * vel, self.scale * vel
class MyNet(nn.Module):
    def __init__(self, width=3):
        super().__init__()
        self.width = width
        self.layers = nn.ModuleList(Layer(width) for _ in range(3))
    def forward(self, pos, vel):
        for layer in self.layers:
            pos, vel = layer(pos, vel)
        return pos
"""


@pytest.fixture
def mynet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    (adapter,) = [block for block in blocks if "def ace_layers" in block]
    (checkout,) = [block for block in blocks if "ace.Checkout" in block]
    (tmp_path / "mynet").mkdir()
    (tmp_path / "mynet" / "__init__.py").touch()
    (tmp_path / "mynet" / "model.py").write_text(MYNET)
    monkeypatch.syspath_prepend(str(tmp_path))
    plugin = ModuleType("ace_mynet.plugin")
    exec(adapter + checkout, vars(plugin))
    registry().add(plugin, "mynet")
    yield plugin
    registry().remove("mynet")
    for name in ("mynet", "mynet.model"):
        sys.modules.pop(name, None)


def test_the_adapter_of_the_readme_works_as_printed(mynet: Any) -> None:
    check_adapter("mynet")
    found = diagnose("mynet")
    assert found.problems == ()
    assert len(found.parts) == 3
    model = attach(mynet.ace_example(1).model)
    assert status(model).adapter == "mynet"
