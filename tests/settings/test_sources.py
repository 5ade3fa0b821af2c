"""Settings from a file, the environment and options: which one counts, and where it stands."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from drawn import PRESETS, SETTINGS, build
from hypothesis import given, settings
from hypothesis import strategies as st
from toy import Layered

from ace_plugins import Config, attach
from ace_plugins.cli.options import collect_settings, config_options
from ace_plugins.errors import AceWarning, AdapterError, ConfigError
from ace_plugins.output import quiet, say
from ace_plugins.settings.config import KINDS
from ace_plugins.settings.sources import OTHERS, find_misspelt, option, read_environment, resolve, variable
from ace_plugins.settings.toml_file import read, write

HERE = Path("ace.toml")


@click.command()
@config_options
def command(**options: Any) -> dict[str, Any]:
    return collect_settings(options)


def options_of(*words: str) -> dict[str, Any]:
    found: dict[str, Any] = command.main(list(words), standalone_mode=False)
    return found


def words_of(name: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [option(name) if value else f"--no-{option(name)[2:]}"]
    return [option(name), str(value)]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(SETTINGS)
def test_file_environment_and_options_give_the_same_config(chosen: dict[str, Any]) -> None:
    expected = build(chosen, PRESETS)
    file = read(HERE, write(HERE, "net", "main.py", chosen, PRESETS).text.encode())
    environment = {variable(name): str(value) for name, value in chosen.items()}
    options = options_of(*(word for name, value in chosen.items() for word in words_of(name, value)))
    for found in (
        resolve(PRESETS, file=file).config,
        resolve(PRESETS, environment=environment).config,
        resolve(PRESETS, options=options).config,
        resolve(PRESETS, arguments=chosen).config,
    ):
        assert found == expected
        assert [*map(type, vars(found).values())] == [*map(type, vars(expected).values())]


def test_each_source_overrides_the_one_before() -> None:
    file = read(HERE, b'adapter = "net"\npreset = "none"\nrho = 1.5\nmode = "off"\nland_at = 3\n')
    environment = {"ACE_MODE": "bounded", "ACE_LAND_AT": "4", "ACE_PRESET": "damped"}
    found = resolve(PRESETS, file=file, environment=environment, options={"land_at": 5})
    assert found.config == Config(rho=1.5, mode="bounded", land_at=5, augmented=5.0)
    assert found.origins == {
        "augmented": "preset damped",
        "preset": "ACE_PRESET",
        "rho": "ace.toml line 3",
        "mode": "ACE_MODE",
        "land_at": "--land-at",
    }
    assert resolve(PRESETS, file=file).config == Config(rho=1.5, mode="off", land_at=3)


def test_the_environment_goes_before_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACE_MODE", "off")
    assert not hasattr(attach(Layered()), "ace")
    with pytest.warns(AceWarning, match="ACE_MODE=off overrides mode = 'strict' in the code"):
        assert not hasattr(attach(Layered(), mode="strict"), "ace")
    attach(Layered(), mode="off")  # no warning: pytest makes an error of each
    monkeypatch.setenv("ACE_MODE", "nonsense")
    with pytest.raises(ConfigError, match="ACE_MODE: unknown mode 'nonsense'"):
        attach(Layered(), mode="strict")


def test_errors_name_where_the_setting_stands() -> None:
    file = read(HERE, b'adapter = "net"\n# mode\nmode = "hard"\n')
    with pytest.raises(ConfigError) as caught:
        resolve({}, file=file, environment={"ACE_RHO": "0"}, options={"dual_lr": "fast"}, arguments={"epsilon": -1})
    told = str(caught.value).split("; ")
    assert told[0].startswith("ace.toml line 3: unknown mode 'hard': ")
    assert told[1:] == [
        "--dual-lr: dual_lr 'fast': expected a finite number of at least 0, or a multiple such as '1x'",
        "ACE_RHO: rho 0.0: expected a finite number above 0, or a multiple such as '1x'",
        "epsilon -1: expected a finite number above 0",
    ]
    with pytest.raises(ConfigError, match="^--preset: unknown preset 'papr': expected one of damped, fit, none, paper"):
        resolve(PRESETS, options={"preset": "papr"})
    with pytest.raises(ConfigError, match="^--modus: unknown setting 'modus': did you mean 'mode'?"):
        resolve(PRESETS, options={"modus": "strict"})


@pytest.mark.parametrize(
    ("preset", "text"),
    [({"epsilon": -1}, "epsilon -1"), ({"dual_rate": 1}, "unknown setting 'dual_rate'")],
)
def test_errors_in_a_preset_name_the_adapter(preset: dict[str, Any], text: str) -> None:
    presets = {"fit": preset, "paper": {}}
    with pytest.raises(AdapterError, match=f"adapter 'net': ace_preset returned 'fit' with {text}"):
        resolve(presets, options={"rho": 0.0}, adapter="net")
    assert resolve(presets, options={"preset": "paper"}).config == Config()


# The environment


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("ACE_MODE", "  bounded\n", "bounded"),
        ("ACE_DUAL_LR", "8e-4", 8e-4),
        ("ACE_DUAL_LR", "0.5x", "0.5x"),
        ("ACE_LAND_AT", " 2000", 2000),
        *(("ACE_TRACE", word, True) for word in ("1", "True", "YES", " on ")),
        *(("ACE_TRACE", word, False) for word in ("0", "FALSE", "no", "off")),
    ],
)
def test_values(name: str, text: str, value: Any) -> None:
    ((setting, found),) = read_environment({name: text}).items()
    assert (setting, found, type(found)) == (name[4:].lower(), value, type(value))
    assert find_misspelt({name: text}) == []


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("ACE_TRACE", "maybe", "ACE_TRACE='maybe': expected true or false"),
        ("ACE_LAND_AT", "2e3", "ACE_LAND_AT='2e3': expected an integer of at least 0"),
        ("ACE_EPSILON", "1,5", "ACE_EPSILON='1,5': expected a finite number above 0"),
        ("ACE_RHO", "much", "ACE_RHO='much': expected a finite number above 0, or a multiple such as '1x'"),
        (
            "ACE_BUDGET",
            "long",
            "ACE_BUDGET='long': expected a number of optimizer steps, epochs such as '600 epochs', or 'auto'",
        ),
        ("ACE_EPSILON", "a\nb", r"ACE_EPSILON='a\nb': expected a finite number above 0"),
    ],
)
def test_texts_that_stand_for_no_value(name: str, text: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_environment({name: text})
    assert str(caught.value) == problem


def test_what_is_empty_is_not_set() -> None:
    assert read_environment({variable(name): " \n" for name in (*KINDS, "preset")}) == {}


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("ACE_MOD", "ACE_MODE"),
        ("ACE_DUALLR", "ACE_DUAL_LR"),
        ("ACE_OPTIMIZER", "ACE_DUAL_OPTIMIZER"),
        ("ACE_PRESETS", "ACE_PRESET"),
        ("ACE_QUITE", "ACE_QUIET"),
    ],
)
def test_a_near_miss_is_reported(name: str, meant: str) -> None:
    notice = f"unknown variable {name!r} (did you mean {meant!r}?): it is ignored"
    assert (read_environment({name: "strict"}), find_misspelt({name: "strict"})) == ({}, [notice])


@pytest.mark.parametrize(
    "name",
    [
        "ACE_HOME", "ACE_ROOT", "ACE_VERSION", "ACE_SEED", "ACE_DATA", "ACE_", "ACE_UPSTREAM_MODE", "ACE", "MODE",
        "ace_mode", "PALACE_MODE", "ACE_\udcff", *OTHERS,
    ],
)  # fmt: skip
def test_variables_of_others_are_left_alone(name: str) -> None:
    assert (read_environment({name: "strict"}), find_misspelt({name: "strict"})) == ({}, [])


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.dictionaries(st.sampled_from([variable(name) for name in KINDS]), st.text(max_size=8), max_size=4))
def test_no_value_is_too_odd(environment: dict[str, str]) -> None:
    try:
        resolve({}, environment=environment)
    except ConfigError as error:
        told = str(error)
    else:
        return
    assert any(name in told for name in environment)
    assert "\n" not in told


# Options


def test_options_are_parsed_by_kind() -> None:
    assert options_of() == {}
    assert options_of("--cpu", "--no-trace", "--dual-lr", "-1") == {"device": "cpu", "trace": False, "dual_lr": -1.0}
    with pytest.raises(click.BadParameter, match="'1e3': expected an integer") as caught:
        options_of("--land-at", "1e3")
    assert "'--land-at'" in caught.value.format_message()


# What scripts wait for, and hear


def test_a_patched_script_loads_nothing_heavy() -> None:
    code = "import sys, ace_plugins.settings.sources, ace_plugins.settings.toml_file; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = {*done.stdout.split()}
    assert loaded & {"torch", "numpy", "click", "rich", "difflib", "hashlib"} == set()
    assert "tomlkit" not in loaded or sys.version_info < (3, 11)


@pytest.mark.parametrize(("word", "told"), [("", True), (" No ", True), ("0", True), ("1", False), ("yes", False)])
def test_quiet(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], word: str, told: bool) -> None:
    monkeypatch.setenv("ACE_QUIET", word)
    assert quiet() is not told
    say("hello")
    say("an error", anyway=True)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == ("ace: hello\n" if told else "") + "ace: an error\n"
