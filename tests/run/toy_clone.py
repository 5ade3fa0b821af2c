"""A patched checkout of a toy upstream, and an installed adapter for it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import clones

NET = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x):
        return self.layer(x)
"""
TRAIN = """
import sys
import torch
from models.net import Net

def train(model, steps=20):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(8, 4)
    for _ in range(steps):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return model

def build_and_train():
    torch.manual_seed(0)
    return train(Net())
"""
MAIN = """
if __name__ == "__main__":
    model = build_and_train()
    gamma = round(model.ace.gamma.item(), 6) if hasattr(model, "ace") else "plain"
    print(sum(p.numel() for p in model.parameters()), gamma)
"""
ADAPTER = """
from ace_plugins.adapter import Checkout, Site, Upstream, hookimpl

@hookimpl
def ace_upstream():
    net = "class Net(Module):\\n    def __init__(self, width=...): ...\\n    def forward(self, x): ..."
    return Upstream("Toy net", ("models.net:Net",), Checkout("me/toy", ("train.py",), {"models/net.py": net}))

@hookimpl
def ace_layers(model):
    return [Site("layer", "layer", (4,), (4,))]

@hookimpl
def ace_group_action():
    from ace_plugins.adapter import O3, GroupAction, Invariant
    return GroupAction(O3, inputs={"x": Invariant()}, outputs=Invariant())

@hookimpl
def ace_preset():
    return {"paper": {"dual_lr": 0.5}, "other": {"mode": "resilient"}}
"""
PLAIN, WITH_ACE = 20, 20 + 1 + (4 * 8 + 8) + (8 * 4 + 4) + (4 * 4 + 4)
"""Number of parameters without and with ACE."""
HEAVY = "import sys; print(sorted({'torch', 'click', 'rich', 'pluggy', 'wrapt', 'packaging'} & set(sys.modules)))"
"""Prints the modules that should not be imported yet."""
MARKED = "import ace_plugins.activate\n"


class Clone:
    """The checkout, with methods to run its script."""

    def __init__(self, folder: Path) -> None:
        self.installed = folder / "installed"
        info = self.installed / "ace_toy_net-1.dist-info"
        info.mkdir(parents=True)
        (self.installed / "ace_toy_net.py").write_text(ADAPTER)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ace-toy-net\nVersion: 1\n")
        (info / "entry_points.txt").write_text("[ace_plugins]\ntoy_net = ace_toy_net\n")
        self.root = folder / "clone"
        (self.root / "models").mkdir(parents=True)
        (self.root / "models" / "net.py").write_text(NET)
        self.script = self.root / "train.py"
        self.write(TRAIN + MAIN)
        self.settings = self.root / "ace.toml"
        self.settings.write_text('adapter = "toy_net"\n')

    def write(self, text: str, *, marked: bool = True) -> None:
        self.script.write_text(MARKED + text if marked else text)

    def python(self, *words: str, folder: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
        path = [*environment.pop("PYTHONPATH", "").split(":"), str(self.installed), os.environ.get("PYTHONPATH", "")]
        return clones.python(folder or self.root, *words, PYTHONPATH=":".join(filter(None, path)), **environment)

    def run(self, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """``ace-patch run toy_net ...``"""
        return self.python("-m", "ace_plugins", "run", "toy_net", *words, **environment)


def trained(done: subprocess.CompletedProcess[str]) -> tuple[int, str]:
    """Return the number of parameters and the gamma that the script printed."""
    assert done.returncode == 0, done.stderr
    count, gamma = done.stdout.split()
    return int(count), gamma
