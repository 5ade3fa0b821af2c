"""Small upstreams, one for each shape of site that an adapter can describe, and the adapters for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ace_plugins.adapter import (
    O3,
    SO3,
    Example,
    GroupAction,
    Invariant,
    Node,
    Site,
    Stem,
    Tap,
    Upstream,
    Vectors,
    hookimpl,
    linear,
)
from ace_plugins.contract.upstreams import class_path


class Layered(nn.Module):
    """Invariants of vectors through a stack of layers: x [n, 3] -> [n, 1]. A site reads its own first input."""

    def __init__(self, layers: int = 3, width: int = 8) -> None:
        super().__init__()
        self.lift = nn.Linear(1, width)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(layers))
        self.head = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.lift(x.square().sum(-1, keepdim=True))
        for layer in self.layers:
            h = h + layer(h)
        out: Tensor = self.head(h)
        return out


class Pair(nn.Module):
    """A layer with two outputs: vectors and invariants."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Linear(width, 1)
        self.mix = nn.Linear(width, width)

    def forward(self, x: Tensor, h: Tensor, *, v: Tensor | None = None) -> tuple[Tensor, Tensor | None, Tensor]:
        return x * self.scale(h), v, torch.tanh(self.mix(h))


class TwoOutputs(nn.Module):
    """Vectors and invariants side by side (x, h) -> (x, h): two sites on one layer, a chain fed elsewhere."""

    def __init__(self, layers: int = 2, width: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Linear(2, width)
        self.layers = nn.ModuleList(Pair(width) for _ in range(layers))

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = self.embedding(torch.cat([h, x.square().sum(-1, keepdim=True)], -1))
        for layer in self.layers:
            x, v, h = layer(x, h, v=x)
            x = x + v
        return x, h


class VectorMaps(nn.Module):
    """Vector channels [n, 3, c]: two linear maps inside one layer share an input."""

    def __init__(self, channels: int = 4) -> None:
        super().__init__()
        self.map_to_feat = nn.Linear(channels, channels, bias=False)
        self.map_to_dir = nn.Linear(channels, channels, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        p, d = self.map_to_feat(x), self.map_to_dir(x)
        dot = (p * d).sum(-2, keepdim=True)
        return torch.where(dot >= 0, p, p - dot / (d.square().sum(-2, keepdim=True) + 1e-6) * d)


class Adapter:
    """What the three have in common."""

    model: type[nn.Module]

    @hookimpl
    def ace_upstream(self) -> Upstream:
        return Upstream(title=self.model.__name__, models=(class_path(self.model),))

    @hookimpl
    def ace_preset(self) -> dict[str, dict[str, Any]]:
        """Most tests are of the paper's loop. Those of the one that fits the run name the preset "fit"."""
        return {"fit": {"loop": "paper", "mode": "strict"}}


def _seeded(seed: int, make: Any) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return make()


class LayeredAdapter(Adapter):
    model = Layered

    @hookimpl
    def ace_layers(self, model: Any) -> Sequence[Node]:
        return [
            Site(f"layers.{i}", f"layers.{i}", (layer[0].in_features,), (layer[0].out_features,))
            for i, layer in enumerate(model.layers)
        ]

    @hookimpl
    def ace_group_action(self) -> GroupAction:
        return GroupAction(O3, inputs={"x": Vectors()}, outputs=Invariant())

    @hookimpl
    def ace_example(self, seed: int) -> Example:
        return _seeded(seed, lambda: Example(Layered(), (torch.randn(16, 3),)))  # type: ignore[no-any-return]


class BrokenLayered(LayeredAdapter):
    """The same upstream, with branches that read x itself and so break the symmetry."""

    @hookimpl
    def ace_layers(self, model: Any) -> Sequence[Node]:
        nodes: list[Node] = [Stem("stem", Tap("x", ""), (3,), (8,))]
        nodes += [Site(f"layers.{i}", f"layers.{i}", (8,), (8,), reads="stem") for i in range(len(model.layers))]
        return nodes


class TwoOutputsAdapter(Adapter):
    model = TwoOutputs

    @hookimpl
    def ace_layers(self, model: Any) -> Sequence[Node]:
        width = model.embedding.out_features
        nodes: list[Node] = [
            Stem("lift_h", Tap(0, "embedding"), (2,), (width,)),
            Stem("lift_x", Tap("x", ""), (3,), (3,)),
            Stem("turn_x", None, (3,), (3,)),
        ]
        before = "lift_h"
        for i in range(len(model.layers)):
            nodes.append(Site(f"layers.{i}.h", f"layers.{i}", (width,), (width,), reads=before, output=2))
            nodes.append(Site(f"layers.{i}.x", f"layers.{i}", (3,), (3,), reads=Tap("x"), output=0, through="turn_x"))
            nodes.append(Site(f"layers.{i}.v", f"layers.{i}", (3,), (3,), reads="lift_x", output=1))
            before = f"layers.{i}.h"
        return nodes

    @hookimpl
    def ace_branch(self, site: Node) -> nn.Module:
        return linear(site)

    @hookimpl
    def ace_group_action(self) -> GroupAction:
        return GroupAction(O3, inputs={"x": Vectors()}, outputs=(Vectors(), Invariant()))

    @hookimpl
    def ace_example(self, seed: int) -> Example:
        return _seeded(  # type: ignore[no-any-return]
            seed, lambda: Example(TwoOutputs(), (torch.randn(16, 3),), {"h": torch.randn(16, 1)})
        )


class VectorMapsAdapter(Adapter):
    model = VectorMaps

    @hookimpl
    def ace_layers(self, model: Any) -> Sequence[Node]:
        shapes = (3, model.map_to_feat.in_features), (3, model.map_to_feat.out_features)
        acts = Vectors(axis=-2), Vectors(axis=-2)
        return [Site(name, name, *shapes, acts=acts) for name in ("map_to_feat", "map_to_dir")]

    @hookimpl
    def ace_branch(self, site: Node) -> nn.Module:
        return linear(site)

    @hookimpl
    def ace_group_action(self) -> GroupAction:
        return GroupAction(SO3, inputs={"x": Vectors(axis=-2)}, outputs=Vectors(axis=-2))

    @hookimpl
    def ace_example(self, seed: int, model: Any) -> Example:
        def make() -> Example:
            made = VectorMaps() if model is None else model
            return Example(made, (torch.randn(16, 3, made.map_to_feat.in_features),))

        return _seeded(seed, make)  # type: ignore[no-any-return]


class Free(nn.Module):
    """A vector theta [n] and layers that do nothing, for objectives written in theta and gamma directly."""

    def __init__(self, theta: Tensor, layers: int) -> None:
        super().__init__()
        self.theta = nn.Parameter(theta.clone())
        self.layers = nn.ModuleList(nn.Identity() for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class FreeAdapter(Adapter):
    model = Free

    @hookimpl
    def ace_layers(self, model: Any) -> Sequence[Node]:
        return [Site(f"layers.{i}", f"layers.{i}", (1,), (1,)) for i in range(len(model.layers))]

    @hookimpl
    def ace_branch(self, site: Node) -> nn.Module:
        return linear(site)


ADAPTERS = {
    "free": FreeAdapter,
    "layered": BrokenLayered,
    "two_outputs": TwoOutputsAdapter,
    "vector_maps": VectorMapsAdapter,
}
