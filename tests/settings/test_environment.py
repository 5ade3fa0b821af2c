"""Settings from environment variables."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ace_plugins import Config
from ace_plugins.settings.config import SETTINGS, build
from ace_plugins.settings.environment import OTHERS, settings_in, variable
from ace_plugins.telling import quiet
from ace_plugins.errors import ConfigError


def test_every_setting_has_a_variable() -> None:
    spelled = {bool: "true", int: "3", float: "0.5", str: "word"}
    found, notices = settings_in({variable(name): spelled[type(f.default)] for name, f in SETTINGS.items()})
    assert notices == []
    assert found.keys() == SETTINGS.keys()
    for name, field in SETTINGS.items():
        assert type(found[name]) is type(field.default)


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("ACE_MODE", "resilient", "resilient"),
        ("ACE_MODE", "  bounded\n", "bounded"),
        ("ACE_DUAL_LR", "8e-4", "8e-4"),
        ("ACE_DUAL_LR", "0.5x", "0.5x"),
        ("ACE_PRESET", "none", "none"),
        ("ACE_GAMMA_INIT", "-1", -1.0),
        ("ACE_RHO", " 2.5 ", 2.5),
        ("ACE_LAND_AT", "2000", 2000),
        ("ACE_TRACE_EVERY", "1", 1),
        ("ACE_TRACE", "0", False),
    ],
)
def test_values(name: str, text: str, value: Any) -> None:
    found, notices = settings_in({name: text})
    assert found == {name[4:].lower(): value}
    assert type(found[name[4:].lower()]) is type(value)
    assert notices == []


@pytest.mark.parametrize("word", ["1", "true", "True", "YES", "on", " On "])
def test_words_for_yes(word: str) -> None:
    assert settings_in({"ACE_SPECTRAL_NORM": word}) == ({"spectral_norm": True}, [])


@pytest.mark.parametrize("word", ["0", "false", "FALSE", "no", "Off"])
def test_words_for_no(word: str) -> None:
    assert settings_in({"ACE_SHIMS": word}) == ({"shims": False}, [])


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("ACE_TRACE", "maybe", "ACE_TRACE='maybe': expected 1 or 0"),
        ("ACE_TRACE", "2", "ACE_TRACE='2': expected 1 or 0"),
        ("ACE_LAND_AT", "2e3", "ACE_LAND_AT='2e3': expected an integer"),
        ("ACE_LAND_AT", "5.0", "ACE_LAND_AT='5.0': expected an integer"),
        ("ACE_LAND_AT", "9" * 5000, "ACE_LAND_AT='9+': expected an integer"),
        ("ACE_RHO", "one", "ACE_RHO='one': expected a number"),
        ("ACE_RHO", "1,5", "ACE_RHO='1,5': expected a number"),
        ("ACE_RHO", "a\nb", r"ACE_RHO='a\\nb': expected a number"),
    ],
)
def test_bad_values_name_their_variable(name: str, text: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        settings_in({name: text})
    assert re.fullmatch(problem, str(caught.value))


def test_what_is_empty_is_not_set() -> None:
    names = [variable(name) for name in (*SETTINGS, "preset")]
    for empty in ("", " ", "\t\n"):
        assert settings_in(dict.fromkeys(names, empty)) == ({}, [])


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("ACE_MOD", "ACE_MODE"),
        ("ACE_DUALLR", "ACE_DUAL_LR"),
        ("ACE_DUAL_RL", "ACE_DUAL_LR"),
        ("ACE_GAMA_INIT", "ACE_GAMMA_INIT"),
        ("ACE_LANDAT", "ACE_LAND_AT"),
        ("ACE_EPSILONS", "ACE_EPSILON"),
        ("ACE_OPTIMIZER", "ACE_DUAL_OPTIMIZER"),
        ("ACE_PRESETS", "ACE_PRESET"),
        ("ACE_RUN", "ACE_RUNS"),
        ("ACE_QUITE", "ACE_QUIET"),
        ("ACE_LOAD_PLUGIN", "ACE_LOAD_PLUGINS"),
    ],
)
def test_a_near_miss_is_told(name: str, meant: str) -> None:
    found, notices = settings_in({name: "strict"})
    assert found == {}
    assert notices == [f"unknown variable {name!r} (did you mean {meant!r}?): it is ignored"]


@pytest.mark.parametrize(
    "name",
    [
        "ACE_HOME", "ACE_ROOT", "ACE_PATH", "ACE_VERSION", "ACE_SEED", "ACE_DATA", "ACE_BUILD", "ACE_LOG", "ACE_",
        "ACE_UPSTREAM_SEGNN", "ACE_UPSTREAM_MODE", "ACE", "ACEMODE", "MODE", "ace_mode", "PALACE_MODE", "ACE_DEBUG",
        *OTHERS,
    ],
)  # fmt: skip
def test_variables_of_others_are_left_alone(name: str) -> None:
    assert settings_in({name: "strict"}) == ({}, [])


def test_names_that_only_the_environment_can_have() -> None:
    assert settings_in({"ACE_MODE": "off", "PATH": "\udcff", "ACE_\udcff": "1"}) == ({"mode": "off"}, [])


@settings(max_examples=50, deadline=None)
@given(st.dictionaries(st.sampled_from([variable(name) for name in SETTINGS]), st.text(max_size=8), max_size=4))
def test_no_value_is_too_odd(environment: dict[str, str]) -> None:
    try:
        found, notices = settings_in(environment)
        config = build(found)
    except ConfigError as error:
        told = str(error)
    else:
        assert isinstance(config, Config)
        assert notices == []
        return
    assert told
    assert "\n" not in told


@pytest.mark.parametrize(
    ("word", "is_quiet"), [("", False), ("0", False), (" no ", False), ("False", False), ("1", True), ("yes", True)]
)
def test_quiet(monkeypatch: pytest.MonkeyPatch, word: str, is_quiet: bool) -> None:
    monkeypatch.setenv("ACE_QUIET", word)
    assert quiet() is is_quiet
    monkeypatch.delenv("ACE_QUIET")
    assert not quiet()
