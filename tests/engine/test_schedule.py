"""gamma by schedule, and the two penalties on branches, against e3nn's generators and a formula written out."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from e3nn import o3
from e3nn.o3._wigner import so3_generators
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from toy import Layered, TwoOutputs, VectorMaps

from ace_plugins import attach, status
from ace_plugins.adapter import ConfigError, Convolution, Irreps, Site, Vectors
from ace_plugins.engine.scheduled import WEIGHT, PenalisedLinear, gamma_at, relax
from ace_plugins.report.verdicts import judge

BY_SCHEDULE: dict[str, Any] = {"mode": "scheduled", "trace": False, "frames": "off"}


def trained(model: Any, x: Tensor, steps: int) -> list[list[float]]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    gammas = []
    for _ in range(steps):
        optimizer.zero_grad()
        (model(x) - 1).square().mean().backward()
        optimizer.step()
        gammas.append(model.ace.gamma.tolist())
    return gammas


@given(st.integers(2, 10_000), st.floats(0, 1))
def test_up_to_1_at_half_of_the_run_and_down_to_0_at_its_end(length: int, share: float) -> None:
    step = round(share * length)
    assert gamma_at(step, length) == pytest.approx(1 - abs(2 * step / length - 1))
    assert gamma_at(length + step, length) == 0


def test_a_run_follows_the_schedule_and_ends_as_upstream() -> None:
    torch.manual_seed(0)
    model = attach(VectorMaps(), **BY_SCHEDULE, budget=8)
    assert model.ace.gamma.tolist() == [0, 0]
    gammas = trained(model, torch.randn(5, 3, 4), 10)
    assert [gamma for gamma, _ in gammas] == [0.25, 0.5, 0.75, 1.0, 0.75, 0.5, 0.25, 0, 0, 0]
    assert all(one == two for one, two in gammas)
    assert status(model).landed
    assert len(model.ace.freed) == len(list(model.ace.parameters())), "landing frees, here too"


def test_eval_is_f_eq() -> None:
    torch.manual_seed(0)
    plain = VectorMaps()
    model = attach(copy.deepcopy(plain), **BY_SCHEDULE, budget=8)
    with torch.no_grad():
        model.ace.gamma.fill_(1.0)
        for parameter in model.ace.branches.parameters():
            parameter.fill_(1.0)
    x = torch.randn(5, 3, 4)
    assert torch.equal(model.eval()(x), plain(x))
    assert not torch.allclose(model.train()(x), plain(x))


def test_where_a_site_reads_features_its_branch_is_a_small_linear_map() -> None:
    torch.manual_seed(0)
    made = attach(VectorMaps(), **BY_SCHEDULE).ace.branches["map_to_feat"]
    assert isinstance(made, PenalisedLinear)
    assert made.bias is None
    assert 0 < made.weight.std() < 2e-4
    chain = attach(TwoOutputs(), **BY_SCHEDULE).ace.branches["layers_1_h"]
    assert not isinstance(chain, PenalisedLinear), "a chain of maps that begin at nothing would stay nothing"
    kernel = Convolution(2, 3, 3)
    assert relax(Site("s", shape_in=(2,), shape_out=(3,), axis=1), kernel) is kernel, "a convolution reads patches"


IN, OUT = "3x0e+2x1o+1x2e", "2x0e+1x1o+1x1e+1x2o"


def generators(irreps: str) -> list[Tensor]:
    """Of rotations about three axes, [d, d] each, as e3nn has them."""
    each = [so3_generators(irrep.l).double() for count, irrep in o3.Irreps(irreps) for _ in range(count)]
    return [torch.block_diag(*(of_one[axis] for of_one in each)) for axis in range(3)]


def test_the_penalties_are_the_formula_with_e3nns_generators() -> None:
    torch.manual_seed(0)
    site = Site("s", "s", (o3.Irreps(IN).dim,), (o3.Irreps(OUT).dim,), acts=(Irreps(IN), Irreps(OUT)))
    made = PenalisedLinear(site).double()
    x = torch.randn(4, 7, site.width_in, dtype=torch.float64)
    made(x)
    found = made.penalty()
    w, rows = made.weight, x.reshape(-1, site.width_in)
    total = sum(
        ((w @ a @ row - b @ w @ row) ** 2).sum()
        for a, b in zip(generators(IN), generators(OUT), strict=True)
        for row in rows
    )
    expected = WEIGHT * (torch.as_tensor(total).sqrt() + (rows @ w.T).square().sum().sqrt())
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)
    for one, two in zip(torch.autograd.grad(found, w), torch.autograd.grad(expected, w), strict=True):
        assert torch.allclose(one, two, rtol=1e-5, atol=1e-9)
    assert made.read is None, "once for what was read"


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 1000))
def test_an_equivariant_map_is_penalised_for_its_size_alone(seed: int) -> None:
    torch.manual_seed(seed)
    site = Site("s", "s", (3, 4), (3, 5), acts=(Vectors(axis=-2), Vectors(axis=-2)))
    made, mix = PenalisedLinear(site).double(), torch.randn(5, 4, dtype=torch.float64)
    with torch.no_grad():
        made.weight.copy_(torch.kron(torch.eye(3, dtype=torch.float64), mix))
    x = torch.randn(6, 3, 4, dtype=torch.float64)
    made(x)
    size = float((x @ mix.T).norm())
    assert made.penalty().item() == pytest.approx(WEIGHT * size, rel=1e-6)


def test_penalties_join_the_gradients_of_the_script() -> None:
    """One step of SGD moves a branch by the loss's gradient and the penalties', and by nothing else."""
    torch.manual_seed(0)
    model = attach(VectorMaps().double(), **BY_SCHEDULE, budget=10)
    with torch.no_grad():
        model.ace.gamma.fill_(0.5)
    x = torch.randn(5, 3, 4, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(x).square().sum().backward()
    branch = model.ace.branches["map_to_feat"]
    before, gradient = branch.weight.detach().clone(), branch.weight.grad.clone()
    twin = PenalisedLinear(model.ace.sites[0]).double()
    twin.load_state_dict(branch.state_dict())
    twin(x)
    (own,) = torch.autograd.grad(twin.penalty(), twin.weight)
    optimizer.step()
    assert own.abs().max() > 1e-4
    assert torch.allclose(branch.weight, before - 0.1 * (gradient + own), rtol=1e-12, atol=1e-15)


def test_settings_of_the_dual_loop_are_refused() -> None:
    with pytest.raises(ConfigError, match="dual_lr .*paper's loop.*'scheduled'"):
        attach(Layered(), mode="scheduled", dual_lr=0.1)


def test_a_schedule_ignores_the_data_and_reports_when_it_was_cut() -> None:
    config = attach(Layered(), **BY_SCHEDULE).ace.config
    found = judge(config, ["a"], {"step": 60, "gamma": [0.6], "lambda": [0.0], "u": [0.0], "expected": 200})
    assert [site.verdict for site in found.sites] == ["moving"]
    assert "60 of 200 expected steps" in found.advice
    assert "budget = 60" in found.advice
