"""Steps that go wrong: a loss or a gradient that is not finite."""

from __future__ import annotations

import copy
import sys
import threading
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from toy import Layered

from ace_plugins import AceError, AceWarning, Config, attach, project, status
from ace_plugins.engine.duals import Duals
from ace_plugins.engine.evidence import FIRST

PAPER: dict[str, Any] = {"dual_lr": 0.01, "trace": False}
FIT: dict[str, Any] = {
    "preset": "fit",
    "loop": "paced",
    "mode": "strict",
    "budget": 200,
    "trace": False,
    "frames": "off",
}
AUTO = {**FIT, "mode": "auto"}
LOOPS = [
    {**PAPER, "mode": "strict"},
    {**PAPER, "mode": "strict", "dual_optimizer": "adam", "gamma_lr": 3.0},
    {**PAPER, "mode": "bounded", "dual_optimizer": "adam", "augmented": 1.0},
    {**PAPER, "mode": "resilient"},
    FIT,
    {**FIT, "mode": "bounded"},
    {**FIT, "mode": "resilient"},
    AUTO,
]


def model_of_gamma(**config: Any) -> Any:
    """Only gamma is trained, so that what a bad step leaves behind is ACE's own."""
    model = attach(Layered().double(), **config)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name == "ace.gamma")
    return model


def values(model: Any) -> torch.Tensor:
    duals = model.ace.duals
    state = [model.ace.gamma, duals.lambda_, duals.u, duals.mean, duals.square, duals.run_square, duals.waited]
    return torch.stack([tensor.detach() for tensor in [*state, *duals.evidence.sums()]])


def steps(model: Any, optimizer: Any, count: int) -> None:
    for _ in range(count):
        step(model, optimizer)


def step(model: Any, optimizer: Any, bad: float | None = None) -> None:
    x = torch.randn(12, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    optimizer.zero_grad()
    loss = (model(x) - 1).square().mean()
    (loss if bad is None else loss * bad).backward()
    optimizer.step()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1e200])
@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adam])
@pytest.mark.parametrize("config", LOOPS)
def test_a_step_that_is_not_finite_moves_nothing(config: Any, make: Any, bad: float) -> None:
    model = model_of_gamma(**config)
    optimizer = make(model.parameters(), lr=0.01)
    steps(model, optimizer, 4)
    before = values(model).clone()
    step(model, optimizer, bad)
    assert torch.equal(values(model), before)
    with pytest.warns(AceWarning, match=r"gradient at gamma was not finite in 1 of 10 steps") as told:
        steps(model, optimizer, 25)
    assert len(told) == 1, "told once"
    assert torch.isfinite(values(model)).all()
    assert not torch.equal(values(model)[0], before[0])
    assert {site.verdict for site in status(model).sites} != {"diverged"}


@pytest.mark.parametrize("bad", [1e200, -1e200, float("nan")])
def test_a_step_that_is_not_finite_is_no_evidence(bad: float) -> None:
    """A large value in this probe would be enough to keep the first site."""
    model = model_of_gamma(**AUTO)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    steps(model, optimizer, 3)
    evidence = model.ace.duals.evidence
    for name, value in {"probes": FIRST, "size": 1.0, "square": 400.0}.items():
        getattr(evidence, name).fill_(value)
    evidence.total[0] = 87.0
    assert evidence.probing.all()
    step(model, optimizer, bad)
    assert not evidence.kept.any()
    evidence.total[0] = 91.0
    steps(model, optimizer, 2)
    assert evidence.kept.tolist() == [1.0, 0.0, 0.0]


def test_a_run_has_diverged_after_three_bad_steps_in_a_row() -> None:
    duals = Duals(2, Config(loop="paced"), dtype=torch.float64, device=torch.device("cpu"))
    duals.steps.fill_(100)
    duals.read_buffers()
    found = []
    for bad in (True, True, False, True, True, True, False):
        duals.count_skipped(torch.tensor(bad))
        found.append(duals.diverged)
    assert found == [False, False, False, False, False, True, False]


def test_afterwards_the_run_is_the_one_without_that_step() -> None:
    model = model_of_gamma(**PAPER, mode="resilient", dual_optimizer="sgd")
    twin = copy.deepcopy(model)
    one, two = (torch.optim.SGD(m.parameters(), lr=0.01) for m in (model, twin))
    for number in range(8):
        if number == 4:
            step(model, one, float("nan"))
        step(model, one)
        step(twin, two)
    assert torch.equal(values(model), values(twin))


@pytest.mark.parametrize("config", [FIT, AUTO])
def test_a_run_that_stays_so_is_called_diverged(config: Any) -> None:
    model = attach(Layered(), **config)
    model = model.double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    steps(model, optimizer, 15)
    step(model, optimizer, float("nan"))
    with pytest.warns(AceWarning, match="lower the learning rate"):
        steps(model, optimizer, 15)
    assert torch.isfinite(model.ace.gamma).all()
    assert {site.verdict for site in status(model).sites} == {"diverged"}


@pytest.mark.parametrize("config", [FIT, AUTO])
def test_good_steps_print_nothing(config: Any) -> None:
    model = model_of_gamma(**config)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        steps(model, optimizer, 30)


class Rateless(torch.optim.Optimizer):
    """As A2Grad: a step size of its own, and no learning rate in its groups."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                parameter.sub_(0.01 * parameter.grad)


def test_an_optimizer_without_a_learning_rate() -> None:
    model = attach(Layered().double(), **FIT)
    optimizer = Rateless(model.parameters())
    steps(model, optimizer, 200)
    assert status(model).landed
    printed = attach(Layered().double(), **PAPER)
    with pytest.raises(AceError, match="Rateless has no .lr.*preset 'fit'"):
        step(printed, Rateless(printed.parameters()))


class Masking(torch.optim.Optimizer):
    """As Magma: a wrapper that leaves out Optimizer.__init__ and steps the optimizer inside."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        self.defaults = inner.defaults

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.inner.param_groups

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> None:
        self.inner.step()


@pytest.mark.parametrize("config", [PAPER, FIT, AUTO])
def test_a_wrapper_that_is_no_whole_optimizer(config: Any) -> None:
    model = attach(Layered().double(), **config)
    twin = copy.deepcopy(model)
    steps(model, Masking(torch.optim.Adam(model.parameters(), lr=0.01)), 30)
    steps(twin, torch.optim.Adam(twin.parameters(), lr=0.01), 30)
    assert torch.equal(values(model), values(twin))


def test_many_models_alive() -> None:
    """A step looks at the models that its optimizer has parameters of, not at all there are."""
    models = [attach(Layered(layers=1), **FIT) for _ in range(30)]
    looked: list[Any] = []

    def count(module: Any, *args: Any, **options: Any) -> Any:
        looked.append(module)
        return torch.nn.Module.parameters(module, *args, **options)

    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in models]
    x = torch.randn(4, 3)
    for model in models:
        model.parameters = lambda *a, model=model, **k: count(model, *a, **k)  # type: ignore[method-assign]
    for model, optimizer in zip(models, optimizers, strict=True):
        model(x).mean().backward()
        optimizer.step()
    assert len(looked) <= 4 * len(models)


def test_threads_train_a_model_each() -> None:
    failed: list[Exception] = []

    def work(seed: int) -> None:
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(seed))
        try:
            for _ in range(15):
                model = attach(Layered(), loop="paced", mode="strict", frames="off", trace=False, budget=100)
                optimizer = torch.optim.SGD(list(model.layers.parameters()), lr=1e-3)
                for _ in range(3):
                    loss = model(x).square().sum() + seed * 1e6
                    loss.backward()
                    optimizer.step()
                    assert float(model.ace.session.observed.loss) // 1e6 == seed, "the loss of this thread"
                project(model)
        except Exception as error:
            failed.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
    finally:
        sys.setswitchinterval(interval)
    assert not failed


@pytest.mark.parametrize("mode", ["strict", "auto"])
def test_function_transforms_are_refused_in_training(mode: str) -> None:
    model = attach(Layered(), loop="paced", mode=mode, trace=False, budget=100)
    x, parameters = torch.randn(4, 3), dict(model.named_parameters())

    def loss(weights: dict[str, Tensor]) -> Tensor:
        made: Tensor = torch.func.functional_call(model, weights, (x,)).sum()
        return made

    for transformed in (lambda: torch.func.grad(loss)(parameters), lambda: torch.vmap(model)(x[:, None])):
        with pytest.raises(AceError, match=r"called inside torch.func.*expected loss.backward\(\)"):
            transformed()
    model.eval()
    assert torch.func.grad(loss)(parameters)["head.weight"].any()
    assert torch.allclose(torch.vmap(model)(x[:, None])[:, 0], model(x), atol=1e-6)


class Listing(torch.optim.SGD):
    """Has a value per group, made at construction, as AdaBound of pytorch_optimizer has."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.base_lrs = [group["lr"] for group in self.param_groups]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        assert [self.base_lrs[number] for number, _ in enumerate(self.param_groups)]
        return super().step(closure)


def test_an_optimizer_with_values_per_group() -> None:
    model = attach(Layered().double(), **PAPER)
    optimizer = Listing(model.parameters(), lr=0.01, weight_decay=0.1)
    with pytest.raises(AceError, match=r"Listing has a list .* \(base_lrs\)"):
        steps(model, optimizer, 1)
    assert model.ace.gamma.grad is not None
    for config in ({**PAPER, "gamma_weight_decay": True}, FIT):
        model = attach(Layered().double(), **config)
        steps(model, Listing(model.parameters(), lr=0.01, weight_decay=0.1), 2)
        assert status(model).steps == 2


def test_adabound_itself() -> None:
    optimizers = pytest.importorskip("pytorch_optimizer", reason="needs pytorch_optimizer (tox run -e extras)")
    model = attach(Layered().double(), **PAPER)
    with pytest.raises(AceError, match=r"AdaBound has a list .* \(base_lrs\)"):
        steps(model, optimizers.AdaBound(model.parameters(), lr=0.01, weight_decay=0.1), 1)
    for config in ({**PAPER, "gamma_weight_decay": True}, FIT, AUTO):
        model = attach(Layered().double(), **config)
        steps(model, optimizers.AdaBound(model.parameters(), lr=0.01, weight_decay=0.1), 30)
        assert status(model).steps == 30
