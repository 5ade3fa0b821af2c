"""Held-out judging: which sample gives a gradient to what, against models without it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from clouds import POINTS, Cloud, CloudAdapter
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from toy import ADAPTERS

from ace_plugins import attach
from ace_plugins.adapter import Graphs, Site, hookimpl, norm_linear
from ace_plugins.engine.holdout import BITS, FitLinear, draw, fit_rows, is_separable, scale, separate
from ace_plugins.errors import AceWarning
from ace_plugins.plugins.registry import registry


class WithLayerNorm(CloudAdapter):
    """Branches with parameters that the host cannot train by rows, so that it computes them twice."""

    @hookimpl
    def ace_branch(self, site: Any) -> nn.Module:
        width = site.width_out
        first = nn.Linear(site.width_in, width)
        return nn.Sequential(nn.Flatten(1), first, nn.LayerNorm(width), nn.Linear(width, width))


@pytest.fixture(autouse=True)
def _clouds() -> Iterator[None]:
    registry().add(CloudAdapter(), "cloud")
    registry().add(WithLayerNorm(), "layer_norm")
    yield
    registry().remove("cloud")
    registry().remove("layer_norm")


def pair(adapter: str, **more: Any) -> tuple[Cloud, Cloud]:
    """The same relaxed model twice, in double precision: with held-out judging and without."""
    made = []
    for holdout in (0.5, 0.0):
        torch.manual_seed(3)
        model = Cloud().double()
        attach(
            model, adapter=adapter, mode="resilient", holdout=holdout, gamma_init=0.7, trace=False, tell=False, **more
        )
        made.append(model)
    made[1].load_state_dict(made[0].state_dict())
    return made[0], made[1]


def energies(model: Cloud, x: Tensor) -> Tensor:
    return (model(x) - 1).square()


def forces(model: Cloud, x: Tensor) -> Tensor:
    """A loss of every sample that depends on derivatives of the model, as for models with forces."""
    x = x.clone().requires_grad_()
    (force,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return (force - 0.3).square().sum((1, 2))


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("losses", [energies, forces])
@pytest.mark.parametrize("adapter", ["cloud", "layer_norm"])
@pytest.mark.parametrize("spectral_norm", [False, True])
def test_judges_train_gamma_the_others_train_branches_and_all_train_upstream(
    losses: Any, adapter: str, spectral_norm: bool
) -> None:
    held, plain = pair(adapter, spectral_norm=spectral_norm)
    x = torch.randn(40, POINTS, 3, dtype=torch.float64)
    fits = draw([x], torch.arange(40)) >= 0.5 * 2**BITS
    assert 5 < int(fits.sum()) < 35
    losses(held, x).mean().backward()
    found = gradients(held)
    expected: dict[str, dict[str, Tensor]] = {}
    for part, chosen in (("fit", fits), ("judge", ~fits), ("all", torch.ones(40, dtype=torch.bool))):
        plain.zero_grad()
        (losses(plain, x)[chosen].sum() / 40).backward()
        expected[part] = gradients(plain)
    assert found.keys() == expected["all"].keys()
    for name, value in found.items():
        part = "judge" if name == "ace.gamma" else "fit" if name.startswith("ace.") else "all"
        torch.testing.assert_close(
            value, expected[part][name], rtol=1e-9, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_outputs_are_those_of_the_model_without_held_out_samples() -> None:
    held, plain = pair("cloud")
    x = torch.randn(9, POINTS, 3, dtype=torch.float64)
    assert torch.equal(held(x), plain(x))


def test_in_a_probe_judges_see_the_model_without_branches() -> None:
    held, _ = pair("cloud")
    x = torch.randn(30, POINTS, 3, dtype=torch.float64)
    held.ace.duals.evidence.probing.fill_(1.0)
    with_branches, without = held(x), None
    held.ace.gamma.data.zero_()
    without = held(x)
    held.ace.gamma.data.fill_(0.7)
    held.ace.duals.evidence.probing.zero_()
    usual = held(x)
    fits = draw([x], torch.arange(30)) >= 0.5 * 2**BITS
    assert torch.allclose(with_branches[~fits], without[~fits], atol=1e-14)
    assert torch.equal(with_branches[fits], usual[fits])
    assert not torch.allclose(with_branches[~fits], usual[~fits])


def test_only_rows_that_fit_train_a_batch_norm() -> None:
    branch = separate(norm_linear(Site("a", shape_in=(3,), shape_out=(2,)))).double()
    assert is_separable(branch)
    twin = copy.deepcopy(branch)
    x, weights = torch.randn(12, 3, dtype=torch.float64), torch.randn(12, 2, dtype=torch.float64)
    rows = torch.arange(12) % 3 > 0
    with fit_rows(rows):
        (branch(x) * weights).sum().backward()
    (twin(x) * weights * rows[:, None]).sum().backward()
    for one, two in zip(branch.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one.grad, two.grad)
    torch.testing.assert_close(branch[0].running_var, twin[0].running_var)


def test_separating_keeps_keys_and_parameters() -> None:
    branch = nn.Sequential(nn.Linear(3, 4), nn.GELU(), nn.Linear(4, 2))
    before = {name: id(p) for name, p in branch.named_parameters()}
    made = separate(branch)
    assert {name: id(p) for name, p in made.named_parameters()} == before
    assert isinstance(made[0], FitLinear)
    assert is_separable(made)
    assert not is_separable(separate(nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))))


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=12), st.randoms(use_true_random=False))
def test_a_sample_keeps_its_draw_in_any_order_and_company(sizes: list[int], random: Any) -> None:
    generator = torch.Generator().manual_seed(random.randrange(2**30))
    samples = [torch.randn(size, 3, generator=generator) for size in sizes]

    def drawn(order: list[int]) -> dict[int, int]:
        rows = torch.cat([samples[n] for n in order])
        numbers = torch.arange(len(order)).repeat_interleave(torch.tensor([len(samples[n]) for n in order]))
        return dict(zip(order, draw([rows], numbers).tolist(), strict=False))

    order = list(range(len(samples)))
    together = drawn(order)
    random.shuffle(order)
    assert drawn(order) == together
    assert all(drawn([n])[n] == together[n] for n in order)


def test_draws_are_uniform_and_depend_on_every_bit() -> None:
    x = torch.randn(20_000, 3)
    numbers = draw([x], torch.arange(len(x))).double() / 2**BITS
    counts = torch.histc(numbers, 20, 0, 1)
    assert float(((counts - 1000) ** 2 / 1000).sum()) < 45  # chi-squared with 19 degrees of freedom: p > 0.001
    nudged = torch.nextafter(x, torch.full_like(x, 9.0))
    assert float((draw([nudged], torch.arange(len(x))) != draw([x], torch.arange(len(x)))).float().mean()) > 0.999


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=8), st.integers(0, 2**30))
def test_edges_define_the_samples(sizes: list[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    edges, begin = [], 0
    for size in sizes:
        chain = torch.arange(begin, begin + size - 1)
        order = begin + torch.randperm(size, generator=generator)
        linked = torch.stack([order[:-1], order[1:]]) if size > 1 else torch.zeros(2, 0, dtype=torch.long)
        edges += [linked, torch.stack([chain, chain + 1])[:, :0]]
        begin += size
    index = torch.cat(edges, 1)
    graphs = Graphs("x", linked="edges", repeated=True)
    found = graphs.find_rows(("x", "edges"), (torch.zeros(begin, 3), index), {})
    expected = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    assert found is not None
    assert torch.equal(found.nodes, expected)
    repeated = found.find(3 * begin)
    assert repeated is not None
    assert torch.equal(repeated, expected.repeat(3))


def test_whole_batches_judge_if_samples_are_unknown_and_this_is_said_once(recwarn: pytest.WarningsRecorder) -> None:
    class NoAction(CloudAdapter):
        ace_group_action = None

    registry().add(NoAction(), "unknown")
    try:
        model = attach(Cloud(), adapter="unknown", mode="resilient", holdout=0.5, trace=False, tell=False)
    finally:
        registry().remove("unknown")
    optimizer = torch.optim.Adam(model.parameters())
    judged = trained = 0
    for _ in range(8):
        optimizer.zero_grad()
        model(torch.randn(6, POINTS, 3)).square().mean().backward()
        judges = bool(model.ace.gamma.grad.any())
        trains = any(bool(p.grad.any()) for p in model.ace.branches.parameters() if p.grad is not None)
        assert judges != trains
        judged, trained = judged + judges, trained + trains
        optimizer.step()
    assert judged >= 3
    assert trained >= 3
    said = [w for w in recwarn if issubclass(w.category, AceWarning) and "whole batches" in str(w.message)]
    assert len(said) == 1


@pytest.mark.parametrize("name", sorted(name for name in ADAPTERS if hasattr(ADAPTERS[name], "ace_example")))
def test_every_shape_of_site_can_be_judged(name: str) -> None:
    plugin = registry().adapter(name)
    example = plugin.call("ace_example", seed=0, model=None)
    settings = {"preset": "none", "loop": "paced", "mode": "auto"}
    model = attach(example.model, adapter=name, trace=False, tell=False, **settings)
    output = model(*example.args, **example.kwargs)
    tensors = output if isinstance(output, tuple) else (output,)
    sum(t.square().sum() for t in tensors if isinstance(t, Tensor)).backward()
    assert model.ace.gamma.grad is not None


@pytest.mark.parametrize("adapter", ["cloud", "layer_norm"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_models_in_half_precision_train_in_mode_auto(adapter: str, dtype: torch.dtype) -> None:
    model = attach(Cloud().to(dtype), adapter=adapter, mode="auto", loop="paced", trace=False, tell=False)
    seen = []
    model.layers[0].register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    loss = energies(model, torch.randn(8, POINTS, 3, dtype=dtype)).mean()
    loss.backward()
    assert seen == [dtype]
    assert model.ace.gamma.grad.isfinite().all()
    assert model.ace.gamma.grad.any()


def test_rows_that_judge_give_a_scale_no_second_derivative() -> None:
    x, weight = torch.randn(4, 3, requires_grad=True), torch.ones(3, requires_grad=True)
    with fit_rows(torch.tensor([[1.0], [1.0], [0.0], [0.0]])):
        y = scale(x, weight, torch.zeros(3))
    (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    for rows, trains in ((slope[:2], True), (slope[2:], False)):
        (found,) = torch.autograd.grad(rows.square().sum(), weight, retain_graph=True)
        assert bool(found.any()) is trains
