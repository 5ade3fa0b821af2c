"""Chains of BatchNorm and Linear worked out on the map instead of the rows: against torch on the rows."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from toy import ADAPTERS, Layered

from ace_plugins import Stem, attach, hookimpl
from ace_plugins.engine.affine import Affine, Read, affine, takes_affine
from ace_plugins.engine.branches import Norm
from ace_plugins.plugins.registry import registry


def chain(k: int, d: int, links: int, *, bias: bool = True, norm: type[nn.Module] = Norm) -> nn.Module:
    layers: list[nn.Module] = [nn.Linear(k, d, bias=bias)]
    for _ in range(links):
        layers += [norm(d), nn.Linear(d, d, bias=bias)]
    return nn.Sequential(*layers).double()


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 30), st.integers(1, 4), st.integers(5, 8), st.integers(0, 4), st.booleans(), st.booleans())
def test_it_is_what_torch_computes(n: int, k: int, d: int, links: int, bias: bool, training: bool) -> None:
    torch.manual_seed(n)
    ours = chain(k, d, links, bias=bias)
    theirs = copy.deepcopy(ours)
    rows, gamma, other = torch.randn(n, k).double() * 3 + 5, torch.tensor(0.7).double(), torch.randn(n, d).double()
    leaves = [t.requires_grad_() for t in (rows.clone(), gamma.clone(), other.clone())]
    twins = [t.detach().clone().requires_grad_() for t in leaves]
    for _ in range(2):  # the second time with running statistics that have moved
        for module in (ours, theirs):
            module.train()(rows)
    ours.train(training)
    theirs.train(training)
    start = affine(leaves[0], d)
    assert isinstance(start, Affine)
    value = ours(start)
    assert isinstance(value, Affine)
    one = value.added_to(leaves[2], leaves[1])
    two = twins[2] + twins[1] * theirs(twins[0])
    assert torch.allclose(one, two, atol=1e-8)
    assert torch.allclose(value.tensor(), theirs.eval()(rows) if not training else value.tensor(), atol=1e-8)
    weights = torch.randn_like(one)
    (one * weights).sum().backward()
    (two * weights).sum().backward()
    for a, b in zip([*leaves, *ours.parameters()], [*twins, *theirs.parameters()], strict=True):
        assert torch.allclose(a.grad, b.grad, atol=1e-7), (a.grad, b.grad)
    for name, buffer in ours.state_dict().items():
        assert torch.allclose(buffer, theirs.state_dict()[name], atol=1e-8), name


def test_torchs_own_batch_norm_takes_it_too() -> None:
    torch.manual_seed(0)
    ours = chain(2, 4, 2, norm=nn.BatchNorm1d)
    theirs, rows = copy.deepcopy(ours), torch.randn(9, 2).double()
    assert torch.allclose(ours(affine(rows, 4)).tensor(), theirs(rows), atol=1e-10)
    assert torch.allclose(ours[1].running_var, theirs[1].running_var)


def test_second_derivatives() -> None:
    """Forces are gradients, and training on them differentiates once more."""
    torch.manual_seed(0)
    module = chain(3, 5, 2)
    rows = torch.randn(6, 3).double().requires_grad_()

    def forces(value: Tensor) -> Tensor:
        (force,) = torch.autograd.grad(value.square().sum(), rows, create_graph=True)
        (second,) = torch.autograd.grad(force.square().sum(), module[0].weight)
        return second

    assert torch.allclose(forces(module(affine(rows, 5)).tensor()), forces(module(rows)), atol=1e-6)


def test_anything_else_makes_rows() -> None:
    rows = torch.randn(4, 2)
    value = nn.Linear(2, 3)(affine(rows, 3))
    assert isinstance(value, Affine)
    assert value.shape == (4, 3)
    made = value.tensor()
    assert torch.equal(nn.functional.silu(value), nn.functional.silu(made))
    assert torch.equal(torch.cat([made, made]), torch.cat([value.tensor(), made]))
    assert torch.equal(torch.nn.functional.linear(rows, torch.ones(1, 2)), rows.sum(1, keepdim=True))
    assert torch.equal(value.reshape(2, 6), made.reshape(2, 6))
    assert torch.equal(torch.add(made, value), made + made)
    assert torch.equal(nn.functional.batch_norm(Affine(Read(rows)), None, None, training=True).isfinite(), rows == rows)
    assert torch.equal(Affine(Read(rows)).tensor(), rows)
    assert torch.equal(Affine(Read(rows)).added_to(rows, torch.tensor(2.0)), 3 * rows)
    single = nn.Linear(2, 3)(affine(rows[:1], 3))
    assert torch.isfinite(Norm(3)(single)).all(), "one row has no spread"


@pytest.mark.parametrize(
    "read", [torch.randn(4, 3), torch.randn(4, 2, 2), torch.randn(4, 2).bfloat16(), torch.ones(4, 2, dtype=torch.long)]
)
def test_where_it_does_not_pay_nothing_happens(read: Tensor) -> None:
    assert affine(read, 3) is read


class Own(nn.Module):
    """Somebody's branch, which does what one does with tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 8)

    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(x, Tensor)
        return self.linear(x[:, [2, 1, 0]] * 2 - x)


def test_only_modules_that_are_known_get_one() -> None:
    assert takes_affine(nn.Sequential(nn.Linear(2, 3), Norm(3)))
    assert not takes_affine(nn.Sequential(Own(), nn.Linear(8, 8)))

    class Adapter(ADAPTERS["layered"]):  # type: ignore[name-defined,misc]
        @hookimpl
        def ace_branch(self, site: Any) -> nn.Module | None:
            return Own() if isinstance(site, Stem) else None

    registry().remove("layered")
    registry().add(Adapter(), "layered")
    model = attach(Layered(), "layered")
    model(torch.randn(5, 3)).sum().backward()
    assert model.ace.branch("stem").linear.weight.grad is not None


def test_autocast_sees_rows() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert isinstance(affine(torch.randn(4, 2), 3), Tensor)
