"""ace.toml: written whole, read with line numbers, changed in place, and known to be untouched."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import tomlkit
from drawn import OF_PAPER_LOOP, PRESETS, SETTINGS, build
from hypothesis import given, settings
from hypothesis import strategies as st

from ace_plugins import AceError, Config
from ace_plugins.errors import ConfigError
from ace_plugins.settings import toml_file as file_module
from ace_plugins.settings.config import PAPER_ONLY
from ace_plugins.settings.config import SETTINGS as FIELDS
from ace_plugins.settings.sources import resolve
from ace_plugins.settings.toml_file import NAME, SettingsFile, is_as_written, is_ours, read, write

HERE = Path(NAME)
drawn = settings(max_examples=50, deadline=None, derandomize=True)


def new(chosen: Mapping[str, Any], presets: Mapping[str, Any] = PRESETS) -> SettingsFile:
    return write(HERE, "net", "main.py", chosen, presets)


def update(file: SettingsFile, changes: Mapping[str, Any]) -> SettingsFile:
    return file_module.update(file, changes, "main.py", PRESETS)


def parsed(text: str) -> SettingsFile:
    return read(HERE, text.encode())


def uncommented(text: str) -> dict[str, Any]:
    """With every default set that it shows."""
    return tomlkit.parse(re.sub(r"^#(?=\w+ = )", "", text, flags=re.MULTILINE)).unwrap()


@drawn
@given(SETTINGS)
def test_a_new_file_shows_what_was_set_and_shows_every_default(chosen: dict[str, Any]) -> None:
    file = new(chosen)
    assert parsed(file.text) == file
    assert (file.adapter, file.settings, is_as_written(file.text)) == ("net", chosen, True)
    shown = uncommented(file.text)
    assert (shown.pop("adapter"), shown.pop("preset")) == ("net", chosen.get("preset", "fit"))
    config = build(chosen, PRESETS)
    assert Config(**shown) == config
    for name, field in FIELDS.items():
        if name in PAPER_ONLY and config.loop == "paced":
            continue  # not for this loop
        assert f"# {field.metadata['help']}\n" in file.text


def test_the_head_explains_the_file() -> None:
    text = new({}, {}).text
    assert "Written by 'ace-patch net'" in text
    assert "ACE_MODE=resilient python main.py" in text
    assert uncommented(text)["preset"] == "fit"


@drawn
@given(SETTINGS, SETTINGS)
def test_a_file_as_written_is_written_anew(first: dict[str, Any], second: dict[str, Any]) -> None:
    file = new(first)
    changed = update(file, second)
    assert changed.text == new({**first, **second}).text
    assert is_as_written(changed.text)
    assert update(changed, second) is changed
    assert update(file, first) is file


@drawn
@given(OF_PAPER_LOOP, OF_PAPER_LOOP)
def test_an_edited_file_keeps_its_settings_and_is_written_anew(first: dict[str, Any], second: dict[str, Any]) -> None:
    file = parsed("# mine\n" + new(first).text.replace("adapter", "  adapter", 1))
    assert not is_as_written(file.text)
    changed = update(file, second)
    if changed.settings == file.settings:
        assert changed is file, "without changes, comments stay"
    else:
        assert changed.text == new({**first, **second}).text


@drawn
@given(st.data())
def test_no_edit_goes_unseen(data: st.DataObject) -> None:
    text = new({"rho": 2.0}).text
    at = data.draw(st.integers(0, len(text)))
    until = data.draw(st.integers(at, min(len(text), at + 3)))
    edited = text[:at] + data.draw(st.text(alphabet='# \n=1"a', max_size=3)) + text[until:]
    assert is_as_written(edited) is (edited == text)


def test_line_endings_of_an_editor_are_no_edit() -> None:
    text = new({}).text
    assert is_as_written(parsed("\ufeff" + text.replace("\n", "\r\n")).text)
    assert not is_as_written(text + text)
    assert not is_as_written("")


def test_files_of_other_programs() -> None:
    assert is_ours(new({}).text)
    assert is_ours('adapter="net"\nbroken = \n')
    assert not is_ours("x = 1\n")


# Reading


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("\nmodus = 'strict'\n", "line 3: unknown setting 'modus': did you mean 'mode'?"),
        ("a = 1\nb.c = 2\n", "line 2: unknown setting 'a': .*; ace.toml line 3: unknown setting 'b'"),
        ("[ other ]\nmode = 1\n", "line 2: unknown setting 'other'"),
        ("rho.x = 1\n", r"line 2: rho \{'x': 1\}: expected a finite number"),
        ("[[mode]]\n", r"line 2: unknown mode \[\{\}\]"),
        ("# rho = 1\nmode = 'hard'\nrho = 0\n", "line 3: unknown mode 'hard'.*; ace.toml line 4: rho 0: expected"),
        ("preset = ['paper']\n", r"line 2: unknown preset \['paper'\]: expected one of"),
        ("mode = strict\n", r"not valid TOML: Invalid value \(at line 2, column 8\) \(a word needs quotes\)"),
        ("rho = 1\nrho = 2\n", r"not valid TOML: Cannot overwrite a value \(at line 3"),
        ("mode = [", "ace.toml: not valid TOML: "),
        ("mode = " + "[" * 100_000, "ace.toml.*: not valid TOML: "),
        ("rho = " + "1" * 5000, "ace.toml.*: not valid TOML: "),
    ],
)
def test_mistakes_are_reported_with_their_line(text: str, problem: str) -> None:
    for ending in ("\n", "\r\n"):
        with pytest.raises(ConfigError) as caught:
            resolve(PRESETS, file=parsed(f'adapter = "net"\n{text}'.replace("\n", ending)))
        assert re.search(problem, str(caught.value)), str(caught.value)
        assert str(caught.value).startswith("ace.toml")
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", 'ace.toml line 1: expected adapter = "name", found None'),
        (b"#\nadapter = 5\n", 'ace.toml line 2: expected adapter = "name", found 5'),
        (b'adapter = "n\xe9t"\n', r"ace.toml: not valid UTF-8 \(byte 12\); save it as UTF-8"),
    ],
)
def test_files_that_are_not_ours(content: bytes, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        read(HERE, content)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"ace.toml: cannot be read \(No such file or directory\)"):
        read(tmp_path / NAME)
    with pytest.raises(ConfigError, match=r": cannot be read \(Is a directory\)"):
        read(tmp_path)


def test_the_line_of_a_setting() -> None:
    file = parsed('#mode = "off"\nadapter = "net"\n  mode="strict"\n\'rho\' = 1\n"trace" = false\n')
    assert [file.where(key) for key in ("adapter", "mode", "rho", "trace")] == [
        f"{NAME} line {n}" for n in (2, 3, 4, 5)
    ]
    assert file.settings == {"mode": "strict", "rho": 1, "trace": False}


def test_where_python_has_no_toml_tomlkit_reads_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    file = new({"mode": "bounded", "trace": False, "rho": 2.0, "land_at": 3})
    monkeypatch.setattr(file_module, "loads", lambda text: tomlkit.parse(text).unwrap())
    again = parsed(file.text)
    assert again == file
    assert {key: type(value) for key, value in again.settings.items()} == {
        key: type(value) for key, value in file.settings.items()
    }
    with pytest.raises(ConfigError, match="^ace.toml: not valid TOML: Unexpected character: 's' at line 2"):
        parsed('adapter = "net"\nmode = strict\n')
    with pytest.raises(ConfigError, match="^ace.toml: not valid TOML: .* at line 3"):
        parsed('adapter = "net"\nrho = 1\nrho = 2\n')


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.text(max_size=40) | st.text(alphabet='mode=rho"[]#.1\n ', max_size=30).map('adapter = "net"\n{}'.format))
def test_no_file_is_too_odd(text: str) -> None:
    try:
        changed = update(read(HERE, text.encode("utf-8", "surrogatepass")), {"mode": "bounded", "epsilon": 0.3})
    except AceError as error:
        told = str(error)
    else:
        assert changed.settings.items() >= {"mode": "bounded", "epsilon": 0.3}.items()
        return
    assert told.startswith(NAME)
    assert "\n" not in told
