"""Random frames: f_eq does not notice, branches do, and the script's random numbers stay its own."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from toy import ADAPTERS, Layered, TwoOutputs, VectorMaps

from ace_plugins import AceWarning, attach, averaged, equivariance_error
from ace_plugins.adapter import AdapterError, ConfigError, Rigid, Subgroup, hookimpl
from ace_plugins.plugins.registry import registry

ON: dict[str, Any] = {
    "preset": "fit",
    "loop": "paced",
    "mode": "strict",
    "trace": False,
    "frames": "on",
    "budget": 400,
}


@pytest.mark.parametrize("kind", [TwoOutputs, VectorMaps])
def test_f_eq_is_exact_to_rounding(kind: Any) -> None:
    torch.manual_seed(0)
    plain = kind().double()
    model = attach(copy.deepcopy(plain), **ON)
    with torch.no_grad():
        model.ace.gamma.zero_()
    shape = (6, 3, 4) if kind is VectorMaps else (6, 3)
    call = [torch.randn(shape).double()] + ([torch.randn(6, 1).double()] if kind is TwoOutputs else [])
    found, expected = model(*call), plain(*call)
    for one, two in zip(*([o] if isinstance(o, torch.Tensor) else o for o in (found, expected)), strict=True):
        assert torch.allclose(one, two, rtol=1e-12, atol=1e-12)


def test_branches_see_another_frame_in_every_forward_and_the_scripts_stream_is_left_alone() -> None:
    torch.manual_seed(0)
    model = attach(VectorMaps(), **ON)
    x = torch.randn(6, 3, 4)
    before = torch.random.get_rng_state()
    first, second = model(x), model(x.clone())
    assert torch.equal(torch.random.get_rng_state(), before)
    assert not torch.allclose(first, second)
    with torch.no_grad():
        assert torch.equal(model(x), model(x)), "only forwards of training"
    assert torch.equal(model.eval()(x), model(x))


def test_hooks_of_the_script_see_outputs_in_its_own_frame() -> None:
    torch.manual_seed(0)
    plain = VectorMaps().double()
    model = copy.deepcopy(plain)
    seen: list[torch.Tensor] = []
    model.register_forward_hook(lambda module, args, output: seen.append(output))
    attach(model, **ON)
    model.register_forward_hook(lambda module, args, output: seen.append(output))
    with torch.no_grad():
        model.ace.gamma.zero_()
    x = torch.randn(6, 3, 4).double()
    model(x)
    model.eval()
    model.train()
    model(x)
    assert len(seen) == 4
    assert all(torch.allclose(output, plain(x), rtol=1e-12, atol=1e-12) for output in seen)


def test_the_same_run_has_the_same_frames() -> None:
    outputs = []
    for _ in range(2):
        torch.manual_seed(5)
        model = attach(VectorMaps(), **ON)
        outputs.append(model(torch.ones(2, 3, 4)))
    assert torch.equal(*outputs)


def test_training_under_frames_makes_the_branches_equivariant_on_average() -> None:
    torch.manual_seed(0)
    start = VectorMaps()
    errors = []
    for frames in ("off", "on"):
        torch.manual_seed(1)
        model = attach(copy.deepcopy(start), **{**ON, "frames": frames, "mode": "bounded", "epsilon": 1.0})
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        x = torch.randn(8, 3, 4)  # few: orientations can be memorised
        y = start(x).detach() * 2
        for _ in range(300):
            optimizer.zero_grad()
            (model(x) - y).square().mean().backward()
            optimizer.step()
        errors.append(equivariance_error(model, (torch.randn(64, 3, 4),), branches_on=True).relative)
    assert errors[1] < 0.8 * errors[0]


def test_frames_about_an_axis_turn_batches_about_it_only() -> None:
    torch.manual_seed(0)
    axis = torch.tensor([0.0, 0.6, 0.8])
    model = attach(VectorMaps(), **{**ON, "frames": "0, 0.6, 0.8", "mode": "resilient"}).double()
    seen: list[torch.Tensor] = []
    model.map_to_feat.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    x = torch.randn(6, 3, 4).double()
    model(x)
    along = torch.einsum("i,nic->nc", axis.double(), x)
    assert torch.allclose(torch.einsum("i,nic->nc", axis.double(), seen[0]), along)
    assert not torch.allclose(seen[0], x)
    for wrong in ("up", "0, 0, 0", "1, 2", "nan, 0, 1"):
        with pytest.raises(ConfigError, match=r"frames .*x, y, z or three numbers"):
            attach(VectorMaps(), **{**ON, "frames": wrong})
    with pytest.raises(ConfigError, match="frames 'z': adapter 'free'"):
        attach(ADAPTERS["free"]().model(torch.zeros(2), 2), **{**ON, "frames": "z"})


def test_an_average_over_a_subgroup_is_equivariant_under_it() -> None:
    torch.manual_seed(0)
    model = attach(VectorMaps(), **{**ON, "mode": "resilient", "spectral_norm": True}).double().eval()
    half_turns = Subgroup("half turns about z", [Rigid(torch.diag(d), torch.zeros(3).double()) for d in HALF])
    mean, x = averaged(model, samples=64, group=half_turns), torch.randn(8, 3, 4).double()
    turn = torch.diag(HALF[1])

    @torch.no_grad()
    def off(of: Any) -> float:
        return float((of(turn @ x) - turn @ of(x)).norm())

    assert off(mean) < 0.3 * off(model)


HALF = [torch.tensor([1.0, 1.0, 1.0]).double(), torch.tensor([-1.0, -1.0, 1.0]).double()]


def test_averaged_comes_closer_to_equivariant() -> None:
    torch.manual_seed(0)
    model = attach(VectorMaps(), **{**ON, "mode": "resilient", "spectral_norm": True}).eval()
    x = torch.randn(8, 3, 4)
    mean = averaged(model, samples=64)
    action = model.ace.action
    turn = action.group.sample(torch.Generator().manual_seed(1))
    turned, _ = action.act_on_inputs(turn, ["x"], (x,), {})

    @torch.no_grad()
    def off(of: Any) -> float:
        return float((of(*turned) - action.act_on_outputs(turn, of(x))).norm())

    assert off(mean) < 0.4 * off(model)
    with pytest.raises(ConfigError, match="samples: expected at least 1, found 0"):
        averaged(model, samples=0)


def test_modes_that_deploy_branches_have_frames_only_when_asked_and_adapters_without_an_action_none() -> None:
    for mode in ("resilient", "auto"):
        deploying = {**ON, "mode": mode, "spectral_norm": True}
        assert attach(Layered(), **{**deploying, "frames": "auto"}).ace.action is None
        assert attach(Layered(), **deploying).ace.action is not None
    assert attach(Layered(), **{**ON, "frames": "auto"}).ace.action is not None

    free = ADAPTERS["free"]()
    assert not hasattr(free, "ace_group_action")
    model = free.model(torch.zeros(2), 2)
    assert registry().adapter("free").has("ace_group_action") is False
    with pytest.raises(ConfigError, match="frames 'on': adapter 'free' .*ace_group_action"):
        attach(model, **ON)
    assert attach(model, **{**ON, "frames": "auto"}).ace.action is None


def test_an_adapter_without_the_action_of_a_model_costs_its_frames_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def ask(error: Exception, **settings: Any) -> Any:
        def fails() -> Any:
            raise error

        monkeypatch.setattr(adapter, "ace_group_action", hookimpl(fails))
        registry().remove("layered")
        registry().add(adapter, "layered")
        return attach(Layered(), **{**ON, **settings})

    adapter = ADAPTERS["layered"]()
    cannot = AdapterError("Layered: not told; say it")
    with pytest.warns(AceWarning, match="training without random frames: Layered: not told; say it"):
        assert ask(cannot, frames="auto").ace.action is None
    with pytest.raises(AdapterError, match="not told"):
        ask(cannot)
    with pytest.raises(AdapterError, match="ace_group_action failed: KeyError"):
        ask(KeyError("broken"), frames="auto")
