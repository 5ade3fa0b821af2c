"""torch.compile around a model that trains: one graph until a site lands, and the numbers of eager mode."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch._dynamo.utils import counters
from toy import Layered, LayeredAdapter

from ace_plugins import attach, status
from ace_plugins.adapter import Node, Site, Stem, Tap, hookimpl, norm_linear
from ace_plugins.plugins.registry import registry

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*:UserWarning:torch")
FIT: dict[str, Any] = {"preset": "fit", "loop": "paced", "mode": "strict", "frames": "off", "trace": False}


class Chained(LayeredAdapter):
    """A chain of batch normalisation and linear maps, as SchNet and EGNO have it."""

    @hookimpl
    def ace_layers(self, model: Any) -> Sequence[Node]:
        nodes: list[Node] = [Stem("lift", Tap("x", ""), (3,), (8,))]
        for i in range(len(model.layers)):
            nodes.append(Site(f"layers.{i}", f"layers.{i}", (8,), (8,), reads=nodes[-1].name))
        return nodes

    @hookimpl
    def ace_branch(self, site: Any) -> nn.Module | None:
        return norm_linear(site) if isinstance(site, Site) else nn.Linear(3, 8)


@pytest.fixture(autouse=True)
def _chained() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    registry().add(Chained(), "chained")
    yield
    registry().remove("chained")
    torch._dynamo.reset()


def train(forward: Any, model: Any, steps: int) -> Iterator[None]:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        x = torch.randn(12, 3, dtype=torch.float64, generator=generator)
        optimizer.zero_grad()
        (forward(x) - 1).square().mean().backward()
        optimizer.step()
        yield


@pytest.mark.parametrize(
    "config",
    [
        {"preset": "none", "land_at": 5, "trace": False},
        {"preset": "none", "mode": "resilient", "spectral_norm": True, "trace": False},
        {**FIT, "budget": 40},
        {**FIT, "budget": 20, "mode": "auto"},
        {**FIT, "budget": 40, "frames": "on"},
        {**FIT, "budget": 40, "mode": "resilient", "trace": True, "error_every": 7},
        {"mode": "scheduled", "budget": 15, "frames": "off", "trace": False},
    ],
    ids=["land_at", "bounded maps", "paced", "auto", "frames", "measured", "scheduled"],
)
def test_as_many_graphs_as_landings_and_the_numbers_of_eager_mode(config: Any) -> None:
    model = attach(Layered().double(), "chained", **config)
    twin = copy.deepcopy(model)
    counter = CompileCounter()
    compiled = torch.compile(model, backend=counter, fullgraph=False)
    graphs, landings = [], [0]
    for _, _ in zip(train(compiled, model, 20), train(twin, twin, 20), strict=True):
        graphs.append(counter.frame_count)
        landings.append(len(model.ace.duals.landed_sites))
    recompiled = sum(later > earlier for earlier, later in pairwise(graphs))
    landed = sum(later > earlier for earlier, later in pairwise(landings))
    assert recompiled <= landed
    assert status(model).steps == status(twin).steps
    found, expected = model.state_dict(), twin.state_dict()
    assert all(torch.allclose(found[name], value, atol=1e-9) for name, value in expected.items())


@pytest.mark.parametrize("mode", ["strict", "auto"])
def test_a_whole_graph(mode: str) -> None:
    model = attach(Layered().double(), "chained", **{**FIT, "mode": mode}, budget=40 if mode == "strict" else 20)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for _ in train(compiled, model, 20):
        pass
    assert status(model).landed
    assert not counters["graph_break"]


@pytest.mark.parametrize(("setting", "word"), [({"frames": "on"}, "frames"), ({"error_every": 5}, "error_every")])
def test_breaks_of_a_whole_graph_are_reported_in_one_line(setting: Any, word: str) -> None:
    model = attach(Layered().double(), "chained", **{**FIT, **setting}, budget=40)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match=f"fullgraph=True: set {word} = .*") as refused:
        compiled(torch.randn(12, 3, dtype=torch.float64))
    assert any(f"set {word} = " in line for line in str(refused.value).splitlines())


def test_a_submodule_replaced_before_the_model_is_compiled() -> None:
    """The first forward is compiled and takes the hooks as it finds them; the step after it looks."""
    model = attach(Layered().double(), "chained", **FIT, budget=400)
    model.layers[1] = nn.Sequential(nn.Linear(8, 8), nn.Tanh()).double()
    compiled = torch.compile(model, backend="eager")
    for _ in train(compiled, model, 2):
        pass
    x = torch.randn(12, 3, dtype=torch.float64)
    model.zero_grad()
    compiled(x).sum().backward()
    assert (model.ace.gamma.grad != 0).all()
