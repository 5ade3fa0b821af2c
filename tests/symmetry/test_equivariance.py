"""The measured error against models whose error is known, and what a measurement must not touch."""

from __future__ import annotations

import copy
import importlib.util
import json
import math
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from ace_plugins.actions import E3, O3, SE3, SO3, GroupAction, Invariant, Positions, Vectors
from ace_plugins.symmetry.measuring import (
    Call,
    EquivarianceError,
    as_call,
    assert_equivariant,
    forward_names,
    measure,
)
from ace_plugins.errors import AdapterError, ConfigError

quick = settings(max_examples=12, deadline=None, derandomize=True)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


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


def test_a_constant_against_its_expectation() -> None:
    # f = c: |R c - c|^2 is 2|c|^2 (1 - cos) with cos uniform on [-1, 1], so E|R c - c| = 4|c|/3, and |c| is 2
    c = torch.tensor([0.0, 2.0, 0.0], dtype=torch.float64)
    error = measure(Function(lambda x: c.expand_as(x)), VECTORS, normal(4, 3), samples=1000)
    assert error.absolute == pytest.approx(8 / 3, rel=0.05)
    assert error.relative == pytest.approx(4 / 3, rel=0.05)


def test_translations_scale_with_scale() -> None:
    # f(x) = x declared as vectors ignores the translation t: the error is |t|, E|t| = 2 scale sqrt(2/pi)
    action = GroupAction(SE3, {"x": Positions()}, Vectors())
    one, ten = (measure(nn.Identity(), _named(action), normal(4, 3), samples=400, scale=s) for s in (1.0, 10.0))
    assert one.absolute == pytest.approx(2 * math.sqrt(2 / math.pi), rel=0.1)
    assert ten.absolute == pytest.approx(10 * one.absolute)
    assert measure(nn.Identity(), _named(action), normal(4, 3), scale=0.0).absolute < 1e-14


def _named(action: GroupAction) -> GroupAction:
    """For nn.Identity, whose parameter is called input."""
    return GroupAction(action.group, {"input": action.inputs["x"]}, action.outputs)


@pytest.mark.parametrize("shape", [(), (4,), (4, 1), (2, 2, 1)])
def test_rows_of_any_shape(shape: tuple[int, ...]) -> None:
    # the first coordinate, summed and spread over the shape, declared invariant: every row errs alike
    model = Function(lambda x: x[:, 0].sum().expand(shape))
    error = measure(model, GroupAction(SO3, {"x": Vectors()}, Invariant()), normal(5, 3), samples=3)
    reference = measure(
        Function(lambda x: x[:, 0].sum()),
        GroupAction(SO3, {"x": Vectors()}, Invariant()),
        normal(5, 3),
        samples=3,
    )
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


def test_the_same_seed_gives_the_same_error() -> None:
    model, x = Shifted(normal(3, seed=1)), normal(4, 3)
    assert measure(model, VECTORS, x, seed=4) == measure(model, VECTORS, x, seed=4)
    assert measure(model, VECTORS, x, seed=4) != measure(model, VECTORS, x, seed=5)


def test_the_error_as_a_dict() -> None:
    error = EquivarianceError(absolute=0.5, relative=0.25, samples=5, group="O3")
    assert json.loads(json.dumps(error.to_dict())) == {
        "absolute": 0.5,
        "relative": 0.25,
        "samples": 5,
        "group": "O3",
    }


# --- the call


def test_as_call() -> None:
    a, b = object(), object()
    assert as_call(Call((a,), {"b": b})) == ((a,), {"b": b})
    assert as_call((a, b)) == ((a, b), {})
    assert as_call({"a": a}) == ((), {"a": a})
    assert as_call([a]) == (([a],), {})
    assert as_call(a) == ((a,), {})
    assert as_call(Call(args=({"a": a},))) == (({"a": a},), {})
    with pytest.raises(AdapterError, match="expected names as keys, found 1"):
        as_call({1: a})


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


@pytest.mark.skipif(importlib.util.find_spec("torch_geometric") is None, reason="torch-geometric is not installed")
def test_a_graph_that_the_model_writes_into() -> None:
    from torch_geometric.data import Data

    class Greedy(nn.Module):
        def forward(self, graph: Any) -> Tensor:
            graph.pos -= graph.pos.mean(0)  # in place
            graph.x = graph.pos
            return graph.x  # type: ignore[no-any-return]

    graph = Data(pos=normal(5, 3))
    action = GroupAction(E3, {"graph.pos": Positions()}, Vectors())
    assert measure(Greedy(), action, graph).relative < 1e-13
    assert torch.equal(graph.pos, normal(5, 3))
    assert list(graph.keys()) == ["pos"]


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


def test_no_gradients_and_eval_mode_inside() -> None:
    inside = []

    class Spy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            inside.append((self.training, torch.is_grad_enabled()))
            return x

    measure(Spy(), VECTORS, normal(4, 3), samples=1)
    assert inside == [(False, False)] * 2


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


# --- refusals


@pytest.mark.parametrize("samples", [0, -1])
def test_at_least_one_sample(samples: int) -> None:
    with pytest.raises(ConfigError, match=f"samples: expected at least 1, found {samples}"):
        measure(Centred(), EQUIVARIANT, normal(4, 3), samples=samples)


def test_nothing_compared_is_not_a_pass() -> None:
    x = normal(4, 3)
    with pytest.raises(AdapterError, match="nothing to compare, found no tensor with an action"):
        measure(Function(lambda x: (x, None)), GroupAction(SO3, {}, [None, Vectors()]), x)
    with pytest.raises(AdapterError, match=r"nothing to compare, found {'output': \[0, 3\]}"):
        measure(Function(lambda x: x), VECTORS, x[:0])


def test_an_output_that_changes_shape() -> None:
    model = Function(lambda x: x[x[:, 0] > 0])
    with pytest.raises(AdapterError, match="outputs changed with the input's orientation"):
        measure(model, GroupAction(O3, {"x": Vectors()}, Vectors()), normal(5, 3), samples=20)


def test_an_input_the_model_does_not_have() -> None:
    with pytest.raises(AdapterError, match="unknown input of the forward 'x': expected one of pos"):
        measure(Centred(), VECTORS, normal(5, 3))


# --- the assertion


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_equivariant_models_pass(dtype: torch.dtype) -> None:
    x = normal(6, 3, dtype=dtype)
    assert assert_equivariant(Centred(), EQUIVARIANT, x) == measure(Centred(), EQUIVARIANT, x)
    assert_equivariant(Distances(), INVARIANT, x.float())


@pytest.mark.parametrize(("dtype", "fails", "passes"), [(torch.float32, 1e-2, 1e-4), (torch.float64, 1e-8, 1e-10)])
def test_the_tolerance_follows_the_dtype(dtype: torch.dtype, fails: float, passes: float) -> None:
    x = normal(6, 3, dtype=dtype)
    b = normal(3, seed=1, dtype=dtype)
    with pytest.raises(AssertionError):
        assert_equivariant(Shifted(fails * b), VECTORS, x)
    assert_equivariant(Shifted(passes * b), VECTORS, x)


def test_the_coarsest_dtype_sets_the_tolerance() -> None:
    class Narrow(nn.Module):
        """float64 in and out, float32 between."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            return (self.weight * x.float()).double()

    assert assert_equivariant(Narrow(), VECTORS, normal(6, 3)).relative > 1e-9


def test_the_message_names_what_was_found_and_allowed() -> None:
    x, model = normal(6, 3), Shifted(normal(3, seed=1))
    error = measure(model, VECTORS, x)
    expected = f"Shifted is not SO(3)-equivariant: relative error {error.relative:.3g}, allowed 1e-09 "
    with pytest.raises(AssertionError) as caught:
        assert_equivariant(model, VECTORS, x)
    assert str(caught.value).startswith(expected)
    assert_equivariant(model, VECTORS, x, tolerance=error.relative)
    with pytest.raises(AssertionError, match=r"allowed 0\.01"):
        assert_equivariant(model, VECTORS, x, tolerance=0.01)


def test_nan_is_not_equivariant() -> None:
    with pytest.raises(AssertionError, match="relative error nan"):
        assert_equivariant(Function(lambda x: x * math.nan), VECTORS, normal(4, 3), tolerance=1e9)


@pytest.mark.parametrize("tolerance", [-1.0, math.nan])
def test_an_impossible_tolerance_is_refused(tolerance: float) -> None:
    with pytest.raises(ConfigError, match="tolerance: expected a number >= 0"):
        assert_equivariant(Centred(), EQUIVARIANT, normal(4, 3), tolerance=tolerance)
