"""Every setting: its default, its kind, what is wrong with a value, and what a preset does."""

from __future__ import annotations

from typing import Any

import pytest
from drawn import PRESETS, SETTINGS
from hypothesis import given, settings

from ace_plugins import AceError, Config
from ace_plugins.errors import ConfigError
from ace_plugins.settings.config import KINDS, build
from ace_plugins.settings.config import SETTINGS as FIELDS
from ace_plugins.settings.kinds import LARGEST, Choice, Flag, Number, Rate


def test_every_setting_explains_itself_and_starts_as_its_kind() -> None:
    for name, field in FIELDS.items():
        assert field.metadata["help"]
        assert KINDS[name].problem(name, field.default) is None
        if not isinstance(KINDS[name], Rate):
            assert type(KINDS[name].parse(str(field.default))) is type(field.default)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(SETTINGS)
def test_every_value_of_its_kind_is_accepted(chosen: dict[str, Any]) -> None:
    config = build(chosen, PRESETS)
    assert {key: getattr(config, key) for key in chosen if key != "preset"} == {
        key: value for key, value in chosen.items() if key != "preset"
    }


@pytest.mark.parametrize(
    ("kind", "value", "problem"),
    [
        (Choice(("on", "off")), "of", "unknown x 'of': expected one of off, on (did you mean 'off'?)"),
        (Choice(("on", "off")), ["on"], "unknown x ['on']: expected one of off, on"),
        (Number(), float("nan"), "x nan: expected a finite number"),
        (Number(), -float("inf"), "x -inf: expected a finite number"),
        (Number(), 10 * LARGEST, "x 1e+31: expected a finite number"),
        (Number(), True, "x True: expected a finite number"),
        (Number(), "1", "x '1': expected a finite number"),
        (Number(low=0), -0.1, "x -0.1: expected a finite number of at least 0"),
        (Number(low=0, high=1), 1.0, "x 1.0: expected a finite number of at least 0 and below 1"),
        (Number(positive=True), 0, "x 0: expected a finite number above 0"),
        (Number(positive=True), -1.0, "x -1.0: expected a finite number above 0"),
        (Number(low=0, whole=True), -1, "x -1: expected an integer of at least 0"),
        (Number(low=1, whole=True), 0, "x 0: expected an integer of at least 1"),
        (Number(low=0, whole=True), 5.0, "x 5.0: expected an integer of at least 0"),
        (Number(low=0, whole=True), True, "x True: expected an integer of at least 0"),
        (Flag(), 1, "x 1: expected true or false"),
        (Rate(), "fast", "x 'fast': expected a finite number of at least 0, or a multiple such as '1x'"),
        (Rate(), True, "x True: expected a finite number of at least 0, or a multiple such as '1x'"),
        (Rate(), -1.0, "x -1.0: expected a finite number of at least 0, or a multiple such as '1x'"),
        (Rate(), "infx", "x 'infx': expected a finite number of at least 0, or a multiple such as '1x'"),
    ],
)
def test_what_is_wrong_with_a_value(kind: Any, value: Any, problem: str) -> None:
    assert kind.problem("x", value) == problem


def test_every_problem_is_told_at_once() -> None:
    with pytest.raises(ConfigError, match=r"^unknown mode 'hard': .*; rho -1.0: .* above 0$") as caught:
        Config(mode="hard", rho=-1.0)
    assert isinstance(caught.value, ValueError)
    assert [name for name, _ in caught.value.problems] == ["mode", "rho"]


def test_the_dual_rate() -> None:
    assert Config(dual_lr=" 0.5X ").dual_rate(0.2) == 0.1
    assert Config(dual_lr=0.3).dual_rate(0.2) == 0.3
    assert Config(dual_lr="8e-4").dual_rate(0.2) == 8e-4


def test_presets() -> None:
    assert build({}, PRESETS).dual_optimizer == "adam", "the paper's, unless another is named"
    assert build({"preset": None}, PRESETS).dual_optimizer == "adam"
    assert build({"dual_optimizer": "sgd"}, PRESETS).dual_optimizer == "sgd"
    assert build({"preset": "none"}, PRESETS) == build({}) == Config()
    assert build({"preset": "short"}, PRESETS) == Config(augmented=5.0)
    with pytest.raises(AceError, match="unknown preset 'shrt': expected one of none, paper, short"):
        build({"preset": "shrt"}, PRESETS)
    with pytest.raises(AceError, match="unknown setting 'dual_rate': did you mean 'dual_lr'?"):
        build({"dual_rate": 1.0}, PRESETS)


def test_when_things_happen() -> None:
    assert [step for step in range(1, 13) if Config(trace_every=5).traces(step)] == [1, 5, 10]
    assert [step for step in range(1, 13) if Config(error_every=6).measures(step)] == [1, 6, 12]
    assert not Config(trace=False, error_every=1).measures(1)
    assert not Config().measures(1)
    assert [Config(land_at=7).has_landed(steps) for steps in (6, 7)] == [False, True]
    assert not Config(mode="resilient", land_at=7).has_landed(7), "landing is for strict runs"
    assert not Config().has_landed(7)


def test_what_is_deployed() -> None:
    modes = ("strict", "bounded", "resilient")
    assert [Config(mode=mode).deploys_branches for mode in modes] == [False, True, True]
    assert [Config(mode=mode).branches_in_eval for mode in modes] == [False, True, True]
    assert Config(eval_branches="on").branches_in_eval
    assert not Config(mode="resilient", eval_branches="off").branches_in_eval


def test_what_settings_cost_is_told() -> None:
    (told,) = Config(mode="resilient").cautions
    assert told.startswith("mode 'resilient' without spectral_norm")
    assert told.endswith("set spectral_norm = true")
    assert [Config(mode="resilient", spectral_norm=True).cautions, Config().cautions] == [(), ()]
