"""The neighbour search, compared with brute force."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ace_schnet.neighbours import RadiusGraph, radius_graph
from ace_schnet.neighbours import search as neighbours

CUTOFFS = (0.1, 1.0, 1.1, 3.7)
DTYPES = (np.float64, np.float32)


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Use one thread: with thousands of tiny kernels a second one only waits on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def brute_force(
    pos: np.ndarray, cutoff: float, batch: np.ndarray, most: int | None = None, loop: bool = False
) -> np.ndarray:
    """Test every pair in turn, in the order of the search."""
    edges = []
    for target in range(len(pos)):
        with np.errstate(over="ignore"):
            squared = ((pos[target] - pos) ** 2).sum(-1)
        near = (squared <= cutoff**2) & (batch == batch[target])
        near[target] = loop
        sources = sorted(np.flatnonzero(near).tolist(), key=lambda source: (squared[source], source))
        edges += [(source, target) for source in sorted(sources[:most])]
    return np.array(edges, dtype=np.int64).reshape(-1, 2).T


def by_path(path: str, *args: Any, **kwargs: Any) -> Tensor:
    """Call radius_graph on one of its two code paths."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(neighbours, "DENSE_TOTAL", 1 << 40 if path == "dense" else 0)
        patch.setattr(neighbours, "DENSE_PER_ATOM", 0)
        patch.delattr(neighbours, "_cells" if path == "dense" else "_dense")
        return radius_graph(*args, **kwargs)


def check(pos: np.ndarray, cutoff: float, batch: np.ndarray | None = None, **kwargs: Any) -> Tensor:
    """Assert that both code paths and the default equal brute force."""
    graphs = np.zeros(len(pos), dtype=np.int64) if batch is None else batch
    expected = brute_force(pos, cutoff, graphs, kwargs.get("max_num_neighbors"), kwargs.get("loop", False))
    args = (torch.from_numpy(pos), cutoff, None if batch is None else torch.from_numpy(batch))
    found = radius_graph(*args, **kwargs)
    assert found.dtype == torch.long
    np.testing.assert_array_equal(found.numpy(), expected)
    if len(pos):
        for path in ("dense", "cells"):
            np.testing.assert_array_equal(by_path(path, *args, **kwargs).numpy(), expected, err_msg=path)
    return found


@st.composite
def clouds(draw: st.DrawFn) -> tuple[np.ndarray, float, np.ndarray]:
    """Draw atoms spread out, in clusters, on a lattice, far away or coincident, in mixed graphs."""
    cutoff = draw(st.sampled_from(CUTOFFS))
    dtype = draw(st.sampled_from(DTYPES))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    parts = []
    for kind in draw(st.lists(st.sampled_from(("box", "cluster", "lattice", "far", "same")), max_size=4)):
        size = draw(st.integers(1, 25))
        if kind == "box":
            part = rng.uniform(-4, 4, (size, 3)) * cutoff
        elif kind == "cluster":
            part = rng.normal(size=3) * 3 * cutoff + rng.normal(size=(size, 3)) * cutoff * 0.3
        elif kind == "lattice":  # neighbours exactly at the cutoff, give or take the rounding of the dtype
            part = rng.integers(-3, 4, (size, 3)) * draw(st.sampled_from((1.0, 0.5))) * cutoff
        elif kind == "far":
            origin = rng.choice([-1, 1], 3) * 10.0 ** rng.uniform(0, 12, 3)
            part = origin + rng.uniform(-1, 1, (size, 3)) * cutoff
        else:
            part = np.repeat(rng.normal(size=(1, 3)), size, axis=0)
        parts.append(part)
    pos = np.concatenate([*parts, np.empty((0, 3))]).astype(dtype)
    batch = rng.integers(0, draw(st.integers(1, 4)), len(pos))
    return pos, cutoff, np.sort(batch) if draw(st.booleans()) else batch


@given(clouds(), st.sampled_from((None, 1, 3, 12)), st.booleans())
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@example((np.array([[0.0, 0, 0], [-0.0, -0.0, 0]]), 1.0, np.array([0, 0])), None, False)
@example((np.array([[0.0, 0, 0], [1e308, -1e308, 0]]), 1e-3, np.array([0, 0])), None, False)
@example((np.zeros((0, 3)), 1.0, np.zeros(0, dtype=np.int64)), 3, True)
@example((np.zeros((1, 3)), 1.0, np.array([7])), None, True)
def test_equals_brute_force(cloud: tuple[np.ndarray, float, np.ndarray], most: int | None, loop: bool) -> None:
    pos, cutoff, batch = cloud
    check(pos, cutoff, batch, max_num_neighbors=most, loop=loop)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cutoff", CUTOFFS)
@pytest.mark.parametrize("shift", [0.0, -7.0, 1e3, 1e7, 3e15, -1e16, 1e30])
def test_lattice_at_the_cutoff(dtype: type, cutoff: float, shift: float) -> None:
    steps = np.arange(5)
    lattice = np.stack(np.meshgrid(steps, steps, steps[:3], indexing="ij"), -1).reshape(-1, 3)
    edges = check((lattice * cutoff + shift).astype(dtype), cutoff)
    if dtype is np.float64 and cutoff == 1.0 and abs(shift) < 1e15:
        # Nothing is rounded: the neighbours are the nearest ones, at exactly the cutoff.
        assert edges.shape[1] == 2 * (4 * 5 * 3 + 5 * 4 * 3 + 5 * 5 * 2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_either_side_of_the_cutoff(dtype: type) -> None:
    """Pairs within an ulp of the cutoff are found across the borders of cells."""
    rng = np.random.default_rng(0)
    for cutoff in CUTOFFS:
        start = rng.uniform(-20, 20, (150, 3)) * cutoff
        axis = rng.normal(size=(150, 3))
        axis[:75] = np.eye(3)[rng.integers(0, 3, 75)] * rng.choice([-1, 1], (75, 1))
        axis *= cutoff / np.linalg.norm(axis, axis=1, keepdims=True)
        start, end = start.astype(dtype), (start + axis).astype(dtype)
        end[::2] = np.nextafter(end[::2], start[::2])
        check(np.concatenate([start, end]), cutoff)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_pairs_that_rounding_lets_in(dtype: type, sign: int, axis: int) -> None:
    """Pairs slightly beyond the cutoff, which rounding puts inside, are found across the border of a cell."""
    pos = np.zeros((2, 3), dtype=dtype)
    pos[:, axis] = sign, -1e-20 * sign
    assert check(pos, 1.0).shape == (2, 2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("path", ["dense", "cells"])
def test_half(dtype: torch.dtype, path: str) -> None:
    pos = (torch.randn(300, 3, generator=torch.Generator().manual_seed(0)) * 4).to(dtype)
    expected = ((pos[:, None] - pos[None]) ** 2).sum(-1) <= 2.5**2
    edges = by_path(path, pos, 2.5, loop=True)
    assert torch.equal(edges.flip(0).t(), expected.nonzero())
    assert RadiusGraph(2.5)(pos)[1].dtype == dtype


@pytest.mark.parametrize("path", ["dense", "cells"])
def test_symmetric_sorted_and_unique(path: str) -> None:
    rng = torch.Generator().manual_seed(1)
    pos, batch = torch.rand(500, 3, generator=rng) * 6, torch.randint(0, 5, (500,), generator=rng)
    source, target = by_path(path, pos, 1.5, batch)
    key = target * 500 + source
    assert torch.equal(key, key.unique())
    assert torch.equal(key, (source * 500 + target).sort().values)
    assert torch.equal(batch[source], batch[target])


def test_convention_is_source_to_target() -> None:
    """With one neighbour per atom, the edges are not symmetric."""
    pos = torch.tensor([[0.0, 0, 0], [1.0, 0, 0], [1.5, 0, 0]])
    assert radius_graph(pos, 1.2, max_num_neighbors=1).tolist() == [[1, 2, 1], [0, 1, 2]]


@pytest.mark.parametrize("path", ["dense", "cells"])
def test_max_num_neighbors_breaks_ties_by_index(path: str) -> None:
    pos = torch.tensor([[1.0, 0, 0], [0, 1, 0], [0, 0, 0], [0, 0, -1], [0, 0.5, 0]])
    source, target = by_path(path, pos, 1.0, max_num_neighbors=2)
    assert source[target == 2].tolist() == [0, 4]


@pytest.mark.parametrize("path", ["dense", "cells"])
def test_batch_ids_may_be_large_narrow_and_unsorted(path: str) -> None:
    pos = torch.zeros(4, 3)
    for ids in (torch.tensor([2**62, 0, 2**62, 0]), torch.tensor([9, 1, 9, 1], dtype=torch.uint8)):
        assert by_path(path, pos, 1.0, ids).tolist() == [[2, 3, 0, 1], [0, 1, 2, 3]]


def test_graphs_far_apart_are_searched_as_near() -> None:
    rng = np.random.default_rng(2)
    pos = np.concatenate([rng.uniform(0, 6, (200, 3)) + 1e6 * k for k in range(3)])
    check(pos, 1.0, np.repeat([2, 0, 1], 200))
    check(pos, 1.0)


def test_strided_positions() -> None:
    pos = torch.rand(3, 400, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).t() * 5
    expected = by_path("dense", pos.contiguous(), 1.0)
    assert torch.equal(by_path("cells", pos, 1.0), expected)
    assert torch.equal(by_path("dense", pos, 1.0), expected)


def lengths(pos: Tensor) -> Tensor:
    weight: Tensor = RadiusGraph(2.0)(pos, torch.tensor([0, 1] * 4))[1]
    return weight


def test_gradients() -> None:
    pos = torch.rand(8, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(4)).requires_grad_()
    assert lengths(pos).shape == (24,)
    assert torch.autograd.gradcheck(lengths, (pos,))
    assert torch.autograd.gradgradcheck(lengths, (pos,))
    assert not radius_graph(pos, 2.0).requires_grad


def test_gradients_of_coincident_atoms_are_zero() -> None:
    pos = torch.zeros(8, 3, dtype=torch.float64, requires_grad=True)
    weight = lengths(pos)
    assert weight.shape == (24,)
    assert torch.equal(weight, torch.zeros_like(weight))
    (gradient,) = torch.autograd.grad(weight.sum(), pos, create_graph=True)
    assert torch.equal(gradient, torch.zeros_like(pos))
    (second,) = torch.autograd.grad(gradient.sum(), pos)
    assert torch.equal(second, torch.zeros_like(pos))


def test_module() -> None:
    pos, batch = torch.rand(40, 3, generator=torch.Generator().manual_seed(5)) * 4, torch.arange(40) % 3
    module = RadiusGraph(1.5, max_num_neighbors=4)
    assert not module.state_dict()
    assert repr(module) == "RadiusGraph(cutoff=1.5, max_num_neighbors=4)"
    edges, weight = pickle.loads(pickle.dumps(module))(pos, batch)
    assert torch.equal(edges, radius_graph(pos, 1.5, batch, max_num_neighbors=4))
    torch.testing.assert_close(weight, (pos[edges[0]] - pos[edges[1]]).norm(dim=-1))
    assert (RadiusGraph().cutoff, RadiusGraph().max_num_neighbors) == (10.0, None)
    edges, weight = module(pos[:1], batch[:1])
    assert (edges.shape, weight.shape) == ((2, 0), (0,))


class Largest(TorchDispatchMode):
    """Records the size of the largest tensor."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, (tuple, list)) else (made,):
            if isinstance(tensor, Tensor):
                self.numel = max(self.numel, tensor.numel())
        return made


def _box(n: int, rng: torch.Generator) -> Tensor:
    return torch.rand(n, 3, generator=rng) * 100


def _sparse(n: int, rng: torch.Generator) -> Tensor:
    return torch.rand(n, 3, generator=rng) * 1e9


def _clusters(n: int, rng: torch.Generator) -> Tensor:
    return torch.randint(0, 40, (n, 3), generator=rng) * 1e4 + torch.randn(n, 3, generator=rng)


def _needle(n: int, rng: torch.Generator) -> Tensor:
    return torch.rand(n, 3, generator=rng) * torch.tensor([1e-3, 1e-3, 1e4])


def _two_corners(n: int, rng: torch.Generator) -> Tensor:
    return torch.where(torch.arange(n)[:, None] < 400, 0.0, 1e5) + torch.rand(n, 3, generator=rng) * 100


@pytest.mark.parametrize("cloud", [_box, _sparse, _clusters, _needle, _two_corners])
def test_memory_is_linear(cloud: Callable[[int, torch.Generator], Tensor]) -> None:
    n, largest = 20_000, Largest()
    pos = cloud(n, torch.Generator().manual_seed(6))
    with largest:
        edges = radius_graph(pos, 3.0)
    # The proven bound is 3 elements for each of 24 candidates; these clouds need no more than pos does.
    assert largest.numel <= 4 * (edges.shape[1] + n)


def test_memory_of_small_graphs_is_linear() -> None:
    n, largest = 18_000, Largest()
    pos = torch.rand(n, 3, generator=torch.Generator().manual_seed(7)) * 1e3
    with largest:
        radius_graph(pos, 10.0, torch.arange(n) // 18)
    assert largest.numel <= 3 * 18 * n


POS = torch.rand(4, 3, generator=torch.Generator().manual_seed(8))


@pytest.mark.parametrize(
    ("name", "found", "pos", "cutoff", "batch", "most"),
    [
        ("cutoff", "0.0", POS, 0.0, None, None),
        ("cutoff", "-1", POS, -1, None, None),
        ("cutoff", "nan", POS, float("nan"), None, None),
        ("cutoff", "inf", POS, float("inf"), None, None),
        ("cutoff", "cutoff 300.0", POS.half(), 300.0, None, None),
        ("cutoff", "cutoff 1e-30", POS, 1e-30, None, None),
        ("max_num_neighbors", "0", POS, 1.0, None, 0),
        ("pos", "[4, 2]", POS[:, :2], 1.0, None, None),
        ("pos", "[3]", POS[0], 1.0, None, None),
        ("pos", "torch.int64", POS.long(), 1.0, None, None),
        ("pos", "[0.0, nan, 0.0] at atom 1", torch.tensor([[0, 0, 0], [0, float("nan"), 0]]), 1.0, None, None),
        ("pos", "[-inf, 0.0, 0.0] at atom 0", torch.tensor([[-float("inf"), 0, 0]]), 1.0, None, None),
        ("batch", "torch.float32", POS, 1.0, torch.zeros(4), None),
        ("batch", "torch.bool", POS, 1.0, torch.zeros(4).bool(), None),
        ("batch", "[3]", POS, 1.0, torch.zeros(3).long(), None),
        ("batch", "[4, 1]", POS, 1.0, torch.zeros(4, 1).long(), None),
        ("batch", "meta", POS, 1.0, torch.zeros(4, dtype=torch.long, device="meta"), None),
        ("batch", "-2", POS, 1.0, torch.tensor([0, -2, 1, -1]), None),
    ],
)
def test_errors(name: str, found: str, pos: Tensor, cutoff: float, batch: Tensor | None, most: int | None) -> None:
    with pytest.raises(ValueError, match=rf"^{name}: expected .*found .*{re.escape(found)}$"):
        radius_graph(pos, cutoff, batch, max_num_neighbors=most)


def test_the_module_checks_its_limits_when_made() -> None:
    with pytest.raises(ValueError, match=r"^cutoff: .*found 0$"):
        RadiusGraph(0)
    with pytest.raises(ValueError, match=r"^max_num_neighbors: .*found -3$"):
        RadiusGraph(1.0, max_num_neighbors=-3)
