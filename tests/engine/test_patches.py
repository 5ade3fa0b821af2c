"""Everything patched globally in PyTorch is the original again after the last attached model."""

from __future__ import annotations

import copy
import gc
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim import optimizer as optimizers
from toy import Layered

from ace_plugins import attach, project
from ace_plugins.engine.state import LIVE
from ace_plugins.engine.step import wrap

PLACES: list[tuple[Any, str]] = [
    (Optimizer, "__init__"),
    (Optimizer, "add_param_group"),
    (nn.utils.clip_grad, "clip_grad_norm_"),
    (DistributedDataParallel, "__init__"),
    (nn.SyncBatchNorm, "convert_sync_batchnorm"),
    (torch.autograd, "backward"),
    (torch.amp.GradScaler, "scale"),
]


def snapshot() -> tuple[list[Any], list[Any], list[Any]]:
    """Everything that ACE patches, as it is now; hooks by their order."""
    functions = [vars(owner)[name] for owner, name in PLACES]
    if "torch.distributed.fsdp" in sys.modules:
        functions.append(vars(sys.modules["torch.distributed.fsdp"].FullyShardedDataParallel)["__init__"])
    pre, post = optimizers._global_optimizer_pre_hooks, optimizers._global_optimizer_post_hooks
    return functions, list(pre.values()), list(post.values())


def same(one: Any, other: Any) -> bool:
    return [list(map(id, each)) for each in one] == [list(map(id, each)) for each in other]


@pytest.fixture(autouse=True)
def _no_models() -> Iterator[None]:
    gc.collect()
    assert not list(LIVE.aces), "a test before this one keeps a model alive"
    yield
    gc.collect()


def train(model: Any, steps: int = 2) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
    return optimizer


def test_projecting_the_last_model_restores_everything() -> None:
    before = snapshot()
    one, two = attach(Layered(), trace=False), attach(Layered(), trace=False)
    during = snapshot()
    assert not any(x is y for x, y in zip(before[0], during[0], strict=True)), "all of them are patched"
    assert [len(hooks) for hooks in during[1:]] == [len(hooks) + 1 for hooks in before[1:]]
    optimizer = train(one)
    project(one)
    assert same(snapshot(), during), "the other one is still attached"
    project(two)
    assert same(snapshot(), before)
    optimizer.step()


def test_collecting_the_last_model_restores_everything() -> None:
    before = snapshot()
    model = attach(Layered(), trace=False)
    train(model)
    del model
    gc.collect()
    assert same(snapshot(), before)


def test_a_model_that_only_its_optimizer_outlives() -> None:
    before = snapshot()
    model = attach(Layered(), trace=False)
    optimizer = train(model)
    del model
    gc.collect()
    assert same(snapshot(), before)
    optimizer.step()


def test_a_copy_counts_as_a_model() -> None:
    before = snapshot()
    model = attach(Layered(), trace=False)
    other = copy.deepcopy(model)
    project(model)
    assert not same(snapshot(), before)
    train(other)
    assert other.ace.duals.count == 2
    del other
    gc.collect()
    assert same(snapshot(), before)


def test_attaching_again_works() -> None:
    before = snapshot()
    counts = []
    for _ in range(3):
        model = attach(Layered(), trace=False)
        train(model, 3)
        counts.append(model.ace.duals.count)
        assert model.ace.session.observed.loss is not None
        project(model)
        assert same(snapshot(), before)
    assert counts == [3, 3, 3], "no hook is left that would count twice"


def test_a_wrapper_of_somebody_else_stays_and_ours_passes_through(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = attach(Layered(), trace=False)
    ours, calls = torch.autograd.backward, []

    def theirs(*args: Any, **kwargs: Any) -> None:
        calls.append(args)
        ours(*args, **kwargs)

    monkeypatch.setattr(torch.autograd, "backward", theirs)
    project(model)
    assert torch.autograd.backward is theirs
    train(nn.Linear(3, 1), 1)
    assert len(calls) == 1
    model = attach(Layered(), trace=False)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = model(torch.ones(2, 3)).square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    assert torch.equal(model.ace.session.observed.loss, loss.detach()), "recorded once, by the new wrapper alone"
    project(model)
    assert torch.autograd.backward is theirs


def test_patched_functions_accept_their_arguments_by_name() -> None:
    model = attach(Layered(), trace=False)
    optimizer = torch.optim.SGD(params=model.parameters(), lr=0.1)
    optimizer.add_param_group(param_group={"params": [nn.Parameter(torch.ones(2))]})
    assert len(optimizer.param_groups) == 2
    loss = model(torch.ones(2, 3)).square().mean()
    torch.autograd.backward(tensors=torch.amp.GradScaler("cpu").scale(outputs=loss))
    nn.utils.clip_grad_norm_(parameters=model.parameters(), max_norm=1.0)
    nn.SyncBatchNorm.convert_sync_batchnorm(module=model)
    optimizer.step()
    assert torch.equal(model.ace.session.observed.loss, loss.detach())


def test_a_wrapped_function_is_called_through_ours_until_it_is_undone() -> None:
    class Owner:
        @classmethod
        def double(cls, x: int) -> int:
            return 2 * x

    original = vars(Owner)["double"]
    undo = wrap(Owner, "double", lambda function, cls, x: function(cls, x) + 1)
    wrapped = Owner.double
    assert wrapped(3) == 7
    undo()
    assert wrapped(3) == Owner.double(3) == 6
    assert vars(Owner)["double"] is original


@pytest.mark.parametrize("when", ["pre", "post", "closure"])
def test_a_model_that_goes_during_a_step(when: str) -> None:
    """torch iterates over its hooks then, so they stay until the next backward."""
    before = snapshot()
    models = [attach(Layered(), trace=False)]
    other = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)

    def drop(*args: Any) -> None:
        models.clear()
        gc.collect()

    def closure() -> Any:
        drop()
        return other(torch.ones(2, 3)).sum().backward()

    if when == "closure":
        optimizer.step(closure)
    else:
        register = getattr(optimizers, f"register_optimizer_step_{when}_hook")
        handle = register(drop)
        optimizer.step()
        handle.remove()
        other(torch.ones(2, 3)).sum().backward()
    assert same(snapshot(), before)


def test_projecting_after_a_step_that_raised_gives_the_groups_back() -> None:
    class Failing(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            raise RuntimeError("kernel failed")

    before = snapshot()
    model: Any = attach(Layered(), loop="paper", gamma_lr=2.0, trace=False)
    optimizer = Failing(model.parameters(), lr=0.1)
    groups = [list(group["params"]) for group in optimizer.param_groups]
    model(torch.ones(2, 3)).sum().backward()
    with pytest.raises(RuntimeError, match="kernel failed"):
        optimizer.step()
    assert len(optimizer.param_groups) == 2, "gamma steps in a separate group"
    project(model)
    assert [list(map(id, group["params"])) for group in optimizer.param_groups] == [list(map(id, g)) for g in groups]
    assert same(snapshot(), before)


def test_a_model_can_be_collected_while_attached_models_are_searched() -> None:
    """Garbage collection may run at any time, also while an optimizer looks for its model among the attached ones."""
    models = [attach(Layered()) for _ in range(3)]
    kept = [model.ace for model in models]  # as an optimizer keeps the parameters
    found = iter(LIVE.aces)
    next(found)
    del models[1:]
    gc.collect()
    assert len(list(found)) <= 2
    assert list(LIVE.aces) == kept[:1]
