"""Every setting: its default, its kind, what is wrong with a value, and what a preset does."""

from __future__ import annotations

from typing import Any

import pytest
from drawn import PRESETS, SETTINGS, build
from hypothesis import given, settings

from ace_plugins import AceError, Config
from ace_plugins.errors import ConfigError
from ace_plugins.settings.config import BUDGET, KINDS
from ace_plugins.settings.config import SETTINGS as FIELDS
from ace_plugins.settings.fields import LARGEST, Choice, Flag, Multiple, Number


def test_every_setting_explains_itself_and_starts_as_its_kind() -> None:
    for name, field in FIELDS.items():
        assert field.metadata["help"]
        assert KINDS[name].problem(name, field.default) is None
        if not isinstance(KINDS[name], Multiple):
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
        (Multiple(), "fast", "x 'fast': expected a finite number of at least 0, or a multiple such as '1x'"),
        (Multiple(), True, "x True: expected a finite number of at least 0, or a multiple such as '1x'"),
        (Multiple(), -1.0, "x -1.0: expected a finite number of at least 0, or a multiple such as '1x'"),
        (Multiple(), "infx", "x 'infx': expected a finite number of at least 0, or a multiple such as '1x'"),
    ],
)
def test_what_is_wrong_with_a_value(kind: Any, value: Any, problem: str) -> None:
    assert kind.problem("x", value) == problem


def test_every_problem_is_reported_at_once() -> None:
    with pytest.raises(ConfigError, match=r"^unknown mode 'hard': .*; rho -1.0: .* above 0, or") as caught:
        Config(mode="hard", rho=-1.0)
    assert isinstance(caught.value, ValueError)
    assert [name for name, _ in caught.value.problems] == ["mode", "rho"]


def test_the_dual_rate() -> None:
    assert Config(dual_lr=" 0.5X ").dual_rate(0.2) == 0.1
    assert Config(dual_lr=0.3).dual_rate(0.2) == 0.3
    assert Config(dual_lr="8e-4").dual_rate(0.2) == 8e-4


def test_presets() -> None:
    fitted = Config(loop="paced", mode="auto")
    assert build({}, PRESETS) == build({"preset": None}, PRESETS) == build({}) == fitted, "unless another is named"
    assert build({}, {"fit": {"rho": 2.0}}) == Config(loop="paced", mode="auto", rho=2.0), "what the adapter adds"
    assert build({"preset": "none"}, PRESETS) == Config()
    assert build({"preset": "paper"}, PRESETS).dual_optimizer == "adam"
    assert build({"preset": "paper", "dual_optimizer": "sgd"}, PRESETS).dual_optimizer == "sgd"
    assert build({"preset": "damped"}, PRESETS) == Config(augmented=5.0)
    with pytest.raises(AceError, match="unknown preset 'fitt': expected one of damped, fit, none, paper"):
        build({"preset": "fitt"}, PRESETS)
    with pytest.raises(AceError, match="unknown setting 'dual_rate': did you mean 'dual_lr'?"):
        build({"dual_rate": 1.0}, PRESETS)


def test_settings_of_the_printed_loop_are_not_for_the_other() -> None:
    with pytest.raises(ConfigError, match="dual_lr is a setting of the paper's loop, .*; land_at is") as caught:
        build({"dual_lr": 1.0, "rho": 2.0, "land_at": 3})
    assert [name for name, _ in caught.value.problems] == ["dual_lr", "land_at"]
    assert build({"dual_lr": 1.0, "loop": "paper"}) == Config(dual_lr=1.0)


@pytest.mark.parametrize("preset", [{}, {"fit": {"loop": "paper"}}, {"fit": {"mode": "auto"}}])
def test_the_paper_s_loop_is_strict_by_default(preset: dict[str, Any]) -> None:
    assert build({"loop": "paper"}, preset) == Config(mode="strict")
    assert build({"loop": "paper", "mode": "resilient"}, preset).mode == "resilient"
    assert build({"loop": "paced"}, preset).mode == "auto"


def test_mode_auto_needs_the_paced_loop_and_judges() -> None:
    for chosen, wrong in (({"mode": "auto", "loop": "paper"}, "mode"), ({"holdout": 0}, "holdout")):
        with pytest.raises(ConfigError) as caught:
            build(chosen)
        assert [name for name, _ in caught.value.problems] == [wrong]
    assert build({"holdout": 0, "mode": "strict"}).held_out == 0
    assert [build({"mode": mode}).held_out for mode in ("auto", "strict")] == [0.5, 0.0]


@pytest.mark.parametrize(("former", "now"), [("printed", "paper"), ("fitted", "paced")])
def test_former_names_of_the_loops_work_with_one_warning(former: str, now: str) -> None:
    with pytest.warns(DeprecationWarning, match=now) as caught:
        assert build({"preset": "none", "loop": former}) == Config(loop=now)
    assert len(caught) == 1


def test_nupi_is_refused_with_a_hint() -> None:
    with pytest.raises(ConfigError, match="expected one of adam, sgd; .*augmented"):
        Config(dual_optimizer="nupi")


@pytest.mark.parametrize(
    ("value", "steps", "epochs"),
    [("auto", None, None), (300, 300, None), ("300", 300, None), ("20 steps", 20, None), ("6 Epochs", None, 6)],
)
def test_budgets(value: Any, steps: int | None, epochs: int | None) -> None:
    assert Config(budget=value)
    assert BUDGET.split(value) == (steps, epochs)


@pytest.mark.parametrize("value", [0, -3, 1.5, True, "", "long", "6 weeks", "0 epochs", "1.5 epochs", None])
def test_what_is_no_budget(value: Any) -> None:
    with pytest.raises(
        ConfigError, match="expected a number of optimizer steps, epochs such as '600 epochs', or 'auto'"
    ):
        Config(budget=value)


def test_when_things_happen() -> None:
    assert [step for step in range(1, 13) if Config(trace_every=5).may_wait(step)] == [1, 5, 10]
    assert [step for step in range(1, 13) if Config(error_every=6).measures(step)] == [1, 6, 12]
    assert Config(log="wandb", trace=False, error_every=1).measures(1)
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


def test_consequences_of_settings_are_reported() -> None:
    (told,) = Config(mode="resilient").cautions
    assert told.startswith("mode 'resilient' without spectral_norm")
    assert told.endswith("set spectral_norm = true")
    assert [Config(mode="resilient", spectral_norm=True).cautions, Config().cautions] == [(), ()]
