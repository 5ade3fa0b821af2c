"""The loop that fits the run: what it does not depend on, where it ends, and what landing leaves behind."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from toy import Layered, TwoOutputs, VectorMaps

from ace_plugins import Config, attach, status
from ace_plugins.engine.duals import Duals
from ace_plugins.engine.paced_loop import SPEED, advance, land

FIT: dict[str, Any] = {"preset": "fit", "loop": "paced", "mode": "strict", "trace": False, "frames": "off"}
BUDGET = 400
in_both_modes = pytest.mark.parametrize("mode", ["strict", "auto"])


def simulated(config: Config, slope: float, curvature: float, noise: float, *, steps: int, scale: float = 1.0) -> Any:
    """One gamma on the loss scale * (slope * gamma + curvature / 2 * gamma^2 + noise): its path, and the duals."""
    generator = torch.Generator().manual_seed(0)
    duals = Duals(1, config, dtype=torch.float64, device=torch.device("cpu"))
    gamma, path = torch.full((1,), config.gamma_start, dtype=torch.float64), []
    horizon = config.share * steps
    for _ in range(steps):
        bump = noise * torch.randn(1, generator=generator, dtype=torch.float64)
        gamma = advance(duals, gamma, scale * (slope + curvature * gamma + bump), horizon)
        path.append(float(gamma))
        land(duals, horizon)
        if duals.landed:
            break
    return path, duals


STRICT = Config(loop="paced", mode="strict")


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.floats(-3, 3), st.floats(0, 3), st.floats(0.01, 3), st.integers(-3, 6))
def test_strict_gammas_land_in_time_without_overshoot_whatever_the_loss(
    slope: float, curvature: float, noise: float, power: int
) -> None:
    steps = 2000
    path, duals = simulated(STRICT, slope, curvature, noise, steps=steps)
    assert duals.landed
    assert min(path) == 0, "never beyond it"
    assert 0.75 <= path.index(0.0) / (STRICT.share * steps) <= 1.25
    scaled, _ = simulated(STRICT, slope, curvature, noise, steps=steps, scale=10.0**power)
    assert scaled == pytest.approx(path, abs=1e-6), "the scale of the loss drops out"


def test_half_the_budget_lands_at_half_the_steps() -> None:
    long, short = (simulated(STRICT, -0.5, 0.0, 1.0, steps=steps)[0].index(0.0) for steps in (4000, 2000))
    assert short == pytest.approx(long / 2, rel=0.1)


def test_useful_branches_land_last_and_harmful_ones_first() -> None:
    at = [simulated(STRICT, slope, 0.0, 0.5, steps=2000)[0].index(0.0) for slope in (2.0, 0.0, -2.0)]
    assert at[0] < at[1] < at[2]


def test_the_saddle_point_of_a_strict_problem() -> None:
    """At gamma = 0 the loss pulls with its slope, and lambda is what holds against it."""
    path, duals = simulated(STRICT, -0.7, 1.3, 0.0, steps=2000)
    assert path[-1] == 0
    assert float(duals.lambda_) == pytest.approx(0.7, rel=1e-6)


def test_what_a_landed_site_was_held_with_stays() -> None:
    """It has no gradient any more, while the others go on."""
    duals = Duals(2, STRICT, dtype=torch.float64, device=torch.device("cpu"))
    gamma, slopes = torch.full((2,), 0.1, dtype=torch.float64), torch.tensor([0.9, -0.9], dtype=torch.float64)
    landings = []
    for _ in range(300):
        slopes[[*duals.landed_sites]] = 0.0
        gamma = advance(duals, gamma, slopes, 100.0)
        if land(duals, 100.0):
            landings.append(set(duals.landed_sites))
    assert landings == [{0}, {0, 1}]
    assert duals.lambda_.tolist() == pytest.approx([-0.9, 0.9])


@pytest.mark.parametrize(("slope", "curvature", "rho"), [(-1.0, 1.0, 1.0), (-2.0, 3.0, 0.5), (1.0, 1.0, 2.0)])
def test_the_saddle_point_of_a_resilient_problem(slope: float, curvature: float, rho: float) -> None:
    """min over gamma of slope gamma + curvature / 2 gamma^2 + rho / 2 gamma^2, since |gamma| = u there."""
    config = Config(loop="paced", mode="resilient", rho=rho, horizon=0.1)
    path, duals = simulated(config, slope, curvature, 0.0, steps=20_000)
    expected = -slope / (curvature + rho)
    assert path[-1] == pytest.approx(expected, rel=0.01)
    assert float(duals.u) == pytest.approx(abs(expected), rel=0.01)
    assert float(duals.u) == pytest.approx(float(duals.lambda_) / rho, rel=0.01)


def test_bounded_gammas_end_at_the_bound_or_below() -> None:
    config = Config(loop="paced", mode="bounded", epsilon=0.2)
    wanted, _ = simulated(config, -1.0, 0.0, 0.3, steps=4000)
    unwanted, _ = simulated(config, 0.5, 1.0, 0.3, steps=4000)
    assert wanted[-1] == pytest.approx(0.2, abs=0.03)
    assert abs(unwanted[-1]) < 0.23


def test_a_branch_that_no_gradient_reaches_goes() -> None:
    for mode in ("strict", "resilient", "bounded"):
        path, _ = simulated(Config(loop="paced", mode=mode), 0.0, 0.0, 0.0, steps=2000)
        assert path[-1] == 0, mode


# On a model, with the script's optimizer.


def batches(seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(64, 3, generator=generator, dtype=torch.float64)
    return x, x.square().sum(-1, keepdim=True).sin() + 0.3 * x[:, :1]


def trained(
    optimizer: Any = torch.optim.Adam, lr: float = 3e-3, scale: float = 1.0, schedule: Any = None, **config: Any
) -> tuple[nn.Module, int]:
    """The model after a run, and the step at which its last site landed."""
    torch.manual_seed(0)
    model = attach(Layered().double(), **{**FIT, "budget": BUDGET, **config})
    made = optimizer(model.parameters(), lr=lr)
    scheduler = schedule(made) if schedule else None
    x, y = batches()
    generator = torch.Generator().manual_seed(1)
    for _ in range(BUDGET):
        chosen = torch.randint(64, (16,), generator=generator)
        made.zero_grad()
        (scale * (model(x[chosen]) - y[chosen]).square().mean()).backward()
        made.step()
        if scheduler:
            scheduler.step()
    return model, status(model).steps


def test_the_loss_times_a_thousand_gives_the_same_gammas() -> None:
    """Adam, for which the weights are the same too."""
    gammas = []
    for scale in (1.0, 1000.0):
        model, _ = trained(scale=scale, mode="resilient", horizon=0.5, spectral_norm=True)
        gammas.append(status(model).sites)
    for one, two in zip(*gammas, strict=True):
        assert one.gamma == pytest.approx(two.gamma, abs=1e-3)
        assert one.u == pytest.approx(two.u, abs=1e-3)


@pytest.mark.parametrize(
    "changed",
    [
        {"lr": 6e-3},
        {"optimizer": torch.optim.SGD, "lr": 1e-2},
        {"schedule": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, BUDGET)},
        {"schedule": lambda o: torch.optim.lr_scheduler.LinearLR(o, 0.01, total_iters=100)},
    ],
    ids=["twice the rate", "SGD", "cosine", "warm-up"],
)
def test_the_landing_does_not_depend_on_the_optimizer(changed: dict[str, Any]) -> None:
    _, usual = trained()
    model, other = trained(**changed)
    assert status(model).landed
    assert other == pytest.approx(usual, rel=0.1)


@in_both_modes
def test_the_optimizer_does_not_move_gamma_and_keeps_its_gradient(mode: str) -> None:
    model = attach(Layered(), **{**FIT, "mode": mode}, budget=BUDGET)
    optimizer = torch.optim.Adam(model.parameters(), lr=1.0, weight_decay=0.5)
    model(torch.randn(4, 3)).square().mean().backward()
    gradient = model.ace.gamma.grad.clone()
    optimizer.step()
    assert torch.equal(model.ace.gamma.grad, gradient)
    unit = 0.1 if mode == "strict" else 1.0
    assert 0 < (model.ace.gamma - 0.1).abs().max() <= unit * SPEED / (0.25 * BUDGET) + 1e-6
    assert model.ace.gamma not in optimizer.state


@in_both_modes
@pytest.mark.parametrize("fused", [False, True])
def test_a_grad_scaler_changes_neither_gamma_nor_the_duals(fused: bool, mode: str) -> None:
    x, y = (tensor.float() for tensor in batches())
    states = []
    for scale in (1.0, 1024.0):
        torch.manual_seed(0)
        model = attach(Layered(), **{**FIT, "mode": mode}, budget=BUDGET)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        for _ in range(5):
            optimizer.zero_grad()
            scaler.scale((model(x) - y).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
        assert status(model).steps == 5
        states.append({"gamma": model.ace.gamma.detach(), **dict(model.ace.duals.named_buffers())})
    one, two = states
    assert one["mean"].any(), "the duals have seen gradients"
    for name in one:
        torch.testing.assert_close(two[name], one[name], rtol=1e-4, atol=1e-8)


@in_both_modes
def test_stopping_and_resuming_changes_nothing(mode: str) -> None:
    x, y = batches()

    def steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> None:
        for _ in range(count):
            optimizer.zero_grad()
            (model(x) - y).square().mean().backward()
            optimizer.step()

    def fresh() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = attach(Layered().double(), **{**FIT, "mode": mode}, budget=200 if mode == "strict" else 120)
        return model, torch.optim.Adam(model.parameters(), lr=1e-2)

    whole, optimizer = fresh()
    steps(whole, optimizer, 40)
    saved = copy.deepcopy((whole.state_dict(), optimizer.state_dict()))
    steps(whole, optimizer, 60)
    again, optimizer = fresh()
    again.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    steps(again, optimizer, 60)
    assert status(again).landed or len(again.ace.duals.evidence.kept_sites | again.ace.duals.landed_sites) == 3
    assert all(torch.equal(v, again.state_dict()[k]) for k, v in whole.state_dict().items())


# Landing.


@in_both_modes
@pytest.mark.parametrize("kind", [Layered, TwoOutputs, VectorMaps])
def test_a_site_that_has_landed_is_gone_and_the_others_go_on(kind: type[nn.Module], mode: str) -> None:
    torch.manual_seed(0)
    plain = kind()
    model = attach(copy.deepcopy(plain), **{**FIT, "mode": mode}, budget=BUDGET)
    ace: Any = model.ace
    arguments = {Layered: (3,), TwoOutputs: (3,), VectorMaps: (3, 4)}[kind]
    call = (torch.randn(5, *arguments), torch.randn(5, 1)) if kind is TwoOutputs else (torch.randn(5, *arguments),)
    with torch.no_grad():
        ace.gamma[0] = 0.0
    with_branches = model(*call)
    ace.duals.site_landed[0] = 1.0
    ace.duals.note_landed()
    found = model(*call)
    for one, two in zip(*([o] if isinstance(o, Tensor) else o for o in (with_branches, found)), strict=True):
        assert torch.allclose(one, two, atol=1e-6)
    assert len(ace.live()) == len(ace.sites) - 1
    hooks = [h for m in model.modules() for h in m._forward_hooks.values() if type(h).__name__ == "SiteHook"]
    assert ace.sites[0].name not in [hook.name for hook in hooks]
    ace.duals.site_landed.fill_(1.0)
    ace.duals.note_landed()
    ace.session.observed.loss = torch.ones(())  # as after a step of a script that calls backward
    with torch.no_grad():
        ace.gamma.zero_()
    expected, output = plain(*call), model(*call)
    first, second = ([o] if isinstance(o, Tensor) else list(o) for o in (expected, output))
    assert all(torch.equal(one, two) for one, two in zip(first, second, strict=True))
    sum(o.square().mean() for o in second).backward()
    assert not any(p.grad.any() for p in ace.parameters())
    assert not any(m._forward_hooks for m in model.modules()), "no hook costs time any more"


@in_both_modes
def test_a_checkpoint_from_before_the_landing_brings_the_branches_back(mode: str) -> None:
    model = attach(Layered(), **{**FIT, "mode": mode}, budget=BUDGET)
    before = copy.deepcopy(model.state_dict())
    model.ace.duals.site_landed.fill_(1.0)
    model.ace.duals.note_landed()
    model(torch.randn(4, 3))
    assert len(model.ace.freed) == len(list(model.ace.parameters()))
    model.load_state_dict(before)
    model(torch.randn(4, 3)).square().mean().backward()
    assert not status(model).landed
    assert model.ace.gamma.grad is not None
    assert all(p.grad is not None for p in model.ace.branches.parameters())


@pytest.mark.filterwarnings("ignore")  # torch's own, of the compiler
@in_both_modes
def test_landing_under_a_compiler(mode: str) -> None:
    torch.manual_seed(0)
    plain = Layered()
    model = attach(copy.deepcopy(plain), **{**FIT, "mode": mode}, budget=BUDGET)
    compiled = torch.compile(model, backend="eager")
    x = torch.randn(4, 3)
    assert not torch.allclose(compiled(x), plain(x))
    with torch.no_grad():
        model.ace.gamma.zero_()
    model.ace.duals.site_landed.fill_(1.0)
    model.ace.duals.note_landed()
    assert torch.allclose(compiled(x), plain(x))
    compiled(x).square().mean().backward()
    assert model.ace.gamma.grad is None
