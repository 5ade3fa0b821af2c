"""Checkpoints with and without ACE."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from toy import Layered, TwoOutputs, VectorMaps

from ace_plugins import AceError, AceWarning, attach, export, project, status


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


def test_keys_are_a_contract() -> None:
    """What a checkpoint holds does not depend on the mode or the dual optimizer."""
    keys = [k for k in attach(Layered(layers=1)).state_dict() if k.startswith("ace.") and "branches" not in k]
    assert keys == [
        "ace.gamma", "ace.manifest", "ace.duals.lambda_", "ace.duals.u", "ace.duals.steps", "ace.duals.mean",
        "ace.duals.square", "ace.duals.error",
    ]  # fmt: skip
    for config in ({"mode": "resilient"}, {"dual_optimizer": "adam"}):
        assert attach(Layered(), **config).state_dict().keys() == attach(Layered()).state_dict().keys()


def test_plain_checkpoint_into_an_attached_model_with_a_notice() -> None:
    plain, model = Layered(), trained()
    before = copy.deepcopy(model.ace.state_dict())
    with pytest.warns(AceWarning, match="checkpoint without ACE loaded into Layered: .* 3 sites keep the values"):
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


def test_wrapped_attached_model_loads_with_and_without_ace() -> None:
    model = trained()
    wrapped = nn.Sequential(trained(), nn.Identity())
    wrapped.load_state_dict({f"0.{k}": v for k, v in model.state_dict().items()})
    with pytest.warns(AceWarning, match="checkpoint without ACE"):
        wrapped.load_state_dict({f"0.{k}": v for k, v in Layered().state_dict().items()})


def test_export_says_what_it_leaves_out() -> None:
    with pytest.warns(AceWarning, match=r"exporting f_eq alone although max \|gamma\| is 1"):
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
        "checkpoint of another architecture: 0 of the 10 weights of Layered": VectorMaps(),
        "checkpoint of another architecture: 0 of the 10 weights": attach(TwoOutputs()),
        "checkpoint of another architecture: 1 of the 10 weights .*nothing was loaded": Layered(width=16),
        "holds ACE of other sites .*layers.3.*expected layered: layers.0, layers.1, layers.2": attach(
            Layered(layers=4)
        ),
        "holds ACE with other branches: .*attach with the settings it was trained": attach(
            Layered(), spectral_norm=True
        ),
    }
    for match, other in others.items():
        refused(match, lambda other=other: model.load_state_dict(other.state_dict()))
        assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_export_refusals(tmp_path: Path) -> None:
    refused("the state_dict holds no ACE: expected keys such as 'ace.manifest'", lambda: export(Layered().state_dict()))
    refused("no checkpoint at .*none.pt", lambda: export(tmp_path / "none.pt"))
    (tmp_path / "text.pt").write_text("not a checkpoint")
    refused("cannot read .*text.pt as a checkpoint", lambda: export(tmp_path / "text.pt"))
    torch.save(trained(), tmp_path / "whole.pt")
    refused("cannot read .*whole.pt as a checkpoint of tensors", lambda: export(tmp_path / "whole.pt"))


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
    project(resumed)
