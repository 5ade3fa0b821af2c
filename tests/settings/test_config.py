from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from ace_plugins import AceError, Config
from ace_plugins.settings.config import build, parse_rate
from ace_plugins.engine.duals import Duals


def test_rates() -> None:
    assert parse_rate(8e-4) == (8e-4, False)
    assert parse_rate("8e-4") == (8e-4, False)
    assert parse_rate("1x") == (1.0, True)
    assert parse_rate(" 0.5X ") == (0.5, True)
    assert Config(dual_lr="0.5x").dual_rate(0.2) == pytest.approx(0.1)
    assert Config(dual_lr=0.3).dual_rate(0.2) == 0.3
    assert torch.equal(Config(dual_lr="2x").dual_rate(torch.tensor(0.25)), torch.tensor(0.5))


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"mode": "hard"}, "unknown mode 'hard'"),
        ({"dual_optimizer": "admm"}, "unknown dual_optimizer 'admm': .*did you mean 'adam'"),
        ({"rho": 0.0}, "rho 0.0: expected a finite number above 0"),
        ({"rho": 10**400}, "rho 1000*: expected a finite number above 0"),
        ({"rho": -0.5}, "rho -0.5: expected a finite number above 0"),
        ({"u_init": -0.1}, "u_init -0.1: expected a finite number of at least 0"),
        ({"error_every": -1}, "error_every -1: expected an integer of at least 0"),
        ({"epsilon": -1}, "epsilon -1: expected a finite number above 0"),
        ({"adam_beta1": 1.0}, "adam_beta1 1.0: expected a finite number of at least 0 and below 1"),
        ({"gamma_init": float("nan")}, "gamma_init nan: expected a finite number"),
        ({"trace_every": 0}, "trace_every 0: expected an integer of at least 1"),
        ({"land_at": -1}, "land_at -1: expected an integer of at least 0"),
        ({"trace": "yes"}, "trace 'yes': expected true or false"),
        ({"mode": "hard", "rho": -1.0}, "unknown mode.*; rho -1.0"),
    ],
)
def test_problems_are_all_named(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(AceError, match=problem) as caught:
        Config(**settings)
    assert isinstance(caught.value, ValueError)
    assert "\n" not in str(caught.value)


def test_presets() -> None:
    presets = {"paper": {"dual_optimizer": "adam", "land_at": 7}, "short": {"augmented": 5.0}}
    assert build({}, presets).dual_optimizer == "adam"
    assert build({"dual_optimizer": "sgd"}, presets).dual_optimizer == "sgd"
    assert build({"preset": "none"}, presets) == Config()
    assert build({"preset": "short"}, presets).augmented == 5.0
    assert build({}, presets).has_landed(7)
    assert not build({"mode": "resilient"}, presets).has_landed(7), "landing is for strict runs"
    with pytest.raises(AceError, match="unknown preset 'shrt': expected one of none, paper, short"):
        build({"preset": "shrt"}, presets)


def test_slack_starts_where_it_is_told() -> None:
    starts = {"strict": 0.0, "resilient": 0.3, "bounded": 0.2}
    for mode, u in starts.items():
        config = Config(mode=mode, u_init=0.3, epsilon=0.2)
        duals = Duals(2, config, dtype=torch.float64, device=torch.device("cpu"))
        assert duals.u.tolist() == [u, u]


def test_what_settings_cost_is_told() -> None:
    (told,) = Config(mode="resilient").cautions
    assert "mode 'resilient' without spectral_norm" in told
    assert "set spectral_norm = true" in told
    assert [Config(mode="resilient", spectral_norm=True).cautions, Config().cautions] == [(), ()]


def test_every_setting_explains_itself() -> None:
    assert all(field.metadata["help"] for field in dataclasses.fields(Config))


def test_what_eval_shows() -> None:
    assert [Config(mode=m).branches_in_eval for m in ("strict", "bounded", "resilient")] == [False, True, True]
    assert Config(eval_branches="on").branches_in_eval
    assert not Config(mode="resilient", eval_branches="off").branches_in_eval
