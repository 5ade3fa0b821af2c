"""Branches of bounded scale: against exact singular values, and against torch's own spectral normalisation."""

from __future__ import annotations

import copy
import pickle
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm
from toy import ADAPTERS, Layered, LayeredAdapter

from ace_plugins import AceWarning, attach, project, status
from ace_plugins.adapter import Stem, Tap, hookimpl
from ace_plugins.engine.spectral_norm import SNLinear, bound, divide, find_bounded, find_unbounded, follow, settle
from ace_plugins.plugins.registry import registry


def norm(matrix: Tensor) -> float:
    return float(torch.linalg.matrix_norm(matrix.detach().double(), 2))


def train(model: Any, steps: int, optimizer: torch.optim.Optimizer | None = None, lr: float = 5e-4) -> None:
    optimizer = optimizer or torch.optim.Adam(model.parameters(), lr=lr)
    for _ in range(steps):
        optimizer.zero_grad()
        (model(torch.randn(8, 3)) - 1).square().mean().backward()
        optimizer.step()


@pytest.fixture
def replaced(request: pytest.FixtureRequest) -> Any:
    registry().remove("layered")
    registry().add(request.param(), "layered")
    yield
    registry().remove("layered")
    registry().add(ADAPTERS["layered"](), "layered")


def branch(*widths: int) -> nn.Module:
    return bound(nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(widths))))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 12), min_size=2, max_size=6), st.integers(0, 99))
def test_a_weight_that_was_set_is_divided_by_its_largest_singular_value(widths: list[int], seed: int) -> None:
    torch.manual_seed(seed)
    bounded = find_bounded(branch(*widths).double())
    for m in bounded:
        nn.init.normal_(m.weight, std=3.0)
    for m, weight in zip(bounded, divide(bounded), strict=True):
        assert torch.allclose(weight, m.weight / norm(m.weight), rtol=1e-3)
        assert norm(weight) < 1 + 1e-4


@pytest.mark.parametrize("replaced", [LayeredAdapter], indirect=True)
def test_one_iteration_a_step_keeps_up_with_training(replaced: None) -> None:
    """The bound the method asks for: 1 % after 50 steps, 0.1 % once the weights settle."""
    torch.manual_seed(0)
    model = attach(Layered(width=64), "layered", mode="resilient", spectral_norm=True)
    train(model, 50)
    bounded = find_bounded(model.ace.branches)
    assert {tuple(m.weight.shape) for m in bounded} == {(128, 64), (64, 128), (64, 64)}
    assert all(norm(w) == pytest.approx(1, abs=0.01) for w in divide(bounded))
    for _ in range(400):
        follow(bounded)
    assert all(1 - 1e-6 < norm(w) < 1 + 1e-3 for w in divide(bounded))


def test_fast_training_is_followed_too() -> None:
    torch.manual_seed(0)
    model = attach(Layered(), "layered", mode="resilient", spectral_norm=True)
    train(model, 200, lr=1e-2)
    assert all(norm(w) == pytest.approx(1, abs=0.02) for w in divide(find_bounded(model.ace.branches)))


def test_gradients_are_those_of_torchs_own() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5)).double()
    ours, theirs = bound(copy.deepcopy(plain)), copy.deepcopy(plain)
    settle(find_bounded(ours))
    for layer in theirs:
        if isinstance(layer, nn.Linear):
            spectral_norm(layer, n_power_iterations=2000)
    x = torch.randn(9, 5, dtype=torch.float64)
    one, two = ours(x), theirs(x)
    assert torch.allclose(one, two, atol=1e-6)
    one.square().sum().backward()
    two.square().sum().backward()
    for mine, other in zip(ours, theirs, strict=True):
        if isinstance(mine, SNLinear):
            assert torch.allclose(mine.weight.grad, other.parametrizations.weight.original.grad, atol=1e-5)
            assert torch.allclose(mine.bias.grad, other.bias.grad, atol=1e-5)


def test_all_maps_at_once_are_as_each_alone() -> None:
    torch.manual_seed(0)
    module = branch(4, 4, 4, 9, 4, 2)
    bounded = find_bounded(module)
    settle(bounded)
    for m, weight in zip(bounded, divide(bounded), strict=True):
        assert torch.allclose(weight, divide([m])[0], atol=1e-6)
    alone = [copy.deepcopy(m) for m in bounded]
    follow(bounded)
    for m, one in zip(bounded, alone, strict=True):
        follow([one])
        assert torch.allclose(m.direction, one.direction, atol=1e-6)


def test_evaluation_makes_no_iteration() -> None:
    model = attach(Layered(), "layered", mode="resilient", spectral_norm=True)
    train(model, 3)
    before = [m.direction.clone() for m in find_bounded(model.ace.branches)]
    model.eval()
    for _ in range(3):
        model(torch.randn(8, 3))
    assert all(torch.equal(m.direction, d) for m, d in zip(find_bounded(model.ace.branches), before, strict=True))


def test_one_iteration_a_step_however_many_forwards() -> None:
    one = attach(Layered(), "layered", spectral_norm=True)
    two = copy.deepcopy(one)
    x = torch.randn(8, 3)
    for model, forwards in ((one, 1), (two, 4)):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(forwards):
            (model(x).square().mean() / forwards).backward()
        optimizer.step()
    for a, b in zip(find_bounded(one.ace.branches), find_bounded(two.ace.branches), strict=True):
        assert torch.allclose(a.direction, b.direction, atol=1e-5)


@pytest.mark.parametrize("how", ["init", "data", "zero"])
def test_weights_that_a_script_sets_after_attach(how: str) -> None:
    """model.apply(init) is common; written through .data nobody can see it, and it must stay harmless."""
    torch.manual_seed(0)
    model = attach(Layered(), "layered", mode="resilient", spectral_norm=True)
    model.ace.gamma.data.fill_(1.0)

    def fill(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            if how == "init":
                nn.init.normal_(module.weight, std=5.0)
            elif how == "zero":
                nn.init.zeros_(module.weight)
            else:
                module.weight.data.normal_(std=5.0)

    model.ace.branches.apply(fill)
    weights = divide(find_bounded(model.ace.branches))
    largest = {"init": 1 + 1e-4, "zero": 0.0, "data": 4.0}[how]
    assert all(norm(w) <= largest for w in weights)
    train(model, 60)
    assert all(norm(w) == pytest.approx(1, abs=0.02) for w in divide(find_bounded(model.ace.branches)))
    assert all(p.isfinite().all() for p in model.parameters())


def test_gamma_frozen_and_left_out_of_the_optimizer() -> None:
    """The branches train on, and the bound with them."""
    model = attach(Layered(), "layered", mode="resilient", spectral_norm=True)
    model.ace.gamma.requires_grad_(False)
    train(model, 50, torch.optim.Adam((p for p in model.parameters() if p.requires_grad), lr=1e-2))
    assert all(norm(w) == pytest.approx(1, abs=0.02) for w in divide(find_bounded(model.ace.branches)))


def test_stop_and_resume_is_bit_for_bit() -> None:
    torch.manual_seed(0)
    going = attach(Layered(), "layered", mode="resilient", spectral_norm=True, trace=False)
    optimizer = torch.optim.Adam(going.parameters())
    train(going, 5, optimizer)
    torch.manual_seed(1)
    resumed = attach(Layered(), "layered", mode="resilient", spectral_norm=True, trace=False)
    resumed.load_state_dict(copy.deepcopy(going.state_dict()))
    again = torch.optim.Adam(resumed.parameters())
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for model, own in ((going, optimizer), (resumed, again)):
        torch.manual_seed(2)
        train(model, 5, own)
    assert all(torch.equal(v, resumed.state_dict()[n]) for n, v in going.state_dict().items())


def test_copies_and_pickles_in_the_middle_of_it() -> None:
    model = attach(Layered(), "layered", mode="resilient", spectral_norm=True)
    x = torch.randn(4, 3)
    seen: list[Any] = []
    handle = model.head.register_forward_hook(lambda *_: seen.append(copy.deepcopy(model.ace.branches)))
    model(x)
    handle.remove()
    assert all(m.divided is None for m in find_bounded(seen[0])), "a copy holds no graph"
    assert all(m.divided is None for m in find_bounded(model.ace.branches)), "nothing is kept between forwards"
    train(model, 3)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(x), model(x)), "bit for bit, not a better bounded one"


def test_a_copy_of_weights_that_were_set_keeps_the_mark() -> None:
    (m,) = find_bounded(branch(4, 4))
    settle([m])
    nn.init.normal_(m.weight, std=7.0)
    assert copy.deepcopy(m).changed
    assert norm(divide([copy.deepcopy(m)])[0]) < 1 + 1e-4


def test_replicas_leave_the_iterations_to_the_original() -> None:
    (m,) = find_bounded(branch(4, 4))
    settle([m])
    replica = m._replicate_for_data_parallel()
    replica.weight = m.weight.detach().clone().add_(0.0)
    assert not replica.changed
    assert torch.equal(divide([replica])[0], divide([m])[0])


def test_averaged_models_are_bounded_anew() -> None:
    model = attach(Layered(), "layered", mode="resilient", spectral_norm=True)
    averaged = torch.optim.swa_utils.AveragedModel(model)
    for _ in range(3):
        train(model, 5, lr=5e-2)
        averaged.update_parameters(model)
    averaged(torch.randn(4, 3))
    assert all(norm(w) < 1 + 1e-4 for w in divide(find_bounded(averaged.module.ace.branches)))


def test_averaged_checkpoints_are_bounded_anew() -> None:
    """What averages weights averages directions, too, and leaves vectors that are no directions."""
    torch.manual_seed(0)
    states = []
    for seed in range(3):
        torch.manual_seed(seed)
        model = attach(Layered(), "layered", mode="resilient", spectral_norm=True, trace=False)
        train(model, 20, lr=1e-2)
        states.append(model.state_dict())
    mean = {name: sum(state[name] for state in states) / 3 for name in states[0]}
    model.load_state_dict(mean)
    assert all(norm(w) < 1 + 1e-4 for w in divide(find_bounded(model.ace.branches)))


@pytest.mark.parametrize(("length", "changed"), [(1.0, False), (1 + 1e-3, True), (0.5, True)])
def test_only_a_loaded_direction_of_length_one_is_kept(length: float, changed: bool) -> None:
    torch.manual_seed(0)
    (m,) = find_bounded(branch(6, 6))
    settle([m])
    state = m.state_dict()
    m.load_state_dict({**state, "direction": length * state["direction"]})
    assert m.changed is changed


def test_eval_settles_weights_that_were_set_and_train_leaves_it_to_the_next_pass() -> None:
    torch.manual_seed(0)
    model = attach(Layered(), mode="resilient", spectral_norm=True, trace=False)
    bounded = find_bounded(model.ace.branches)
    for mode in (True, False):
        with torch.no_grad():
            for m in bounded:
                m.weight.copy_(torch.randn_like(m.weight))
        model.train(mode)
        assert [m.changed for m in bounded] == [mode] * len(bounded)


def test_another_weight_and_another_memory_are_seen() -> None:
    (m,) = find_bounded(branch(6, 6))
    settle([m])
    m.weight = nn.Parameter(torch.randn(6, 6) * 9)
    assert norm(divide([m])[0]) < 1 + 1e-4
    nn.utils.vector_to_parameters(torch.randn(42) * 9, m.parameters())
    assert norm(divide([m])[0]) < 1 + 1e-4


def test_torchs_layers_that_reach_for_weights_are_left_alone_and_listed() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    keys = list(layer.state_dict())
    assert bound(layer) is layer
    assert list(layer.state_dict()) == keys
    assert find_unbounded(layer) == ["Linear", "MultiheadAttention", "NonDynamicallyQuantizableLinear"]


def test_a_map_that_is_there_twice_is_one_map() -> None:
    linear = nn.Linear(3, 3)
    bounded = bound(nn.Sequential(linear, nn.Tanh(), linear))
    assert isinstance(bounded[0], SNLinear)
    assert bounded[2] is bounded[0]


def test_an_interrupted_forward_leaves_no_weights_behind() -> None:
    model = attach(Layered(), "layered", spectral_norm=True)

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    handle = model.head.register_forward_pre_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        model(torch.randn(4, 3))
    handle.remove()
    ace = model.ace
    project(model)
    assert all(m.divided is None for m in find_bounded(ace.branches))


def test_models_without_memory() -> None:
    model = attach(Layered(), "layered", mode="resilient", spectral_norm=True).to("meta")
    assert model(torch.empty(4, 3, device="meta")).shape == (4, 1)


@pytest.mark.filterwarnings("ignore")
def test_compiled() -> None:
    torch.manual_seed(0)
    model = attach(Layered(), "layered", mode="resilient", spectral_norm=True, trace=False)
    twin = copy.deepcopy(model)
    compiled = torch.compile(model, backend="eager")
    optimizers = [torch.optim.SGD(m.parameters(), lr=5e-3) for m in (model, twin)]
    for _ in range(3):
        x = torch.randn(4, 3)
        for forward, optimizer in zip((compiled, twin), optimizers, strict=True):
            optimizer.zero_grad()
            forward(x).square().mean().backward()
            optimizer.step()
    assert all(torch.allclose(v, twin.state_dict()[n], atol=1e-5) for n, v in model.state_dict().items())


def test_precisions() -> None:
    x = torch.randn(4, 3)
    model = attach(Layered(), "layered", mode="resilient", spectral_norm=True)
    expected = model(x)
    assert torch.allclose(copy.deepcopy(model).double()(x.double()).float(), expected, atol=1e-5)
    half = copy.deepcopy(model).bfloat16()
    assert all(m.direction.dtype == torch.bfloat16 for m in find_bounded(half.ace.branches))
    assert all(norm(w.float()) == pytest.approx(1, abs=0.05) for w in divide(find_bounded(half.ace.branches)))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.allclose(model(x).float(), expected, atol=0.1)
    with torch.inference_mode():
        assert torch.allclose(model(x), expected, atol=1e-5)


def test_the_parameters_are_the_plain_ones() -> None:
    bounded, plain = (attach(Layered(), "layered", spectral_norm=on) for on in (True, False))
    assert status(bounded).ace_parameters == status(plain).ace_parameters
    assert list(dict(bounded.named_parameters())) == list(dict(plain.named_parameters()))
    extra = set(bounded.state_dict()) - set(plain.state_dict())
    assert {name.rpartition(".")[2] for name in extra} == {"direction"}


def test_branches_start_as_without_bounds() -> None:
    torch.manual_seed(0)
    one = attach(Layered(), "layered", spectral_norm=True)
    torch.manual_seed(0)
    two = attach(Layered(), "layered")
    assert all(torch.equal(p, dict(two.named_parameters())[n]) for n, p in one.named_parameters())


class Own(nn.Linear):
    """A subclass that uses its weight in its own way."""

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T


def test_what_is_bounded_and_what_is_not() -> None:
    assert find_unbounded(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Conv1d(2, 2, 1))) == ["Conv1d", "Linear"]
    assert find_unbounded(bound(nn.Linear(2, 2))) == []
    assert find_unbounded(bound(nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.ReLU()))) == []
    assert find_unbounded(bound(nn.Sequential(nn.Sequential(Own(2, 2)), nn.ReLU()))) == ["Own"]
    assert find_unbounded(bound(Own(2, 2))) == ["Own"]
    twice = bound(branch(2, 3, 2))
    assert len(find_bounded(twice)) == 2


class Unbound(ADAPTERS["layered"]):  # type: ignore[name-defined,misc]
    @hookimpl
    def ace_layers(self, model: Any) -> Any:
        _, *sites = super().ace_layers(model)
        return [Stem("stem", Tap("x", ""), (3,), (8,), bounded=False), *sites]


class Convolving(ADAPTERS["layered"]):  # type: ignore[name-defined,misc]
    @hookimpl
    def ace_branch(self, site: Any) -> nn.Module:
        return nn.Sequential(nn.Linear(site.width_in, 8), nn.Unflatten(-1, (8, 1)), nn.Conv1d(8, 8, 1), nn.Flatten())


@pytest.mark.parametrize("replaced", [Unbound], indirect=True)
def test_a_stem_may_stay_unbounded(replaced: None) -> None:
    model = attach(Layered(), "layered", spectral_norm=True)
    assert not find_bounded(model.ace.branch("stem"))
    assert all(find_bounded(model.ace.branch(site.name)) for site in model.ace.sites)


@pytest.mark.filterwarnings("error")
def test_deploying_unbounded_branches_costs() -> None:
    for mode in ("resilient", "bounded"):
        with pytest.warns(AceWarning, match=f"mode '{mode}' without spectral_norm"):
            attach(Layered(), "layered", mode=mode)
        attach(Layered(), "layered", mode=mode, spectral_norm=True)
    attach(Layered(), "layered")


@pytest.mark.parametrize("replaced", [Convolving], indirect=True)
def test_branches_that_spectral_norm_does_not_reach(replaced: None) -> None:
    with pytest.warns(AceWarning, match=r"branches that spectral_norm does not reach \(Conv1d of adapter 'layered'\)"):
        attach(Layered(), "layered", mode="resilient", spectral_norm=True)


def test_a_trace_of_the_deployed_model_holds_no_iterations() -> None:
    """Weights that were set (an EMA swapped in) are followed at eval(), so two traces of the model are the same."""
    from torch.fx.experimental.proxy_tensor import make_fx

    torch.manual_seed(0)
    model = attach(Layered(), mode="resilient", spectral_norm=True, trace=False)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.5)
    model.eval()
    one, two = (make_fx(model)(torch.randn(4, 3)).code for _ in range(2))
    assert one == two
    model.double()
    one, two = (make_fx(model)(torch.randn(4, 3, dtype=torch.float64)).code for _ in range(2))
    assert one == two
