"""Checkpoints with and without ACE."""

from __future__ import annotations

import copy
import json
import warnings
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from toy import Layered, TwoOutputs, VectorMaps

from ace_plugins import AceError, AceWarning, attach, export, status, use_branches
from ace_plugins.engine.state import find


def trained(**config: Any) -> Layered:
    torch.manual_seed(0)
    model = attach(Layered(), **config)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(8, 3)).square().mean().backward()
    optimizer.step()
    return model


def quietly(source: Any, *more: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AceWarning)
        return export(source, *more)


def moved(state: dict[str, Any], *, by: float) -> dict[str, Any]:
    """Weights and gamma shifted by a number; the steps and the manifest as they are."""
    fixed = ("ace.manifest", "ace.duals.")
    return {name: value.clone() if name.startswith(fixed) else value + by for name, value in state.items()}


def assert_same(found: dict[str, Any], expected: dict[str, Any], *, rtol: float = 0.0) -> None:
    assert found.keys() == expected.keys()
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=rtol, atol=rtol, msg=name)


def test_keys_are_a_contract() -> None:
    """What a checkpoint holds does not depend on the mode or the dual optimizer."""
    keys = [k for k in attach(Layered(layers=1)).state_dict() if k.startswith("ace.") and "branches" not in k]
    assert keys == [
        "ace.gamma", "ace.manifest", "ace.duals.lambda_", "ace.duals.u", "ace.duals.steps", "ace.duals.mean",
        "ace.duals.square", "ace.duals.run_square", "ace.duals.waited", "ace.duals.site_landed",
        *(f"ace.duals.evidence.{name}" for name in (
            "cycle_sum", "cycle_steps", "size", "total", "square", "probes", "benefit", "joint",
            "joint_square", "joint_loss", "joint_probes", "kept",
            "settled", "probing", "batch_draw",
        )),
    ]  # fmt: skip
    for config in ({"mode": "resilient"}, {"dual_optimizer": "adam"}):
        assert attach(Layered(), **config).state_dict().keys() == attach(Layered()).state_dict().keys()
    auto, resilient = (attach(Layered(), loop="paced", mode=mode).state_dict() for mode in ("auto", "resilient"))
    assert auto.keys() == resilient.keys()


def test_plain_checkpoint_into_an_attached_model_with_a_notice() -> None:
    plain, model = Layered(), trained()
    before = copy.deepcopy(model.ace.state_dict())
    with pytest.warns(AceWarning, match="checkpoint without ACE loaded into Layered: .* unchanged"):
        assert not any(model.load_state_dict(plain.state_dict()))
    assert all(torch.equal(before[name], value) for name, value in model.ace.state_dict().items())
    x = torch.randn(4, 3)
    assert torch.equal(model.eval()(x), plain(x))


@pytest.mark.parametrize("wrap", [lambda s: s, lambda s: {"epoch": 3, "model": s, "best": {"state_dict": s}}])
def test_export_of_dicts_and_files(wrap: Any, tmp_path: Path) -> None:
    model = trained()
    content = wrap(model.state_dict())
    torch.save(content, tmp_path / "in.pt")
    found = [quietly(content), quietly(tmp_path / "in.pt", tmp_path / "out.pt"), torch.load(tmp_path / "out.pt")]
    for cleaned in found:
        state = cleaned.get("model", cleaned)
        plain = Layered()
        plain.load_state_dict(state, strict=True)
        assert not any("ace" in key for key in state)
    assert content.keys() == wrap(model.state_dict()).keys(), "the original is untouched"
    assert sorted(p.name for p in tmp_path.glob("*.pt*")) == ["in.pt", "out.pt"]


def test_export_of_a_wrapped_model() -> None:
    model = trained()
    plain = nn.DataParallel(Layered())
    plain.load_state_dict(quietly(nn.DataParallel(model).state_dict()), strict=True)
    assert_same(plain.module.state_dict(), {k: v for k, v in model.state_dict().items() if not k.startswith("ace.")})


def test_wrapped_attached_model_loads_with_and_without_ace() -> None:
    state = moved(trained().state_dict(), by=1.0)
    inner = trained()
    wrapped = nn.Sequential(inner, nn.Identity())
    wrapped.load_state_dict({f"0.{k}": v for k, v in state.items()})
    assert_same(inner.state_dict(), state)
    plain = Layered().state_dict()
    with pytest.warns(AceWarning, match="checkpoint without ACE"):
        wrapped.load_state_dict({f"0.{k}": v for k, v in plain.items()})
    assert_same(inner.state_dict(), {**state, **plain})


def test_export_lists_what_it_leaves_out() -> None:
    with pytest.warns(AceWarning, match=r"export removes branches with \|gamma\| up to 1"):
        export(trained().state_dict())
    model = trained()
    with torch.no_grad():
        model.ace.gamma.zero_()
    export(model.state_dict())


def refused(match: str, call: Any) -> None:
    with pytest.raises(AceError, match=match) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_checkpoints_of_other_architectures_change_nothing() -> None:
    model = trained()
    before = copy.deepcopy(model.state_dict())
    others = {
        "checkpoint of another architecture: 0 of its 2 weights fit .* Layered": VectorMaps(),
        "checkpoint of another architecture: 0 of its .* weights fit": attach(TwoOutputs()),
        "checkpoint of another architecture: 1 of its 10 .* Layered.*nothing was loaded": Layered(width=16),
        r"sites .*layers.3\) are not the model's \(layered: layers.0, layers.1, layers.2\)": attach(Layered(layers=4)),
        r"the checkpoint's sites \(layered: layers.0, layers.1\)": attach(Layered(layers=2)),
        "branches are not the model's: .*attach with the settings of the run": attach(Layered(), spectral_norm=True),
    }
    for match, other in others.items():
        refused(match, lambda other=other: model.load_state_dict(other.state_dict()))
        assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_a_checkpoint_is_foreign_if_less_than_half_of_it_fits() -> None:
    model = trained()
    weight, bias = torch.randn_like(model.head.weight), torch.randn_like(model.head.bias)
    foreign = {"a": torch.zeros(1), "b": torch.zeros(1)}
    before = model.head.weight.detach().clone()
    refused("1 of its 3 weights fit", lambda: model.load_state_dict({"head.weight": weight, **foreign}, strict=False))
    assert torch.equal(model.head.weight, before), "nothing was loaded"
    with pytest.warns(AceWarning, match="checkpoint without ACE"):
        model.load_state_dict({"head.weight": weight, "head.bias": bias, **foreign}, strict=False)
    assert torch.equal(model.head.weight, weight)
    assert torch.equal(model.head.bias, bias)


def test_parts_of_checkpoints_load_when_not_strict() -> None:
    model = trained()
    weight = torch.randn_like(model.head.weight)
    with pytest.warns(AceWarning, match="checkpoint without ACE"):
        model.load_state_dict({"head.weight": weight}, strict=False)
    assert torch.equal(model.head.weight, weight)
    model.load_state_dict({"ace.gamma": torch.zeros(3)}, strict=False)
    assert model.ace.gamma.tolist() == [0, 0, 0]


def test_resilient_warns_that_eval_is_another_function() -> None:
    with pytest.warns(AceWarning, match=r"model.eval\(\) differs"):
        trained(mode="resilient").load_state_dict(Layered().state_dict())


def test_averaged_checkpoints_load() -> None:
    states = [moved(trained().state_dict(), by=float(number)) for number in range(3)]
    model = trained()
    model.load_state_dict({k: sum(state[k] for state in states) / 3 for k in states[0]})
    mean = states[1]  # by 1.0, in the middle
    assert_same(model.state_dict(), mean, rtol=1e-6)
    ema = copy.deepcopy(states[0])
    for name, value in states[2].items():
        ema[name].mul_(0.75).add_(value, alpha=0.25)
    model.load_state_dict(ema)
    assert_same(model.state_dict(), moved(states[0], by=0.5), rtol=1e-6)


def test_loading_on_the_meta_device() -> None:
    state = trained().state_dict()
    with torch.device("meta"):
        model = Layered()
    attach(model)
    model.load_state_dict(state, assign=True)
    assert torch.equal(model.ace.gamma, state["ace.gamma"])


def test_export_keeps_the_kind_of_container_and_finds_lists() -> None:
    from collections import defaultdict

    state = trained().state_dict()
    assert quietly(state)._metadata.items() >= Layered().state_dict()._metadata.items()
    kept = quietly(defaultdict(list, {"models": [state, {"x": 1}]}))
    assert isinstance(kept, defaultdict)
    Layered().load_state_dict(kept["models"][0])


def test_export_reports_optimizers_and_nan() -> None:
    model = trained(trace=False)
    optimizer = torch.optim.Adam(model.parameters())
    with torch.no_grad():
        model.ace.gamma.fill_(float("nan"))
    with pytest.warns(AceWarning) as caught:
        export({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    told = " ".join(str(warning.message) for warning in caught)
    assert "|gamma| up to nan" in told
    assert "optimizer state" in told


def test_export_of_models_that_were_saved_whole(tmp_path: Path) -> None:
    """In containers, inside another model, and in what another module was built with, as Lightning's keep it."""
    model = trained(mode="resilient", spectral_norm=True).eval()
    x = torch.randn(4, 3)
    with use_branches(model, False):
        expected = model(x)
    assert find(torch.jit.script(nn.Linear(1, 1))) is None, "a scripted part is no obstacle"
    task = nn.Sequential(model)
    task.hparams = {"model": model, "lr": 0.1, "initial": copy.deepcopy(model)}  # type: ignore[assignment]
    torch.save({"model": model, "more": [task]}, tmp_path / "whole.pt")
    with pytest.warns(AceWarning, match="export removes branches"):
        plain = export(tmp_path / "whole.pt", tmp_path / "plain.pt", trust=True)
    assert torch.equal(plain["model"](x), expected)
    assert find(model) is not None, "the model that was saved is left alone"
    assert b"ace_plugins" not in (tmp_path / "plain.pt").read_bytes()
    again = torch.load(tmp_path / "plain.pt", weights_only=False)
    assert torch.equal(again["more"][0][0](x), expected)


KINDS: dict[str, Any] = {
    "quantized": lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
    "sparse": Tensor.to_sparse,
    "complex": lambda x: x + 0j,
    "without values": lambda x: x.to("meta"),
    "text": str,
}


def about(**fields: Any) -> Tensor:
    return torch.tensor(list(json.dumps(fields).encode()), dtype=torch.float32)


@pytest.mark.filterwarnings("ignore:.*quantize")
@pytest.mark.parametrize("kind", KINDS)
def test_entries_of_other_kinds_are_refused(kind: str) -> None:
    model = trained()
    state = model.state_dict()
    before = copy.deepcopy(state)
    for name in ("ace.gamma", "ace.duals.lambda_", "ace.branches.layers_0.0.weight"):
        refused(
            f"damaged or of another shape: {name};",
            lambda name=name: model.load_state_dict({**state, name: KINDS[kind](state[name])}),
        )
    manifests = [KINDS[kind](state["ace.manifest"]), about(adapter="layered"), about(adapter="layered", sites=5)]
    for manifest in manifests:
        refused(
            "an unreadable manifest",
            lambda manifest=manifest: model.load_state_dict({**state, "ace.manifest": manifest}),
        )
    assert_same(model.state_dict(), before)


@pytest.mark.parametrize("steps", [-5.0, 1e30, float("nan")])
def test_a_number_of_steps_that_is_none_counts_as_unknown(steps: float) -> None:
    model = trained()
    model.load_state_dict({**model.state_dict(), "ace.duals.steps": torch.tensor(steps)})
    assert status(model).steps == 2**16


def test_export_over_itself_and_its_permissions(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    torch.save(trained(trace=False).state_dict(), path)
    refused("is the checkpoint itself: ACE's part would be lost", lambda: quietly(path, tmp_path / "." / "model.pt"))
    quietly(path, tmp_path / "plain.pt")
    assert (tmp_path / "plain.pt").stat().st_mode == path.stat().st_mode
    assert sorted(p.name for p in tmp_path.glob("*")) == ["model.pt", "plain.pt"]


def test_export_refusals(tmp_path: Path) -> None:
    refused("the state_dict holds no ACE: expected keys such as 'ace.manifest'", lambda: export(Layered().state_dict()))
    refused("cannot export Layered itself: expected its state_dict", lambda: export(trained()))
    refused("no checkpoint at .*none.pt", lambda: export(tmp_path / "none.pt"))
    (tmp_path / "text.pt").write_text("not a checkpoint")
    refused("cannot read .*text.pt as a checkpoint", lambda: export(tmp_path / "text.pt"))
    state = trained().state_dict()
    for place in (tmp_path / "no" / "x.pt", tmp_path, ""):
        refused(
            "cannot write .*: expected a file name in a folder that exists", lambda place=place: quietly(state, place)
        )
    torch.save(trained(), tmp_path / "whole.pt")
    refused("cannot read .*whole.pt as a checkpoint.*add --trust", lambda: export(tmp_path / "whole.pt"))
    refused("cannot read .*text.pt as a checkpoint: ", lambda: export(tmp_path / "text.pt", trust=True))


def test_upstreams_own_errors_stay_upstreams() -> None:
    model = trained()
    state = model.state_dict()
    del state["head.bias"]
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict(state)
    assert model.load_state_dict(state, strict=False).missing_keys == ["head.bias"]


def test_resume_across_modes() -> None:
    """A strict run may go on as a resilient one."""
    model = trained(dual_lr=0.5)
    resumed = attach(Layered(), mode="resilient", dual_lr=0.5)
    resumed.load_state_dict(model.state_dict())
    assert status(resumed).steps == 1
    assert status(resumed).sites[0].lambda_ == pytest.approx(0.5)


@pytest.mark.parametrize("core", ["core", "_core"])
def test_numbers_of_numpy_beside_the_weights(tmp_path: Path, core: str) -> None:
    """As numpy 1 and numpy 2 name them; scripts save their accuracies so."""
    numpy = pytest.importorskip("numpy")
    torch.save({"model": trained().state_dict(), "accuracy": numpy.float64(0.5)}, tmp_path / "saved.pt")
    content = tmp_path / "content"
    with zipfile.ZipFile(tmp_path / "saved.pt") as saved, zipfile.ZipFile(content, "w") as changed:
        for name in saved.namelist():
            data = saved.read(name)
            if name.endswith("data.pkl"):
                data = data.replace(b"numpy._core.multiarray", b"numpy." + core.encode() + b".multiarray")
            changed.writestr(name, data)
    with pytest.warns(AceWarning, match="export removes branches"):
        assert export(content)["accuracy"] == 0.5


def test_export_passes_by_numbers_and_other_lists() -> None:
    state = trained(trace=False).state_dict()
    empty = torch.zeros(0)
    found = quietly({"model": {**state, 0: empty}, "other": [empty, empty], "betas": (0.9, 0.999)})
    assert (set(found["model"]), len(found["other"])) == ({*Layered().state_dict(), 0}, 2)
    assert found["betas"] == (0.9, 0.999)
