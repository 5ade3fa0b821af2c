"""How the dual loop meets the training scripts people write."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from toy import Layered

from ace_plugins import AceError, AceWarning, attach, project, status
from ace_plugins.engine.step import STEPS


def model_and_batch(**config: Any) -> tuple[Layered, Tensor]:
    torch.manual_seed(0)
    model = attach(Layered().double(), dual_lr=0.01, **config)
    return model, torch.randn(12, 3, dtype=torch.float64)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = (model(x) - 1).square().mean()
    return loss


def same(one: nn.Module, two: nn.Module, tolerance: float = 0.0) -> bool:
    pairs = zip(one.state_dict().values(), two.state_dict().values(), strict=True)
    return all(torch.allclose(a.double(), b.double(), rtol=0, atol=tolerance) for a, b in pairs)


def test_the_loss_of_a_step_is_the_sum_over_accumulated_backward_passes() -> None:
    model = attach(Layered())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    other = nn.Linear(3, 1)
    x = torch.randn(8, 3)
    for parts in (4, 1):
        whole = loss_of(model, x).detach()
        other(x).sum().backward()  # the loss of another model does not count
        optimizer.zero_grad()
        for part in x.chunk(parts):
            (loss_of(model, part) / parts).backward()
        optimizer.step()
        assert torch.allclose(model.ace.session.observed.loss, whole)


def test_gradient_accumulation_adds_lambda_once() -> None:
    whole, x = model_and_batch()
    parts = copy.deepcopy(whole)
    for model, pieces in ((whole, 1), (parts, 3)):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(10):
            optimizer.zero_grad()
            for chunk in x.chunk(pieces):
                (loss_of(model, chunk) / pieces).backward()
            optimizer.step()
    assert same(whole, parts, 1e-12)
    assert status(parts).steps == 10


def test_gradient_is_the_scripts_own_after_the_step() -> None:
    model, x = model_and_batch(mode="resilient", augmented=1.0, gamma_lr=3.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        loss_of(model, x).backward()
        before = model.ace.gamma.grad.clone()
        optimizer.step()
        assert torch.equal(model.ace.gamma.grad, before)


def test_clipping_sees_the_objectives_gradient_only() -> None:
    model, x = model_and_batch()
    model.ace.duals.lambda_.fill_(100.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of(model, x).backward()
    plain = torch.nn.utils.get_total_norm([p.grad for p in model.ace.parameters()])
    clipped = torch.nn.utils.clip_grad_norm_(model.ace.parameters(), float(plain) / 2)
    assert torch.equal(plain, clipped)
    gamma, grad = model.ace.gamma.detach().clone(), model.ace.gamma.grad.clone()
    optimizer.step()
    assert torch.allclose(model.ace.gamma, gamma - 0.1 * (grad + 100.0))


def test_no_gradient_no_dual_step() -> None:
    """A step in which the model took no part, as when two networks train in turns."""
    model, x = model_and_batch()
    other = nn.Linear(3, 1).double()
    optimizer = torch.optim.Adam([*model.parameters(), *other.parameters()])
    loss_of(other, x).backward()
    optimizer.step()
    assert status(model).steps == 0
    assert model.ace.duals.lambda_.tolist() == [0, 0, 0]


@pytest.mark.parametrize("fused", [False, True])
def test_grad_scaler_gives_the_same_and_skips_with_the_step(fused: bool) -> None:
    plain, x = model_and_batch(gamma_lr=2.0)
    plain, x = plain.float(), x.float()
    scaled = copy.deepcopy(plain)
    optimizer = torch.optim.Adam(plain.parameters(), lr=0.01, fused=fused)
    for _ in range(5):
        optimizer.zero_grad()
        loss_of(plain, x).backward()
        optimizer.step()
    optimizer = torch.optim.Adam(scaled.parameters(), lr=0.01, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(6):
        optimizer.zero_grad()
        loss = loss_of(scaled, x)
        scaler.scale(loss * (float("inf") if step == 2 else 1.0)).backward()
        before = copy.deepcopy(scaled.ace.state_dict())
        scaler.step(optimizer)
        if step == 2:
            after = scaled.ace.state_dict()
            assert all(torch.equal(before[name], after[name]) for name in before), "a skipped step moves no dual"
        scaler.update()
    assert status(scaled).steps == 5
    assert same(plain, scaled, 1e-6)


def test_learning_rate_of_gammas_own_group_counts() -> None:
    model, x = model_and_batch()
    project(model)
    attach(model, "layered", mode="resilient", dual_lr="2x", dual_optimizer="sgd")
    rest = [p for p in model.parameters() if p is not model.ace.gamma]
    optimizer = torch.optim.SGD([{"params": rest, "lr": 0.5}, {"params": [model.ace.gamma], "lr": 0.25}])
    loss_of(model, x).backward()
    optimizer.step()
    assert torch.allclose(model.ace.duals.lambda_, torch.full((3,), 0.5, dtype=torch.float64))
    optimizer.zero_grad()
    loss_of(model, x).backward()
    optimizer.step()
    assert torch.allclose(model.ace.duals.u, torch.full((3,), 0.25 * 0.5, dtype=torch.float64))


def test_two_models_in_one_optimizer_and_one_model_in_two() -> None:
    one, x = model_and_batch(gamma_lr=2.0)
    two = copy.deepcopy(one)
    alone = copy.deepcopy(one)
    together = torch.optim.SGD([*one.parameters(), *two.parameters()], lr=0.1, weight_decay=0.01)
    weights = [p for n, p in alone.named_parameters() if not n.startswith("ace")]
    apart = [
        torch.optim.SGD(weights, lr=0.1, weight_decay=0.01),
        torch.optim.SGD(alone.ace.parameters(), lr=0.1, weight_decay=0.01),
    ]
    for _ in range(5):
        for optimizer in (together, *apart):
            optimizer.zero_grad()
        for model in (one, two, alone):
            loss_of(model, x).backward()
        for optimizer in (together, *apart):
            optimizer.step()
    assert same(one, two)
    assert same(one, alone)
    assert len(together.param_groups) == 1
    assert status(one).steps == status(alone).steps == 5


def test_optimizer_built_before_attach_is_an_error() -> None:
    model = Layered()
    optimizer = torch.optim.Adam(model.parameters())
    attach(model)
    weight = model.head.weight.detach().clone()
    loss_of(model, torch.randn(4, 3)).backward()
    with pytest.raises(AceError, match=r"Adam trains 10 weights of Layered but no optimizer owns its gamma.*add_param"):
        optimizer.step()
    assert torch.equal(model.head.weight, weight), "nothing moved"
    optimizer.add_param_group({"params": model.ace.parameters()})
    optimizer.step()
    assert status(model).steps == 1


def test_frozen_gamma_is_left_alone() -> None:
    model = attach(Layered())
    model.ace.gamma.requires_grad_(False)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad])
    loss_of(model, torch.randn(4, 3)).backward()
    optimizer.step()
    assert status(model).steps == 0
    assert model.ace.gamma.tolist() == [1, 1, 1]


def test_branches_nobody_owns_are_reported() -> None:
    model = attach(Layered())
    optimizer = torch.optim.Adam([p for n, p in model.named_parameters() if "branches" not in n])
    loss_of(model, torch.randn(4, 3)).backward()
    with pytest.warns(AceWarning, match=r"no optimizer owns 24 branch parameters"):
        optimizer.step()


def closure_of(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Any:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, x)
        loss.backward()
        return loss

    return closure


@pytest.mark.parametrize("keyword", [False, True])
@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW])
def test_a_closure_called_once_is_as_good_as_a_backward_before(make: Any, keyword: bool) -> None:
    """As trainers do that hand a closure to every optimizer."""
    plain, x = model_and_batch(gamma_lr=3.0)
    closed = copy.deepcopy(plain)
    one, two = (make(model.parameters(), lr=0.01, weight_decay=0.1) for model in (plain, closed))
    for _ in range(5):
        closure_of(plain, one, x)()
        one.step()
        closure = closure_of(closed, two, x)
        loss = two.step(closure=closure) if keyword else two.step(closure)
        assert loss is not None
    assert same(plain, closed)
    assert status(closed).steps == 5
    assert len(two.param_groups) == 1


def test_lbfgs_is_an_error_and_nothing_moves() -> None:
    model, x = model_and_batch()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(AceError, match="LBFGS evaluates the loss several times"):
        optimizer.step(closure_of(model, optimizer, x))
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


class Twice(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        closure()
        return super().step(closure)


def test_a_closure_called_twice_is_an_error() -> None:
    model, x = model_and_batch()
    optimizer = Twice(model.parameters(), lr=0.1)
    with pytest.raises(AceError, match="Twice evaluates the loss several times"):
        optimizer.step(closure_of(model, optimizer, x))


def test_closures_of_other_models_are_fine() -> None:
    model, _ = model_and_batch()
    other = nn.Linear(3, 1)
    optimizer = torch.optim.LBFGS(other.parameters())
    x = torch.randn(8, 3)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(other, x)
        loss.backward()
        return loss

    optimizer.step(closure)
    assert status(model).steps == 0


class Halving(torch.optim.SGD):
    """Writes to the gradients during its step, as fused kernels do that unscale them."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.mul_(0.5)
        return super().step(closure)


def test_an_optimizer_that_writes_to_gradients_leaves_the_scripts_own() -> None:
    model, x = model_and_batch(gamma_lr=2.0)
    model.ace.duals.lambda_.fill_(1.0)
    optimizer = Halving(model.parameters(), lr=0.01)
    loss_of(model, x).backward()
    before = model.ace.gamma.grad.clone()
    optimizer.step()
    assert torch.equal(model.ace.gamma.grad, before), "without the constraints' pull"


class Failing(torch.optim.SGD):
    fail = False

    def step(self, closure: Any = None) -> Any:
        if self.fail:
            raise RuntimeError("kernel failed")
        return super().step(closure)


def test_a_step_that_raises_leaves_groups_and_gradients_whole() -> None:
    model, x = model_and_batch(gamma_lr=2.0)
    twin = copy.deepcopy(model)
    optimizer = Failing(model.parameters(), lr=0.1)
    loss_of(model, x).backward()
    optimizer.fail = True
    with pytest.raises(RuntimeError, match="kernel failed"):
        optimizer.step()
    optimizer.fail = False
    optimizer.step()
    assert len(optimizer.param_groups) == 1
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    loss_of(twin, x).backward()
    optimizer.step()
    assert same(model, twin)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_after_a_step_that_raised_a_new_gradient_counts(set_to_none: bool) -> None:
    model, x = model_and_batch(gamma_lr=2.0)
    optimizer = Failing(model.parameters(), lr=0.01)
    loss_of(model, x).backward()
    optimizer.fail = True
    with pytest.raises(RuntimeError, match="kernel failed"):
        optimizer.step()
    optimizer.load_state_dict(torch.optim.SGD(model.parameters(), lr=0.01).state_dict())
    with pytest.raises(RuntimeError, match="kernel failed"):
        optimizer.step()
    assert len(optimizer.state_dict()["param_groups"]) == 1, "a state saved on the way out can be loaded"
    assert len(optimizer.param_groups) == 1
    with pytest.raises(RuntimeError, match="kernel failed"):
        optimizer.step()
    optimizer.fail = False
    optimizer.zero_grad(set_to_none=set_to_none)
    (1000 * loss_of(model, x)).backward()
    wanted = model.ace.gamma.grad.clone()
    before = model.ace.gamma.detach().clone()
    optimizer.step()
    assert torch.allclose(model.ace.gamma, before - 0.02 * wanted)


class Wrapping(torch.optim.Optimizer):
    """As ZeroRedundancyOptimizer and Lookahead: an optimizer whose step is another one's."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__([p for group in inner.param_groups for p in group["params"]], {"lr": 0.5})
        self.inner = inner

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


def test_an_optimizer_inside_an_optimizer_counts_once() -> None:
    plain, x = model_and_batch(gamma_lr=2.0)
    wrapped = copy.deepcopy(plain)
    one = torch.optim.SGD(plain.parameters(), lr=0.01, weight_decay=0.1)
    inner = torch.optim.SGD(wrapped.parameters(), lr=0.01, weight_decay=0.1)
    outer = Wrapping(inner)
    for model, optimizer in ((plain, one), (wrapped, outer)):
        for _ in range(4):
            optimizer.zero_grad()
            loss_of(model, x).backward()
            optimizer.step()
    assert same(plain, wrapped)
    assert status(wrapped).steps == 4
    assert len(outer.param_groups) == len(inner.param_groups) == 1


class Sharing(Wrapping):
    """A wrapper that shows the groups of the optimizer inside as its own."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner)
        self.param_groups = inner.param_groups


class Rescaling(torch.optim.SGD):
    """Touches the gradients before it hands over to the step it inherits, which has hooks of its own."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            torch.nn.utils.clip_grad_norm_(group["params"], 1e9)
        return super().step(closure)


@pytest.mark.parametrize("kind", [Sharing, Rescaling])
def test_other_optimizers_around_a_step(kind: Any) -> None:
    plain, x = model_and_batch(gamma_lr=2.0)
    plain.ace.duals.lambda_.fill_(1.0)
    other, twin = copy.deepcopy(plain), copy.deepcopy(plain)
    settings = {"lr": 0.001, "weight_decay": 0.1}
    one = torch.optim.SGD([*plain.parameters(), *twin.parameters()], **settings)
    third = copy.deepcopy(other)
    both = [*other.parameters(), *third.parameters()]
    two = Sharing(torch.optim.SGD(both, **settings)) if kind is Sharing else Rescaling(both, **settings)
    for models, optimizer in (((plain, twin), one), ((other, third), two)):
        for _ in range(3):
            optimizer.zero_grad()
            sum(loss_of(model, x) for model in models).backward()
            optimizer.step()
    assert same(plain, other, 1e-12)
    assert status(other).steps == status(third).steps == 3
    assert [len(group["params"]) for group in two.param_groups] == [len(both)]


def test_zero_redundancy_optimizer() -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    plain, x = model_and_batch(gamma_lr=2.0)
    sharded = copy.deepcopy(plain)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        one = torch.optim.SGD(plain.parameters(), lr=0.01, weight_decay=0.1)
        two = ZeroRedundancyOptimizer(sharded.parameters(), torch.optim.SGD, lr=0.01, weight_decay=0.1)
        for model, optimizer in ((plain, one), (sharded, two)):
            for _ in range(3):
                optimizer.zero_grad()
                loss_of(model, x).backward()
                optimizer.step()
    finally:
        torch.distributed.destroy_process_group()
    assert same(plain, sharded, 1e-12)
    assert status(sharded).steps == 3


def test_an_optimizer_that_maximizes() -> None:
    down, x = model_and_batch(gamma_lr=2.0)
    up = copy.deepcopy(down)
    for model, sign in ((down, 1), (up, -1)):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, maximize=sign < 0)
        for _ in range(5):
            optimizer.zero_grad()
            (sign * loss_of(model, x)).backward()
            optimizer.step()
    assert same(down, up, 1e-12)


def test_a_model_that_shares_weights_with_a_trained_one_is_no_reason_to_refuse() -> None:
    one, x = model_and_batch()
    two = attach(Layered().double())
    two.lift = one.lift
    optimizer = torch.optim.SGD(one.parameters(), lr=0.01)
    loss_of(one, x).backward()
    optimizer.step()
    assert status(one).steps == 1


def test_a_model_that_shares_weights_may_be_attached_during_the_training_of_another() -> None:
    """Its gamma has no owner, but the shared weights belong to the model that is trained."""
    one, x = model_and_batch()
    optimizer = torch.optim.SGD(one.parameters(), lr=0.01)
    two = attach(Layered().double())
    two.lift = one.lift
    loss_of(one, x).backward()
    optimizer.step()
    assert status(one).steps == 1


def test_a_model_attached_between_the_steps_of_its_optimizer_is_an_error() -> None:
    other, x = model_and_batch()
    model = Layered().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loss_of(model, x).backward()
    optimizer.step()
    attach(model)
    loss_of(model, x).backward()
    with pytest.raises(AceError, match="no optimizer owns its gamma"):
        optimizer.step()
    assert status(other).steps == 0


def test_the_batch_of_a_step_that_is_measured_is_copied() -> None:
    model, x = model_and_batch(error_every=2)
    expected = x.clone()
    with torch.no_grad():
        model(x)
    assert model.ace.passes.batch is None, "not a pass of training"
    model(x)
    x.zero_()
    assert torch.equal(model.ace.passes.batch.args[0], expected)
    model, x = model_and_batch(error_every=0)
    model(x)
    assert model.ace.passes.batch is None


def test_a_batch_that_cannot_be_copied_costs_the_measurement_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    error = TypeError("this batch cannot be copied")

    def fail(value: Any) -> Any:
        raise error

    model, x = model_and_batch(error_every=2)
    monkeypatch.setattr("ace_plugins.engine.forward.clone", fail)
    assert model(x).isfinite().all()
    assert model.ace.passes.batch is error


def test_only_models_that_made_a_step_are_finished_at_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    finished: list[Any] = []
    monkeypatch.setattr("ace_plugins.engine.step.notify", lambda name, *, model, **rest: finished.append((name, model)))
    trained, x = model_and_batch()
    idle = copy.deepcopy(trained)
    idle(x)
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.01)
    loss_of(trained, x).backward()
    optimizer.step()
    finished.clear()
    STEPS.finish()
    mine = [(name, model) for name, model in finished if model is trained or model is idle or model is None]
    assert mine == [("ace_finished", trained)]


def test_failing_observers_cost_no_training() -> None:
    from ace_plugins.adapter import hookimpl
    from ace_plugins.plugins.registry import registry

    class Offline:
        @hookimpl
        def ace_attached(self, model: Any) -> None:
            raise ConnectionError("no network")

        @hookimpl
        def ace_stepped(self, model: Any) -> None:
            raise SystemExit(3)

    registry().add(Offline(), "dashboard")
    try:
        with pytest.warns(AceWarning, match="observer 'dashboard' failed in ace_attached: ConnectionError: no network"):
            one, x = model_and_batch()
        two = copy.deepcopy(one)
        optimizer = torch.optim.SGD([*one.parameters(), *two.parameters()], lr=0.01, weight_decay=0.1)
        (loss_of(one, x) + loss_of(two, x)).backward()
        with pytest.warns(AceWarning, match="observer 'dashboard' failed in ace_stepped"):
            optimizer.step()
    finally:
        registry().remove("dashboard")
    assert status(one).steps == status(two).steps == 1
    assert len(optimizer.param_groups) == 1


def test_a_projected_model_trains_as_plain_upstream() -> None:
    model, x = model_and_batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of(model, x).backward()
    optimizer.step()
    ace = project(model) and model.__dict__.get("ace")
    assert ace is None
    optimizer.zero_grad()
    loss_of(model, x).backward()
    optimizer.step()


def test_an_attached_model_is_freed_when_dropped() -> None:
    import weakref

    gc.collect()
    gc.disable()
    try:
        model, x = model_and_batch()
        loss_of(model, x).backward()
        gone = weakref.ref(model), weakref.ref(model.ace)
        del model
        assert [ref() for ref in gone] == [None, None], "no reference cycles, so no wait for the collector"
    finally:
        gc.enable()
