"""The measured error against models whose error is known, and what a measurement must not touch."""

from __future__ import annotations

import copy
import json
import math
import random
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import BarePoints, FrozenPoints, Members, Points, Symmetric, normal
from torch import Tensor, nn

from ace_plugins.adapter import (
    E2,
    E3,
    SE3,
    SO2,
    SO3,
    Action,
    Cyclic,
    Grid,
    GroupAction,
    Invariant,
    Positions,
    Tensors,
    Vectors,
)
from ace_plugins.errors import AdapterError, ConfigError
from ace_plugins.symmetry.measure import Call, as_call, forward_names, measure

quick = settings(max_examples=12, deadline=None, derandomize=True)


class Distances(nn.Module):
    """[n, 3] -> [n, n], invariant under E(3)."""

    def forward(self, pos: Tensor) -> Tensor:
        return (pos[:, None] - pos[None]).square().sum(-1).sqrt()


class Centred(nn.Module):
    """[n, 3] -> [n, 3], vectors under E(3)."""

    def forward(self, pos: Tensor) -> Tensor:
        return pos - pos.mean(0)


class Shifted(nn.Module):
    """[n, 3] -> [n, 3]: x + b."""

    def __init__(self, b: Tensor) -> None:
        super().__init__()
        self.b = nn.Parameter(b)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b


class Function(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Any) -> Any:
        return self.function(x)


INVARIANT = GroupAction(E3, {"pos": Positions()}, Invariant())
EQUIVARIANT = GroupAction(E3, {"pos": Positions()}, Vectors())
VECTORS = GroupAction(SO3, {"x": Vectors()}, Vectors())


# --- the number


@pytest.mark.parametrize(("model", "action"), [(Distances(), INVARIANT), (Centred(), EQUIVARIANT)])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.float64, 1e-13)])
def test_equivariant_models_measure_rounding_error(
    model: nn.Module, action: GroupAction, dtype: torch.dtype, bound: float
) -> None:
    error = measure(model, action, normal(6, 3, dtype=dtype), samples=8)
    assert 0 <= error.relative < bound
    assert 0 <= error.absolute < bound * 10
    assert (error.samples, error.group) == (8, "E(3)")


@quick
@given(st.floats(1e-3, 1e3), st.integers(0, 1000), st.integers(1, 4))
def test_a_shift_has_its_error_in_closed_form(size: float, seed: int, samples: int) -> None:
    # f(x) = x + b: rho f(x) - f(rho x) = R b - b, the same for every row
    x, b = normal(5, 3, seed=seed), size * normal(3, seed=seed + 1)
    error = measure(Shifted(b), VECTORS, x, samples=samples, seed=seed)
    gen = torch.Generator().manual_seed(seed)
    norms = [float((SO3.sample(gen).matrix @ b - b).norm()) for _ in range(samples)]
    mean = sum(norms) / samples
    assert error.absolute == pytest.approx(mean, rel=1e-9)
    assert error.relative == pytest.approx(mean * math.sqrt(5) / float((x + b).norm()), rel=1e-9)
    assert float(error) == error.absolute
    assert measure(Shifted(b), VECTORS, x, samples=samples, seed=seed) == error
    assert json.loads(json.dumps(error.to_dict()))["group"] == "SO(3)"


def test_translations_scale_with_scale() -> None:
    # f(x) = x declared as vectors ignores the translation t: the error is |t|, E|t| = 2 scale sqrt(2/pi)
    action = GroupAction(SE3, {"input": Positions()}, Vectors())
    one, ten = (measure(nn.Identity(), action, normal(4, 3), samples=400, scale=s) for s in (1.0, 10.0))
    assert one.absolute == pytest.approx(2 * math.sqrt(2 / math.pi), rel=0.1)
    assert ten.absolute == pytest.approx(10 * one.absolute)
    assert measure(nn.Identity(), action, normal(4, 3), scale=0.0).absolute < 1e-14


@pytest.mark.parametrize("shape", [(), (4,), (4, 1), (2, 2, 1)])
def test_rows_of_any_shape(shape: tuple[int, ...]) -> None:
    # the first coordinate, summed and spread over the shape, declared invariant: every row errs alike
    action, x = GroupAction(SO3, {"x": Vectors()}, Invariant()), normal(5, 3)
    error = measure(Function(lambda x: x[:, 0].sum().expand(shape)), action, x, samples=3)
    reference = measure(Function(lambda x: x[:, 0].sum()), action, x, samples=3)
    assert error.absolute == pytest.approx(reference.absolute)
    assert error.relative == pytest.approx(reference.relative)


def test_several_outputs_count_as_one() -> None:
    b = normal(3, seed=3)
    x = normal(4, 3)
    both = GroupAction(SO3, {"x": Vectors()}, [Vectors(), Vectors(), None, Vectors()])
    error = measure(Function(lambda x: (x + b, x[:2], b, None)), both, x, samples=2)
    single = measure(Function(lambda x: x + b), VECTORS, x, samples=2)
    # 4 rows that err and 2 that do not; norms over everything
    assert error.absolute == pytest.approx(single.absolute * 4 / 6)
    norm = float((x + b).norm())
    assert error.relative == pytest.approx(single.relative * norm / math.hypot(norm, float(x[:2].norm())))
    by_key = GroupAction(SO3, {"x": Vectors()}, {"a": Vectors(), "b": Vectors()})
    assert measure(Function(lambda x: {"a": x + b, "b": x[:2], "c": b}), by_key, x, samples=2) == error


def test_zero_outputs() -> None:
    x = normal(4, 3)
    assert measure(Function(torch.zeros_like), VECTORS, x).relative == 0
    rest = x.clone()
    only_there = measure(Function(lambda y: torch.zeros_like(y) if torch.equal(y, rest) else y), VECTORS, x)
    assert only_there.relative == math.inf
    assert math.isnan(measure(Function(lambda x: x * math.nan), VECTORS, x).relative), "and no number is no pass"


# --- the call


def test_as_call() -> None:
    a, b = object(), object()
    assert as_call(Call((a,), {"b": b})) == ((a,), {"b": b})
    assert as_call((a, b)) == ((a, b), {})
    assert as_call({"a": a}) == ((), {"a": a})
    assert as_call([a]) == (([a],), {})
    assert as_call(a) == ((a,), {})
    assert as_call(Call(args=({"a": a},))) == (({"a": a},), {})
    with pytest.raises(ConfigError, match=r"batch does not fit Centred.forward\(pos\): keywords must be strings"):
        measure(Centred(), EQUIVARIANT, {1: a})


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: (x,), lambda x: {"pos": x}, lambda x: Call((), {"pos": x})])
def test_every_form_of_batch(wrap: Any) -> None:
    assert measure(Centred(), EQUIVARIANT, wrap(normal(5, 3))).relative < 1e-13
    # the action really was applied: declared invariant, the same model errs
    assert measure(Centred(), INVARIANT, wrap(normal(5, 3))).relative > 0.1


def test_forward_names() -> None:
    class Starred(nn.Module):
        def forward(self, x: Tensor, *rest: Tensor, v: Tensor | None = None, **more: Any) -> Tensor:
            return x

    assert forward_names(Centred()) == ["pos"]
    assert forward_names(Starred()) == ["x", "*rest", "v", "**more"]
    assert forward_names(nn.DataParallel(Centred())) == ["pos"]
    assert forward_names(nn.DataParallel(Starred())) == ["x", "*rest", "v", "**more"]


class ClonedPoints(BarePoints):
    def clone(self) -> ClonedPoints:
        return ClonedPoints(self.pos.clone())


def graph_of(pos: Tensor) -> Any:
    return pytest.importorskip("torch_geometric.data").Data(pos=pos)


CONTAINERS = [Points, FrozenPoints, BarePoints, graph_of]


@pytest.mark.parametrize("make", [*CONTAINERS, ClonedPoints])
def test_an_argument_that_the_model_writes_into(make: Callable[[Tensor], Any]) -> None:
    def greedy(points: Any) -> Tensor:
        pos: Tensor = points.pos
        pos -= pos.mean(0)
        if not isinstance(points, FrozenPoints):
            points.x = pos
        return pos.requires_grad_().clone()

    points = make(normal(5, 3))
    action = GroupAction(E3, {"x.pos": Positions()}, Vectors())
    assert measure(Function(greedy), action, points).relative < 1e-13
    assert torch.equal(points.pos, normal(5, 3))
    assert not points.pos.requires_grad
    assert getattr(points, "x", None) is None


@pytest.mark.parametrize("make", [lambda pos: pos, lambda pos: Call(([{"pos": pos}],)), *CONTAINERS])
@pytest.mark.parametrize("grad", [False, True])
def test_every_forward_sees_the_flag_of_the_input(make: Callable[[Tensor], Any], grad: bool) -> None:
    seen = []

    def spy(x: Any) -> Tensor:
        pos: Tensor = x if isinstance(x, Tensor) else x[0]["pos"] if isinstance(x, list) else x.pos
        seen.append((pos.requires_grad, pos.is_leaf))
        if grad:
            torch.autograd.backward(pos.sum())
        return pos

    pos = normal(4, 3).requires_grad_(grad)
    batch = make(pos)
    path = "x" if batch is pos else "x.0.pos" if isinstance(batch, Call) else "x.pos"
    for context in (nullcontext(), torch.no_grad(), torch.inference_mode()):
        with context:
            measure(Function(spy), GroupAction(SO3, {path: Vectors()}, Vectors()), batch, samples=2)
    assert seen == [(grad, True)] * 9
    assert pos.grad is None
    assert pos.requires_grad == grad


# --- what stays as it was


class Mixed(nn.Module):
    """Dropout, batch normalisation and noise, some layers frozen in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)
        self.inner = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(0.5))
        self.inner[1].eval()
        self.fail = False

    def forward(self, x: Tensor) -> Tensor:
        if self.fail:
            raise RuntimeError("broken forward")
        noise = torch.randn(1, dtype=x.dtype)
        return self.drop(self.inner(x)) * noise  # type: ignore[no-any-return]


@pytest.mark.parametrize("fail", [False, True])
def test_flags_buffers_batch_and_random_streams_are_untouched(fail: bool) -> None:
    model, x = Mixed().double(), normal(4, 3).requires_grad_()
    model.fail = fail
    batch = {"x": x}
    flags = [module.training for module in model.modules()]
    state = copy.deepcopy(model.state_dict())
    streams = torch.random.get_rng_state(), random.getstate()
    assert len(set(flags)) == 2
    if fail:
        with pytest.raises(RuntimeError, match="broken forward"):
            measure(model, VECTORS, batch)
    else:
        measure(model, VECTORS, batch)
    assert [module.training for module in model.modules()] == flags
    assert all(torch.equal(state[key], value) for key, value in model.state_dict().items())
    assert torch.equal(streams[0], torch.random.get_rng_state())
    assert random.getstate() == streams[1]
    assert batch["x"] is x
    assert torch.equal(x, normal(4, 3))
    assert torch.is_grad_enabled()


def test_every_forward_sees_the_same_random_numbers() -> None:
    seen = []

    def noisy(x: Tensor) -> Tensor:
        seen.append(torch.rand(()).item())
        return x * seen[-1]

    assert measure(Function(noisy), VECTORS, normal(4, 3), samples=3).relative < 1e-13
    assert len(seen) == 4
    with torch.random.fork_rng(devices=[]):
        torch.rand(())  # wherever the caller's stream stands
        measure(Function(noisy), VECTORS, normal(4, 3), samples=3)
    assert len(seen) == 8
    assert len(set(seen)) == 1


def test_an_output_that_the_next_forward_overwrites() -> None:
    class Reusing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("out", torch.zeros(4, 3, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            assert isinstance(self.out, Tensor)
            return self.out.copy_(x)

    constant = GroupAction(SO3, {"x": Vectors()}, Invariant())
    assert measure(Reusing(), constant, normal(4, 3)).relative > 0.1  # not compared with itself


# --- models that differentiate inside their forward


class Molecule(nn.Module):
    """Energy of pair distances, with forces -dE/dpos and the stress dE/dstrain."""

    def __init__(self, create_graph: bool = False, bias: float = 0.0) -> None:
        super().__init__()
        self.pair = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1)).double()
        for i, parameter in enumerate(self.pair.parameters()):
            parameter.data = normal(*parameter.shape, seed=i)
        self.create_graph, self.bias = create_graph, bias

    def forward(self, pos: Tensor) -> dict[str, Tensor]:
        pos.requires_grad_()
        strain = torch.zeros(3, 3, dtype=pos.dtype, requires_grad=True)
        moved = pos + pos @ strain
        i, j = torch.triu_indices(len(pos), len(pos), 1)
        energy = self.pair((moved[i] - moved[j]).norm(dim=-1, keepdim=True)).sum()
        down, stress = torch.autograd.grad(energy, [pos, strain], create_graph=self.create_graph)
        return {"energy": energy, "forces": -down + self.bias, "stress": stress}


OUTPUTS = {"energy": Invariant(), "forces": Vectors(), "stress": Tensors()}
AROUND: list[Callable[[], AbstractContextManager[Any]]] = [nullcontext, torch.no_grad, torch.inference_mode]


def molecule_action(**outputs: Action) -> GroupAction:
    return GroupAction(E3, {"pos": Positions()}, outputs)


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("create_graph", [False, True])
def test_forces_and_stress(create_graph: bool, around: Callable[[], AbstractContextManager[Any]]) -> None:
    model, pos = Molecule(create_graph), normal(5, 3)
    kept = [torch.ones_like(parameter) for parameter in model.parameters()]
    for parameter, gradient in zip(model.parameters(), kept, strict=True):
        parameter.grad = gradient
    with around():
        assert measure(model, molecule_action(**OUTPUTS), pos, scale=3.0).relative < 1e-9
        for name, action in OUTPUTS.items():  # one by one: a large output does not hide the others
            assert measure(model, molecule_action(**{name: action}), pos).relative < 1e-9
    assert not pos.requires_grad
    assert pos.grad is None
    assert all(p.grad is g and bool((g == 1).all()) for p, g in zip(model.parameters(), kept, strict=True))


def test_wrong_forces_and_wrong_stress_are_found() -> None:
    pos = normal(5, 3)
    assert measure(Molecule(bias=1e-6), molecule_action(**OUTPUTS), pos).relative > 1e-9
    for wrong in ({"forces": Invariant()}, {"forces": Positions()}, {"stress": Vectors()}, {"stress": Invariant()}):
        assert measure(Molecule(), molecule_action(**wrong), pos).relative > 0.1


def test_an_object_with_another_clone_method_gets_no_gradients() -> None:
    def backward(x: Any) -> Tensor:
        torch.autograd.backward(x.pos.requires_grad_().sum())
        return x.pos.detach()  # type: ignore[no-any-return]

    points = ClonedPoints(normal(4, 3).requires_grad_())
    assert measure(Function(backward), GroupAction(SO3, {"x.pos": Vectors()}, Vectors()), points).relative < 1e-13
    assert points.pos.grad is None


@pytest.mark.parametrize("fail", [False, True])
def test_a_forward_that_calls_backward_leaves_no_gradients(fail: bool) -> None:
    weight = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
    unused = nn.Parameter(torch.tensor(1.0))
    weight.grad = gradient = torch.tensor(7.0, dtype=torch.float64)

    class Backward(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.unused = weight, unused

        def forward(self, x: Tensor) -> Tensor:
            torch.autograd.backward(self.weight * x.square().sum())
            if fail:
                raise RuntimeError("broken forward")
            assert x.grad is not None
            return x.grad

    x = normal(4, 3).requires_grad_()
    with pytest.raises(RuntimeError, match="broken forward") if fail else nullcontext():
        assert measure(Backward(), VECTORS, x).relative < 1e-13
    assert weight.grad is gradient
    assert float(gradient) == 7
    assert unused.grad is None
    assert x.grad is None


def test_a_batch_that_was_made_in_inference_mode() -> None:
    with torch.inference_mode():
        x = normal(4, 3).requires_grad_()
    assert measure(Molecule(), molecule_action(**OUTPUTS), x).relative < 1e-9


# --- groups other than those of space


class DeepSet(nn.Module):
    """[n, c] -> [n, c]: every member for itself, and the mean of all; with ``rank`` the order matters."""

    def __init__(self, rank: float = 0.0) -> None:
        super().__init__()
        self.own, self.mean, self.rank = normal(3, 3, seed=1), normal(3, 3, seed=2), rank

    def forward(self, members: Tensor) -> Tensor:
        order = self.rank * torch.arange(len(members))[:, None]
        return torch.tanh(members @ self.own + members.mean(0) @ self.mean + order)


def test_a_group_from_elsewhere() -> None:
    x = normal(6, 3)
    permuted = GroupAction(Symmetric(6), {"members": Members()}, Members())
    error = measure(DeepSet(), permuted, x)
    assert (error.group, error.relative < 1e-14) == ("S_6", True)
    assert measure(DeepSet(rank=0.1), permuted, x).relative > 1e-3
    with pytest.raises(AdapterError, match="input 'members': Members.*expected a Permutation, found Rigid"):
        measure(DeepSet(), GroupAction(SO3, {"members": Members()}, Invariant()), x)
    with pytest.raises(AdapterError, match="output: Vectors.*: expected .*Rigid, found Permutation"):
        measure(DeepSet(), GroupAction(Symmetric(6), {"members": Members()}, Vectors()), x)


class Network(nn.Module):
    """[b, 1, H, W] -> [b, 1, H, W], equivariant under C_4 where the kernel is averaged over its four turns."""

    def __init__(self, averaged: bool) -> None:
        super().__init__()
        kernel = normal(1, 1, 3, 3)
        turned = [torch.rot90(kernel, k, (-2, -1)) for k in range(4 if averaged else 1)]
        self.kernel = nn.Parameter(torch.stack(turned).mean(0))

    def forward(self, image: Tensor) -> Tensor:
        return torch.tanh(torch.conv2d(image, self.kernel, padding=1))


def test_image_networks() -> None:
    image = normal(2, 1, 8, 8)
    quarter, any_angle = (GroupAction(group, {"image": Grid()}, Grid()) for group in (Cyclic(4), SO2))
    assert measure(Network(averaged=True), quarter, image, samples=10).relative < 1e-14
    assert measure(Network(averaged=False), quarter, image, samples=10).relative > 0.1
    # other angles are resampled, and white noise does not survive that
    assert measure(Network(averaged=True), any_angle, image).relative > 0.1
    pooled = GroupAction(Cyclic(4), {"input": Grid()}, Invariant())
    assert measure(nn.Sequential(Network(averaged=True), nn.AdaptiveAvgPool2d(1)), pooled, image).relative < 1e-13
    assert measure(nn.Sequential(Network(averaged=True)), pooled, image).relative > 0.1


@pytest.mark.parametrize("group", [SO2, E2, Cyclic(7)], ids=lambda g: g.name)
def test_planar_vectors(group: Any) -> None:
    assert measure(Centred(), GroupAction(group, EQUIVARIANT.inputs, Vectors()), normal(5, 2)).relative < 1e-13
    stretched = Function(lambda x: x * torch.tensor([1.0, 2.0]))
    assert measure(stretched, GroupAction(group, {"x": Vectors()}, Vectors()), normal(5, 2)).relative > 0.1


# --- refusals


@pytest.mark.parametrize(
    ("model", "action", "x", "message"),
    [
        (
            Function(lambda x: (x, None)),
            GroupAction(SO3, {}, [None, Vectors()]),
            normal(4, 3),
            "no tensor with an action",
        ),
        (Function(lambda x: x), VECTORS, normal(0, 3), r"no values to compare, found {'output': \[0, 3\]}"),
        (Function(lambda x: x[x[:, 0] > 0]), VECTORS, normal(5, 3), "shapes of the outputs depend"),
        (Centred(), VECTORS, normal(5, 3), "unknown forward argument 'x': expected one of pos"),
    ],
)
def test_nothing_compared_is_not_a_pass(model: nn.Module, action: GroupAction, x: Tensor, message: str) -> None:
    with pytest.raises(AdapterError, match=message):
        measure(model, action, x, samples=20)
    with pytest.raises(ConfigError, match="samples: expected at least 1, found 0"):
        measure(model, action, x, samples=0)
