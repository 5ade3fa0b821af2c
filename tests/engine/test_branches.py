"""The parts branches are made of."""

from __future__ import annotations

import torch
from torch import nn
from toy import Layered

from ace_plugins import attach
from ace_plugins.adapter import Site
from ace_plugins.engine.branches import Norm, linear, mlp, norm_linear


def test_norm_is_batch_norm_over_the_last_dimension() -> None:
    torch.manual_seed(0)
    ours, theirs = Norm(4), nn.BatchNorm1d(4)
    for _ in range(3):
        x = torch.randn(5, 4, 4)
        assert torch.allclose(ours(x), theirs(x.reshape(-1, 4)).reshape(x.shape), atol=1e-6)
    assert torch.allclose(ours.running_var, theirs.running_var)
    assert torch.allclose(ours.eval()(x), theirs.eval()(x.reshape(-1, 4)).reshape(x.shape), atol=1e-6)
    assert set(ours.state_dict()) == set(theirs.state_dict()) - {"num_batches_tracked"}
    ours.load_state_dict(theirs.state_dict())


def test_norm_with_statistics_that_are_made_anew() -> None:
    """As torch.optim.swa_utils.update_bn does."""
    norm = Norm(3)
    loader = [torch.randn(8, 3) + 5 for _ in range(4)]
    torch.optim.swa_utils.update_bn(loader, norm)
    expected = torch.stack([x.mean(0) for x in loader]).mean(0)
    assert torch.allclose(norm.running_mean, expected, atol=1e-5)


def test_norm_has_what_lightnings_weight_averaging_reads() -> None:
    """It resets the statistics of every batch normalisation and lets them be averages, without a method to ask."""
    norm = Norm(3)
    norm(torch.randn(8, 3))
    norm.running_mean, norm.running_var = torch.zeros_like(norm.running_mean), torch.ones_like(norm.running_var)
    norm.momentum = None
    norm.num_batches_tracked *= 0
    loader = [torch.randn(8, 3) + 5 for _ in range(4)]
    for x in loader:
        norm(x)
    assert torch.allclose(norm.running_mean, torch.stack([x.mean(0) for x in loader]).mean(0), atol=1e-5)


def test_conversion_to_sync_batchnorm_leaves_the_norms_of_branches_alone() -> None:
    """``convert_sync_batchnorm``, as Lightning's ``sync_batchnorm=True`` calls it."""
    attached = attach(Layered())  # an attached model keeps the conversion patched
    model = nn.ModuleDict({"ours": nn.Sequential(Norm(4), nn.Linear(4, 4)), "theirs": nn.BatchNorm1d(4)})
    ours = model["ours"][0]  # type: ignore[index]
    converted = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    assert converted["ours"][0] is ours
    assert type(converted["theirs"]) is nn.SyncBatchNorm
    assert hasattr(attached, "ace")


def test_a_single_row_has_no_spread() -> None:
    norm = Norm(3)
    assert torch.isfinite(norm(torch.ones(1, 3))).all()
    assert norm.running_mean.tolist() == [0, 0, 0]


def test_widths_and_shapes() -> None:
    site = Site("a", "a", (3, 4), (3, 5))
    for make in (linear, mlp, norm_linear):
        assert make(site)(torch.randn(7, 2, 3, 4)).shape == (7, 2, 3, 5)
