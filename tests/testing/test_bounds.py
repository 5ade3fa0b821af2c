"""The paper's bounds: never below what is measured where B and M are known, and what is told of real branches."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from toy import Adapter, Layered, TwoOutputs, VectorMaps

from ace_plugins import attach, bounds, equivariance_error
from ace_plugins.adapter import (
    O3,
    GroupAction,
    Node,
    Site,
    Stem,
    Tap,
    Vectors,
    hookimpl,
    linear,
)
from ace_plugins.errors import AceError, AdapterError, AttachError, ConfigError
from ace_plugins.plugins.registry import registry
from ace_plugins.testing.bounds import theorem_1, theorem_2

CHANNELS = 3


def stretched(generator: torch.Generator, size: int, by: float) -> Tensor:
    """A random matrix of that spectral norm."""
    matrix = torch.randn(size, size, generator=generator, dtype=torch.float64)
    return by * matrix / torch.linalg.matrix_norm(matrix, 2)


class Known:
    """Layers of vector channels [n, 3, c] with f_eq of Lipschitz constant M and f_neq of norm B <= M, 0 at 0.

    ``kind`` is "random", "bent" (random, with nonlinearities) or "worst": layers that stretch the same vector, and
    branches that a quarter turn makes do the opposite.
    """

    def __init__(self, seed: int, layers: int, B: float, M: float, kind: str) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.eq = [stretched(generator, CHANNELS, M) for _ in range(layers)]
        self.neq = [stretched(generator, 3 * CHANNELS, B) for _ in range(layers)]
        self.x = torch.randn(4, 3, CHANNELS, generator=generator, dtype=torch.float64)
        self.turn = O3.sample(generator).matrix
        self.bent = kind == "bent"
        if kind == "worst":
            mirror, one = torch.diag(torch.tensor([1.0, -1.0, 1.0])).double(), torch.eye(CHANNELS, dtype=torch.float64)
            self.eq, self.neq = [M * one] * layers, [B * torch.kron(mirror, one)] * layers
            self.x[:, 1:] = 0
            self.turn = torch.tensor([[0.0, -1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0]]).double()

    def __call__(self, x: Tensor, gammas: Sequence[float]) -> Tensor:
        for eq, neq, gamma in zip(self.eq, self.neq, gammas, strict=True):
            same = x @ eq.T
            other = (x.flatten(1) @ neq.T).view_as(x)
            if self.bent:
                # Both have slope 1 at most. The nearest vector of length 1 at most turns with the vector.
                same = same / same.norm(dim=1, keepdim=True).clamp(min=1)
                other = other.relu()
            x = same + gamma * other
        return x


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**31),
    gammas=st.one_of(
        st.lists(st.floats(-2, 2), min_size=1, max_size=5), st.lists(st.floats(0, 2), min_size=1, max_size=5)
    ),
    M=st.floats(0.05, 3),
    share=st.one_of(st.just(1.0), st.floats(0, 1)),
    kind=st.sampled_from(["random", "bent", "worst"]),
)
def test_what_is_measured_is_never_above_the_bounds(
    seed: int, gammas: list[float], M: float, share: float, kind: str
) -> None:
    B = share * M
    f = Known(seed, len(gammas), B, M, kind)
    norm = float(f.x.norm())
    rounding = 1e-12 * norm * (M * (1 + max(map(abs, gammas)))) ** len(gammas) + 1e-300
    dropped = float((f(f.x, gammas) - f(f.x, [0.0] * len(gammas))).norm())
    assert dropped <= theorem_1(gammas, B, M, norm) + rounding
    turned = float((f.turn @ f(f.x, gammas) - f(f.turn @ f.x, gammas)).norm())
    assert turned <= theorem_2(gammas, B, M, norm) + rounding


def test_the_bounds_are_reached() -> None:
    """One layer: by the vector that is stretched most, and by a branch that turns the other way."""
    matrix = torch.diag(torch.tensor([0.3, 0.1])).double()
    x = torch.tensor([2.0, 0.0]).double()
    assert float((1.5 * matrix @ x).norm()) == pytest.approx(theorem_1([1.5], 0.3, 7.0, 2.0))
    mirror = 0.3 * torch.tensor([[1.0, 0.0], [0.0, -1.0]]).double()
    quarter = torch.tensor([[0.0, -1.0], [1.0, 0.0]]).double()
    error = float((quarter @ mirror @ x - mirror @ quarter @ x).norm())
    assert error == pytest.approx(theorem_2([1.0], 0.3, 7.0, 2.0))
    assert 0.3 * theorem_2([1.0], 0.3, 7.0, 2.0) < error, "the paper's factor B for the action is no bound if B < 1"


def test_the_bounds_as_they_are_printed() -> None:
    gammas, B, M = [0.5, -0.2, 0.1], 2.0, 1.5
    assert theorem_1(gammas, B, M, 3.0) == pytest.approx(B * M**2 * (0.5 + 0.2 * 1.5 + 0.1 * 1.5 * 1.2) * 3.0)
    C = max(B / M, 1)
    a, b, c = (1 + C * gamma for gamma in (0.5, 0.2, 0.1))
    total = 0.5 * b * c + 0.2 * a * c + 0.1 * a * b
    assert B * theorem_2(gammas, B, M, 3.0) == pytest.approx(2 * B**2 * M**2 * total * 3.0)
    assert theorem_1([0.0, 0.0], B, M, 3.0) == theorem_2([0.0, 0.0], B, M, 3.0) == 0


class Chain(nn.Module):
    """`Known` as a model: the layers and nothing else."""

    def __init__(self, layers: int = 3, by: float = 1.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(CHANNELS, CHANNELS, bias=False) for _ in range(layers))
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for layer in self.layers:
                layer.weight.copy_(stretched(generator, CHANNELS, by))  # type: ignore[operator,union-attr]

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class ChainAdapter(Adapter):
    model = Chain

    @hookimpl
    def ace_layers(self, model: Any) -> Sequence[Node]:
        return [Site(f"layers.{i}", f"layers.{i}", (3, CHANNELS), (3, CHANNELS)) for i in range(len(model.layers))]

    @hookimpl
    def ace_branch(self, site: Node) -> nn.Module:
        branch = linear(site)
        branch.inner.bias = None  # type: ignore[assignment]
        return branch

    @hookimpl
    def ace_group_action(self) -> GroupAction:
        return GroupAction(O3, {"x": Vectors(axis=-2)}, outputs=Vectors(axis=-2))


@pytest.fixture
def _chain() -> Iterator[None]:
    registry().add(ChainAdapter(), "chain")
    yield
    registry().remove("chain")


def with_gammas(model: Any, *gammas: float) -> Any:
    with torch.no_grad():
        model.ace.gamma.copy_(torch.tensor(gammas))
    return model


@pytest.mark.usefixtures("_chain")
def test_an_attached_model_that_is_as_the_theorems_have_it() -> None:
    model: Any = with_gammas(attach(Chain(by=0.8).double(), trace=False), 0.5, -0.3, 0.2)
    with torch.no_grad():
        for number in range(3):
            branch = model.ace.branch(f"layers.{number}").inner
            branch.weight.mul_(0.2 * (number + 1) / sigma(branch))
    x = torch.randn(5, 3, CHANNELS, dtype=torch.float64)
    found = bounds(model, x)
    for number, (name, B) in enumerate(found.branches.items()):
        assert name == f"layers.{number}"
        assert 0.3 < B / (0.2 * (number + 1)) <= 1 + 1e-12, "at most the spectral norm"
    assert found.gammas == pytest.approx({"layers.0": 0.5, "layers.1": -0.3, "layers.2": 0.2})
    assert max(found.branches.values()) == found.B
    assert found.norm == pytest.approx(float(x.norm()))
    assert pytest.approx(1) == found.M, "nothing follows the last site, which counts as a layer of constant 1"
    assert found.theorem_1 == pytest.approx(theorem_1([0.5, -0.3, 0.2, 0.0], found.B, 1.0, float(x.norm())))
    assert found.theorem_2 == pytest.approx(theorem_2([0.5, -0.3, 0.2, 0.0], found.B, 1.0, float(x.norm())))
    inner = [model.ace.branch(f"layers.{number}").inner for number in range(3)]
    maps = [(eq.weight.detach(), neq.weight.detach()) for eq, neq in zip(model.layers, inner, strict=True)]
    by_hand = plain = x
    for (eq, neq), gamma in zip(maps, (0.5, -0.3, 0.2), strict=True):
        by_hand = by_hand @ eq.T + gamma * (by_hand.flatten(1) @ neq.T).view_as(x)
        plain = plain @ eq.T
    assert found.measured_1 == pytest.approx(float((by_hand - plain).norm()))
    assert found.measured_1 < found.theorem_1
    assert found.measured_2 < found.theorem_2
    json.dumps(found.to_dict())


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("size", [0.05, 1.0])
@pytest.mark.parametrize(
    ("make", "batch"),
    [(Layered, (8, 3)), (VectorMaps, (8, 3, 4)), (TwoOutputs, (8, 3)), (Chain, (8, 3, CHANNELS))],
)
@pytest.mark.usefixtures("_chain")
def test_what_is_measured_is_below_the_bound_of_other_models(
    make: type[nn.Module], batch: tuple[int, ...], size: float, seed: int
) -> None:
    torch.manual_seed(seed)
    model: Any = attach(make(), trace=False)
    with torch.no_grad():
        model.ace.gamma.copy_(size * torch.randn_like(model.ace.gamma))
    x: Any = torch.randn(batch)
    x = (x, torch.randn(8, 1)) if make is TwoOutputs else x
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = bounds(model, x)
    assert 0 < found.measured_1 <= found.theorem_1
    assert 0 < found.measured_2 <= found.theorem_2
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    nothing = bounds(with_gammas(model, *[0.0] * len(model.ace.gamma)), x)
    assert (nothing.theorem_1, nothing.theorem_2, nothing.measured_1) == (0, 0, 0)
    assert nothing.measured_2 < 1e-12
    assert nothing.measured_2 == pytest.approx(0, abs=10 * equivariance_error(model, x).absolute + 1e-12)


def sigma(layer: Any) -> float:
    return float(torch.linalg.matrix_norm(layer.weight.detach().double(), 2))


def test_bounded_branches_without_biases_have_a_bound_of_1() -> None:
    model: Any = attach(VectorMaps().double(), trace=False, spectral_norm=True)
    with torch.no_grad():
        for name in ("map_to_feat", "map_to_dir"):
            model.ace.branch(name).inner.bias.zero_()
    x = torch.randn(6, 3, 4, dtype=torch.float64)
    assert 0.3 < bounds(model, x).B <= 1 + 1e-4
    with torch.no_grad():
        model.ace.branch("map_to_dir").inner.bias.fill_(10.0)
    assert pytest.approx(10 * math.sqrt(6 * 12) / float(x.norm()), rel=0.2) == bounds(model, x).B


def use_hooks(**hooks: Any) -> None:
    """Register the adapter of `Chain` with some hooks replaced."""
    registry().remove("chain")
    registry().add(type("Other", (ChainAdapter,), {name: hookimpl(hook) for name, hook in hooks.items()})(), "chain")


@pytest.mark.parametrize("stem", [True, False])
@pytest.mark.usefixtures("_chain")
def test_a_branch_that_reads_a_stem_or_another_branch(stem: bool) -> None:
    shapes = (3, CHANNELS), (3, CHANNELS)
    first: Node = Stem("first", Tap(0, "layers.0"), *shapes) if stem else Site("first", "layers.0", *shapes)
    use_hooks(ace_layers=lambda self, model: [first, Site("second", "layers.1", *shapes, reads="first")])
    model: Any = attach(Chain(2).double(), trace=False)
    with torch.no_grad():
        model.ace.gamma.fill_(0.4)
    x = torch.randn(4, 3, CHANNELS, dtype=torch.float64)
    found = bounds(model, x)
    both = sigma(model.ace.branch("first").inner) * sigma(model.ace.branch("second").inner)
    assert 0.1 * both < found.branches["second"] <= both
    assert found.norm == pytest.approx(float(x.norm()))
    assert 0 < found.measured_1 <= found.theorem_1


@pytest.mark.usefixtures("_chain")
def test_a_layer_that_runs_twice_has_no_bound() -> None:
    use_hooks(ace_layers=lambda self, model: [Site("one", "layers.0", (3, CHANNELS), (3, CHANNELS))])
    model: Any = Chain(1)
    model.layers.append(model.layers[0])
    with pytest.raises(AdapterError, match="branch of 'one' does not run exactly once"):
        bounds(with_gammas(attach(model, trace=False), 0.4), torch.randn(4, 3, CHANNELS))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: bounds(Layered(), torch.randn(4, 3)), AttachError, "Layered has no ACE attached"),
        (lambda: bounds(attach(Layered(), trace=False), torch.randn(4, 3), samples=0), ConfigError, "samples"),
    ],
)
def test_mistakes_are_named(call: Any, error: type[AceError], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
