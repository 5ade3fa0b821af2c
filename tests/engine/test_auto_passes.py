"""Mode auto on a model: which branches a pass uses, in training, in evaluation and in copies of the model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from toy import ADAPTERS, Layered, LayeredAdapter

from ace_plugins import attach, status
from ace_plugins.adapter import Node, Norm, Site, Stem, Tap, hookimpl, linear, norm_linear
from ace_plugins.engine.holdout import split
from ace_plugins.plugins.registry import registry

AUTO: dict[str, Any] = {"loop": "paced", "mode": "auto", "budget": 1000, "trace": False}


def made() -> Any:
    torch.manual_seed(0)
    return attach(Layered().double(), **AUTO)


def keep(model: Any, *sites: int) -> None:
    """Decide to keep these sites, as the test does."""
    model.ace.duals.evidence.kept[list(sites)] = 1.0
    model.ace.duals.evidence.read_buffers()
    model.ace.sync()


def with_sites(model: Any, *sites: int) -> Any:
    """Return the output of a copy of the model in which only these sites have a branch."""
    twin = copy.deepcopy(model).train()
    with torch.no_grad():
        twin.ace.gamma[[number for number in range(3) if number not in sites]] = 0.0
        return twin(BATCH)


BATCH = torch.randn(6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


@torch.no_grad()
def test_evaluation_uses_kept_branches_only_and_training_all() -> None:
    model = made()
    for kept in ((), (1,), (1, 2)):
        keep(model.train(), *kept)
        assert torch.equal(model(BATCH), with_sites(model, 0, 1, 2))
        model.eval()
        assert torch.allclose(model(BATCH), with_sites(model, *kept), rtol=1e-12)
        assert status(model).branches_in_eval == bool(kept)
        keep(model, *kept)
        assert torch.allclose(model(BATCH), with_sites(model, *kept), rtol=1e-12), "after another update of the hooks"
    assert not model.ace.repaired, "no module was replaced"


@torch.no_grad()
def test_a_site_that_is_kept_during_evaluation_is_used_at_once() -> None:
    model = made().eval()
    for kept in ((0,), (0, 2)):
        keep(model, *kept)
        assert torch.allclose(model(BATCH), with_sites(model, *kept), rtol=1e-12)


@pytest.mark.parametrize("use_buffers", [False, True])
@torch.no_grad()
def test_an_averaged_model_uses_the_branches_that_were_kept_since_it_was_made(use_buffers: bool) -> None:
    """It copies or averages buffers in place, without a word to the modules."""
    model = made()
    averaged = torch.optim.swa_utils.AveragedModel(model, use_buffers=use_buffers).eval()
    averaged.update_parameters(model)
    plain = averaged(BATCH)
    assert torch.allclose(plain, with_sites(model), rtol=1e-12)
    keep(model, 1)
    averaged.update_parameters(model)
    assert torch.allclose(averaged(BATCH), with_sites(model, 1), rtol=1e-12)
    assert not torch.allclose(averaged(BATCH), plain)


def test_a_part_of_a_checkpoint_leaves_the_evidence() -> None:
    model = made()
    keep(model, 1)
    model.load_state_dict({"ace.gamma": torch.full((3,), 0.3)}, strict=False)
    assert model.ace.duals.evidence.kept_sites == {1}


def test_a_checkpoint_from_before_there_was_evidence_goes_on() -> None:
    """It begins without evidence, whatever the model had."""
    saved = {name: value for name, value in made().state_dict().items() if ".evidence." not in name}
    model = made()
    keep(model, 1)
    assert not any(model.load_state_dict(saved, strict=True))
    assert not model.ace.duals.evidence.kept_sites
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        (model(BATCH) - 1).square().mean().backward()
        optimizer.step()
    assert model.ace.duals.evidence.probes.tolist() == [1.0] * 3
    assert model.ace.duals.evidence.cycle_steps.tolist() == [1.0] * 3, "one more step after the first probe"
    assert torch.isfinite(model.ace.gamma).all()


class Scaled(nn.Module):
    """A linear map, which the host bounds, and a parameter that the host does not know."""

    def __init__(self, node: Node) -> None:
        super().__init__()
        self.linear = nn.Linear(*node.shape_in, *node.shape_out)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.linear(x)


@pytest.mark.parametrize("judging", [False, True])
def test_judges_train_no_branch_however_it_is_written(judging: bool) -> None:
    class Own(ADAPTERS["layered"]):  # type: ignore[misc,valid-type]
        @hookimpl
        def ace_branch(self, site: Node) -> nn.Module:
            return Scaled(site)

    registry().add(Own(), "own")
    try:
        model: Any = attach(Layered().double(), "own", **AUTO)
    finally:
        registry().remove("own")
    model.ace.duals.evidence.holdout = 1.0 if judging else 1e-9
    model(BATCH).sum().backward()
    trained = [bool(p.grad.any()) for p in model.ace.branches.parameters()]
    assert set(trained) == {not judging}
    assert bool(model.ace.gamma.grad.any()) == judging
    assert all(p.grad.any() for name, p in model.named_parameters() if not name.startswith("ace."))


class ChainAdapter(LayeredAdapter):
    """Branches in a chain that starts at a stem: the second reads the output of the first."""

    @hookimpl
    def ace_layers(self, model: Any) -> Any:
        stem = Stem("lift", Tap("x", ""), (3,), (8,), bounded=False)
        first = Site("a", "layers.0", (8,), (8,), reads="lift")
        return [stem, first, Site("b", "layers.1", (8,), (8,), reads="a"), Site("c", "layers.2", (8,), (8,))]

    @hookimpl
    def ace_branch(self, site: Node) -> nn.Module:
        return linear(site) if isinstance(site, Stem) else norm_linear(site)


@pytest.fixture
def chain() -> Any:
    registry().add(ChainAdapter(), "chain")
    torch.manual_seed(0)
    yield attach(Layered().double(), adapter="chain", **AUTO)
    registry().remove("chain")


def test_a_kept_branch_is_trained_as_it_is_evaluated(chain: Any) -> None:
    """After the first batch, its normalisation and that of the links before it have the statistics of this batch."""
    norms = {name: chain.ace.branch(name)[0] for name in "abc"}
    assert all(isinstance(norm, Norm) for norm in norms.values())
    chain(BATCH)
    keep(chain, 1)

    def through() -> Tensor:
        out: Tensor = chain.ace.branch("b")(chain.ace.branch("a")(chain.ace.branch("lift")(BATCH)))
        return out

    def moves() -> dict[str, bool]:
        before = {name: norm.running_mean.clone() for name, norm in norms.items()}
        chain(2 * BATCH)
        return {name: not torch.equal(norm.running_mean, before[name]) for name, norm in norms.items()}

    normalised = through()  # with the statistics of this batch, which the running ones become
    normalised.square().mean().backward()
    assert chain.ace.duals.evidence.settle()
    chain.ace.sync()
    assert not chain.ace.duals.evidence.settle()
    for _ in range(2):
        assert torch.allclose(through(), normalised, rtol=1e-9)
        trained = through()
        assert moves() == {"a": False, "b": False, "c": True}
        chain.eval()
        assert torch.equal(through(), trained)
        chain.load_state_dict(chain.state_dict())
        chain.train()


def test_once_all_sites_are_decided_every_sample_trains_what_is_left(chain: Any) -> None:
    assert split(chain.ace, ["x"], (BATCH,), {}) is not None
    keep(chain, 1)
    assert split(chain.ace, ["x"], (BATCH,), {}) is not None
    chain.ace.duals.site_landed.copy_(torch.tensor([1.0, 0.0, 1.0]))
    chain.ace.duals.note_landed()
    assert split(chain.ace, ["x"], (BATCH,), {}) is None


def test_samples_that_would_judge_a_landed_site_train_the_stem(chain: Any) -> None:
    chain.ace.duals.site_landed.copy_(torch.tensor([1.0, 1.0, 0.0]))
    chain.ace.duals.note_landed()
    parts = split(chain.ace, ["x"], (BATCH,), {})
    assert parts is not None
    assert bool(parts.rows_that_fit("a", 6).all())
    assert torch.equal(parts.rows_that_fit("lift", 6), parts.rows_that_fit("c", 6))
    assert 0 < int(parts.rows_that_fit("c", 6).sum()) < 6


class Operators(TorchDispatchMode):
    """Counts the operators that torch calls."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return function(*args, **(kwargs or {}))


def test_held_out_judging_adds_one_operator_per_linear_map_and_one_per_site() -> None:
    counts = {}
    for mode in ("resilient", "auto"):
        for layers in (2, 6):
            torch.manual_seed(0)
            model = attach(Layered(layers), **{**AUTO, "mode": mode})
            with Operators() as operators:
                model(BATCH.float()).square().sum().backward()
            counts[mode, layers] = operators.count
    per_site = {mode: (counts[mode, 6] - counts[mode, 2]) / 4 for mode in ("resilient", "auto")}
    assert per_site["auto"] - per_site["resilient"] <= 4, "a branch has three linear maps"
