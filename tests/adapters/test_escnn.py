"""The adapter for escnn on the real escnn."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # that py3nj is missing, which the groups of the plane do not need
    pytest.importorskip("escnn", reason="needs escnn: see adapters/escnn/README.md")

from escnn import gspaces
from escnn import nn as enn

import ace_plugins
from ace_escnn import fields
from ace_escnn.example import Network
from ace_plugins import adapter as ace
from ace_plugins.plugins.registry import registry
from ace_plugins.testing import parametrize_with_checks

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:escnn.*", "ignore::DeprecationWarning:escnn.*")


@parametrize_with_checks("escnn")
def test_contract(check: Any) -> None:
    check()


SPACES = [
    pytest.param(lambda: gspaces.rot2dOnR2(4), "C_4", id="C4"),
    pytest.param(lambda: gspaces.rot2dOnR2(8), "C_4", id="C8"),
    pytest.param(lambda: gspaces.rot2dOnR2(6), "C_2", id="C6"),
    pytest.param(lambda: gspaces.rot2dOnR2(-1, 2), "C_4", id="SO2"),
    pytest.param(lambda: gspaces.flipRot2dOnR2(4), "D_4", id="D4"),
    pytest.param(lambda: gspaces.flipRot2dOnR2(8), "D_4", id="D8"),
    pytest.param(lambda: gspaces.flipRot2dOnR2(-1, 2), "D_4", id="O2"),
    pytest.param(lambda: gspaces.flip2dOnR2(), "D_1", id="flip"),
    pytest.param(lambda: gspaces.flip2dOnR2(axis=math.pi / 4), "D_1", id="flip diagonally"),
    pytest.param(lambda: gspaces.trivialOnR2(), "C_1", id="trivial"),
]


@pytest.mark.parametrize(("make", "name"), SPACES)
def test_the_hosts_action_is_escnns_own(make: Any, name: str) -> None:
    """Test every element that maps pixels to pixels, on all kinds of channels."""
    space = make()
    group, elements = fields.grid_group(space)
    assert group.name == name
    kinds = [space.trivial_repr, *space.fibergroup.irreps()[:3]]
    if space.fibergroup.order() > 0:
        kinds.append(space.regular_repr)
    kind = enn.FieldType(space, kinds)
    action = ace.Grid(of=fields.field_action(kind, elements))
    x = torch.randn(2, kind.size, 5, 5)
    generator = torch.Generator().manual_seed(0)
    sampled = [group.sample(generator).matrix for _ in range(40)]
    for element in elements:
        matrix = torch.as_tensor(space.basespace_action(element), dtype=torch.float64)
        found = action(ace.Rigid(matrix, torch.zeros(2, dtype=torch.float64)), x)
        expected = enn.GeometricTensor(x, kind).transform(element).tensor
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
        assert any(torch.allclose(matrix, drawn) for drawn in sampled), "the host's group has this element"


def test_a_group_that_moves_no_pixels_is_reported() -> None:
    model = Network(gspaces.rot2dOnR2(3))
    with pytest.warns(ace_plugins.AceWarning, match="random frames.*pixels"):
        ace_plugins.attach(model, trace=False, tell=False)
    assert model.ace.action is None
    with pytest.raises(ace.AdapterError, match="on images$"):
        ace_plugins.equivariance_error(model, (torch.randn(1, 1, 8, 8),))


@pytest.mark.parametrize(("make", "name"), SPACES[:1] + SPACES[4:6])
def test_plain_tensors_in_and_out(make: Any, name: str) -> None:
    model = ace_plugins.attach(Network(make()), gamma_init=1.0, trace=False, tell=False)
    x = torch.randn(2, 1, 8, 8)
    off, on = (ace_plugins.equivariance_error(model, (x,), branches_on=branches) for branches in (False, True))
    assert off.group == name
    assert off.relative < 1e-4 < 0.05 < on.relative


def layers(space: Any) -> Any:
    """An EquivariantModule from vectors to vectors, with all options of a convolution."""
    vector = enn.FieldType(space, [space.irrep(1)])
    hidden = enn.FieldType(space, 2 * [space.regular_repr])
    return enn.SequentialModule(
        enn.R2Conv(vector, hidden, kernel_size=3, padding=1, padding_mode="circular"),
        enn.ReLU(hidden),
        enn.R2Conv(hidden, hidden, kernel_size=3, padding=2, dilation=2, padding_mode="reflect"),
        enn.ReLU(hidden),
        enn.R2Conv(hidden, vector, kernel_size=3, stride=2, padding=1, bias=False),
    )


def test_geometric_tensors_in_and_out() -> None:
    model = layers(gspaces.rot2dOnR2(4))
    x = enn.GeometricTensor(torch.randn(2, 2, 9, 9), model.in_type)
    plain = model.eval()(x).tensor
    ace_plugins.attach(model, mode="resilient", gamma_init=0.5, trace=False, tell=False)
    with ace_plugins.use_branches(model, on=False):
        assert torch.equal(model(x).tensor, plain)
    found = model(x)
    assert isinstance(found, enn.GeometricTensor)
    assert found.type == model.out_type
    assert not torch.allclose(found.tensor, plain)
    off, on = (ace_plugins.equivariance_error(model, (x,), branches_on=branches) for branches in (False, True))
    assert off.relative < 1e-4 < 0.02 < on.relative
    assert [site.name for site in ace_plugins.status(model).sites] == ["0", "2", "4"]


def test_what_a_site_adds_is_gamma_times_a_convolution() -> None:
    model = ace_plugins.attach(layers(gspaces.rot2dOnR2(4)), gamma_init=0.7, frames="off", trace=False, tell=False)
    x = enn.GeometricTensor(torch.randn(2, 2, 9, 9), model.in_type)
    layer, branch = model[4], model.ace.branch("4")
    seen: list[Any] = []
    layer.register_forward_hook(lambda module, args, output: seen.append((args[0].tensor, output.tensor)))
    model.train()(x)
    ((read, given),) = seen
    kernel, bias = layer.expand_parameters()
    upstream = nn.functional.conv2d(read, kernel, bias, stride=2, padding=1)
    plain = nn.functional.conv2d(read, branch.weight.view_as(kernel), branch.bias, stride=2, padding=1)
    torch.testing.assert_close(given, upstream + 0.7 * plain, atol=1e-5, rtol=1e-4)


class Classifier(nn.Module):
    def __init__(self, space: Any) -> None:
        super().__init__()
        image = enn.FieldType(space, [space.trivial_repr])
        hidden = enn.FieldType(space, 3 * [space.regular_repr])
        self.image = image
        self.features = enn.SequentialModule(
            enn.R2Conv(image, hidden, kernel_size=3, padding=1), enn.ReLU(hidden), enn.GroupPooling(hidden)
        )
        self.head = nn.Linear(3, 10)

    def forward(self, picture: Tensor) -> Tensor:
        logits: Tensor = self.head(self.features(self.image(picture)).tensor.mean((2, 3)))
        return logits


def test_logits_do_not_turn() -> None:
    model = ace_plugins.attach(Classifier(gspaces.flipRot2dOnR2(4)), gamma_init=1.0, trace=False, tell=False)
    x = torch.randn(4, 1, 8, 8)
    assert ace_plugins.equivariance_error(model, (x,), branches_on=False).relative < 1e-5
    assert ace_plugins.equivariance_error(model, (x,), branches_on=True).relative > 1e-3


def test_strict_lands_and_leaves_plain_escnn() -> None:
    torch.manual_seed(0)
    model = ace_plugins.attach(Network(gspaces.rot2dOnR2(4)), budget=80, trace=False, tell=False)
    keys = list(Network(gspaces.rot2dOnR2(4)).train().state_dict())
    x, y = torch.randn(8, 1, 8, 8), torch.randn(8, 1, 8, 8)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    model.train()
    for _ in range(80):
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step()
    assert model.ace.landed
    assert list(ace_plugins.project(model).state_dict()) == keys


def test_bounded_branches_are_reported_as_bounded(recwarn: pytest.WarningsRecorder) -> None:
    ace_plugins.attach(layers(gspaces.rot2dOnR2(4)), mode="resilient", trace=False, tell=False)
    assert not [warning for warning in recwarn if issubclass(warning.category, ace_plugins.AceWarning)]


def test_there_is_no_class_to_patch() -> None:
    with pytest.raises(ace_plugins.AceError, match="attach"):
        ace_plugins.patched("escnn")
    assert registry().find_adapter(Network(gspaces.rot2dOnR2(4))).name == "escnn"
    with pytest.raises(ace_plugins.AceError):
        registry().find_adapter(nn.Conv2d(1, 1, 3))
