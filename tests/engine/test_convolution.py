"""The branch of a layer on images: what it computes, and that it is as bounded as it says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ace_plugins.adapter import Convolution
from ace_plugins.engine.spectral_norm import bound, find_unbounded

D = torch.float64
SHAPES = [
    pytest.param({"kernel": 1}, id="pixels"),
    pytest.param({"kernel": 3, "padding": 1}, id="same size"),
    pytest.param({"kernel": 5, "stride": 2, "padding": 2}, id="strided"),
    pytest.param({"kernel": 3, "stride": 2, "dilation": 2, "padding": 2}, id="dilated"),
    pytest.param({"kernel": 3, "padding": (1, 2), "circular": True}, id="circular"),
]


def made(**options: Any) -> Convolution:
    torch.manual_seed(0)
    return Convolution(2, 3, **options).double()


@pytest.mark.parametrize("options", SHAPES)
def test_it_is_torchs_convolution(options: dict[str, Any]) -> None:
    branch = made(**options)
    rest = {name: value for name, value in options.items() if name not in ("kernel", "circular")}
    mode = "circular" if options.get("circular") else "zeros"
    plain = nn.Conv2d(2, 3, options["kernel"], padding_mode=mode, **rest).double()
    with torch.no_grad():
        plain.weight.copy_(branch.weight.view_as(plain.weight))
        plain.bias.copy_(branch.bias)
    x = torch.randn(2, 2, 7, 9, dtype=D)
    torch.testing.assert_close(branch(x), plain(x))


@torch.no_grad()
def matrix_of(branch: nn.Module, side: int) -> Tensor:
    """The map of whole images, written out: a column for each pixel."""
    pixels = torch.eye(2 * side**2, dtype=D).view(-1, 2, side, side)
    return (branch(pixels) - branch(torch.zeros_like(pixels))).flatten(1).T


@pytest.mark.parametrize("options", SHAPES)
def test_bounded_it_stretches_no_image(options: dict[str, Any]) -> None:
    plain = made(**options)
    with torch.no_grad():
        plain.weight.mul_(10)
    assert float(torch.linalg.matrix_norm(matrix_of(plain, 8), 2)) > 2
    branch = bound(plain)
    assert find_unbounded(branch) == []
    assert 0.1 < float(torch.linalg.matrix_norm(matrix_of(branch, 8), 2)) <= 1 + 1e-9


def test_the_bound_is_reached() -> None:
    """By a kernel that is one number everywhere, on an image that is one number everywhere."""
    plain = Convolution(1, 1, 3, padding=1, circular=True).double()
    with torch.no_grad():
        plain.weight.fill_(1.0)
        plain.bias.zero_()
    x = torch.ones(1, 1, 6, 6, dtype=D)
    assert float(bound(plain)(x).detach().norm() / x.norm()) == pytest.approx(1.0)
