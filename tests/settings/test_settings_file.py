"""ace.toml: written whole, read with line numbers, changed in place, and known to be untouched."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ace_plugins import AceError, Config
from ace_plugins.settings.config import SETTINGS, build
from ace_plugins.errors import ConfigError
from ace_plugins.settings.file import NAME, SettingsFile, is_as_written, new, read, unchecked
from ace_plugins.settings.sources import Sources

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

HERE = Path(NAME)
PRESETS = {"paper": {"dual_optimizer": "adam", "dual_lr": 5e-4, "land_at": 7}, "short": {"augmented": 5.0}}


def written(chosen: Mapping[str, Any] | None = None, presets: Mapping[str, Any] = PRESETS) -> SettingsFile:
    return new(HERE, "net", "main.py", chosen or {}, presets)


def uncommented(text: str) -> dict[str, Any]:
    return tomllib.loads(re.sub(r"^#(?=\w+ = )", "", text, flags=re.MULTILINE))


def load(path: Path) -> SettingsFile:
    """Read and checked, as a script does."""
    found = unchecked(path)
    Sources(found).checked(None)
    return found


def loaded(folder: Path, content: str | bytes) -> SettingsFile:
    path = folder / NAME
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return load(path)


def refusal(folder: Path, content: str | bytes) -> str:
    with pytest.raises(ConfigError) as caught:
        loaded(folder, content)
    assert "\n" not in str(caught.value)
    return str(caught.value)


rates = st.floats(0, 1e6) | st.floats(0, 10).map("{}x".format) | st.just("1x")
numbers = st.floats(0, 0.99)
values: dict[str, st.SearchStrategy[Any]] = {
    "preset": st.sampled_from(["paper", "short", "none"]),
    "mode": st.sampled_from(["strict", "off"]),
    "dual_optimizer": st.sampled_from(["sgd", "adam"]),
    "dual_lr": rates,
    "eval_branches": st.sampled_from(["auto", "on", "off"]),
    "device": st.sampled_from(["auto", "cpu"]),
    "gamma_init": st.floats(-1e6, 1e6),
    "rho": st.floats(1e-9, 1e9),
    "epsilon": st.floats(1e-9, 1e9) | st.integers(1, 10**6),
    "land_at": st.integers(0, 10**9),
    "trace_every": st.integers(1, 10**9),
    "error_every": st.integers(0, 10**9),
    **{name: st.booleans() for name, field in SETTINGS.items() if isinstance(field.default, bool)},
}
values.update({name: numbers for name in SETTINGS if name not in values})
chosen_settings = st.fixed_dictionaries({}, optional=values)


def test_a_new_file_has_every_setting_and_its_default() -> None:
    file = written(presets={})
    assert tomllib.loads(file.text) == {"adapter": "net"}
    assert uncommented(file.text) == {"adapter": "net", "preset": "none"} | {
        name: field.default for name, field in SETTINGS.items()
    }
    for field in SETTINGS.values():
        assert f"# {field.metadata['help']}\n" in file.text
    assert "ACE_MODE=resilient python main.py" in file.text
    assert "'ace-patch net'" in file.text


@pytest.mark.parametrize("chosen", [{}, {"preset": "paper"}, {"preset": "short"}, {"preset": "none"}])
def test_defaults_are_those_of_the_preset(chosen: dict[str, Any]) -> None:
    found = uncommented(written(chosen).text)
    assert found.pop("adapter") == "net"
    assert found.pop("preset") == chosen.get("preset", "paper")
    assert Config(**found) == build(chosen, PRESETS)


def test_the_defaults_it_shows_follow_its_preset() -> None:
    other = written({"preset": "short"}).with_settings({"preset": "paper"}, PRESETS)
    assert other.as_written
    assert other.text == written({"preset": "paper"}).text


@settings(max_examples=60, deadline=None)
@given(chosen_settings)
def test_a_new_file_says_what_was_given(chosen: dict[str, Any]) -> None:
    file = written(chosen)
    assert file.settings == chosen
    assert file.as_written
    again = read(HERE, file.text)
    assert again == file
    assert {key: type(value) for key, value in again.settings.items()} == {k: type(v) for k, v in chosen.items()}
    defaults = uncommented(file.text)
    assert Config(**{key: value for key, value in defaults.items() if key in SETTINGS}) == build(chosen, PRESETS)


@settings(max_examples=60, deadline=None)
@given(chosen_settings, chosen_settings, st.booleans())
def test_settings_are_set_one_after_another(first: dict[str, Any], second: dict[str, Any], edit: bool) -> None:
    file = written(first)
    if edit:
        file = read(HERE, f"# mine\n{file.text}")
    changed = file.with_settings(second)
    assert changed.settings == {**first, **second}
    assert read(HERE, changed.text).settings == changed.settings
    assert changed.as_written is not edit
    assert changed.with_settings(second) is changed
    assert changed.text.count("\n") == file.text.count("\n"), "in place, every one of them"
    keys = {line.lstrip("#").partition(" = ")[0] for line in changed.text.splitlines() if " = " in line}
    assert keys >= SETTINGS.keys()
    lines = zip(file.text.splitlines()[:-1], changed.text.splitlines()[:-1], strict=True)
    other = [before for before, after in lines if before != after]
    assert all(line.lstrip("#").partition(" = ")[0] in second for line in other), "and nothing else"


def test_odd_names_and_numbers_of_numpy() -> None:
    numpy = pytest.importorskip("numpy")
    chosen = {"rho": numpy.float64(0.5), "land_at": numpy.int64(3), "preset": "\u00e9 \"\U0001f600' \\#"}
    text = written(chosen, {chosen["preset"]: {}}).text
    assert read(HERE, text).settings == {**chosen, "rho": 0.5, "land_at": 3}


USERS = """\
# my notes: mode = "strict" was bad, # rho = 2 too
  adapter='net'   # whose

# mode = bounded gave worse numbers
mode = "strict"  # mine
"dual_lr" = '1x'# a string
rho=2.5	#tab
#epsilon = 0.1  # a default
# trace = false
preset = "a#b \\" # c"  # odd
"""


def test_comments_order_and_spacing_survive() -> None:
    file = read(HERE, USERS)
    changes = {
        "mode": "resilient",
        "dual_lr": 3e-4,
        "rho": 1.0,
        "epsilon": 0.2,
        "trace": True,
        "preset": "p#q",
        "land_at": 3,
    }
    assert file.with_settings(changes).text == (
        """\
land_at = 3
# my notes: mode = "strict" was bad, # rho = 2 too
  adapter='net'   # whose

# mode = bounded gave worse numbers
mode = "resilient"  # mine
"dual_lr" = 0.0003# a string
rho=1.0	#tab
epsilon = 0.2  # a default
trace = true
preset = "p#q"  # odd
"""
    )


def test_what_is_set_already_changes_nothing() -> None:
    file = read(HERE, USERS)
    assert file.with_settings({"mode": "strict", "dual_lr": "1x", "rho": 2.5}) is file
    assert file.with_settings({}) is file


def test_a_setting_never_lands_in_a_table_or_in_a_text() -> None:
    text = 'adapter = "net"\n[mode]\n#rho = 1\n'
    file = read(HERE, text)
    with pytest.raises(AceError, match="could not set rho in it; set rho there by hand"):
        file.with_settings({"rho": 2.0})
    assert file.with_settings({"epsilon": 2.0}).text == f"epsilon = 2.0\n{text}"
    several = read(HERE, 'adapter = "net"\nmode = """\nstrict"""\n')
    with pytest.raises(AceError, match="could not set mode in it; set mode there by hand"):
        several.with_settings({"mode": "bounded"})
    escaped = read(HERE, 'adapter = "net"\n"mo\\u0064e" = "strict"\n')
    with pytest.raises(AceError, match="could not set mode in it"):
        escaped.with_settings({"mode": "bounded"})


def test_a_file_is_as_written_until_somebody_edits_it(tmp_path: Path) -> None:
    file = written({"mode": "bounded"})
    text = file.text
    assert is_as_written(text)
    assert is_as_written(file.with_settings({"mode": "resilient", "rho": 2.0}).text)
    assert is_as_written(text.replace("\n", "\r\n"))
    assert is_as_written("\ufeff" + text.replace("\n", "\r\n")), "as some editors save it"
    assert loaded(tmp_path, b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode()).as_written
    lines = text.splitlines(keepends=True)
    for number, line in enumerate(lines):
        for edited in ("", line + "\n", "# mine\n" + line, line.rstrip("\n") + " # mine\n", line + line):
            assert not is_as_written("".join([*lines[:number], edited, *lines[number + 1 :]])), (number, edited)
    assert not is_as_written("")
    assert not is_as_written(text.replace("bounded", "strict"))
    assert not is_as_written(text + text)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_edit_goes_unseen(data: st.DataObject) -> None:
    text = written({"rho": 2.0}).text
    at = data.draw(st.integers(0, len(text)))
    until = data.draw(st.integers(at, min(len(text), at + 3)))
    edited = text[:at] + data.draw(st.text(alphabet='# \n=1"a', max_size=3)) + text[until:]
    assert is_as_written(edited) is (edited == text)


def test_an_edit_stays_an_edit_when_the_tool_sets_something() -> None:
    edited = read(HERE, written().text.replace("# where every gamma starts", "# where they start"))
    assert not edited.as_written
    assert not edited.with_settings({"rho": 2.0}).as_written


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('adapter = "net"\n\nmodus = "strict"\n', r"line 3: unknown setting 'modus': .*did you mean 'mode'"),
        ('adapter = "net"\na = 1\nb.c = 2\n', r"line 2: unknown setting 'a': .*; .* line 3: unknown setting 'b'"),
        ('adapter = "net"\n[rho]\nx = 1\n', r"line 2: rho \{'x': 1\}: expected a finite number"),
        ('adapter = "net"\n[[mode]]\n', r"line 2: unknown mode \[\{\}\]"),
        ('adapter = "net"\nrho.x = 1\n', r"line 2: rho \{'x': 1\}: expected"),
        ('adapter = "net"\n[ other ]\nmode = 1\n', "line 2: unknown setting 'other'"),
        ('adapter = "net"\n"a b" = 1\n', "line 2: unknown setting 'a b'"),
        ('adapter = "net"\nrho = "1"\n', "line 2: rho '1': expected a finite number above 0"),
        ('adapter = "net"\nrho = nan\n', "line 2: rho nan: expected a finite number"),
        ('adapter = "net"\ntrace = 1\n', "line 2: trace 1: expected true or false"),
        ('adapter = "net"\nland_at = 5.0\n', "line 2: land_at 5.0: expected an integer"),
        ('adapter = "net"\nland_at = true\n', "line 2: land_at True: expected an integer"),
        ('adapter = "net"\nrho = 1979-05-27\n', "line 2: rho datetime.date.*: expected a finite number"),
        ('adapter = "net"\n# rho = 1\nmode = "hard"\nrho = 0\n', "line 3: unknown mode 'hard'.*; .* line 4: rho 0"),
        ('adapter = "net"\ndual_lr = "fast"\n', "line 2: dual_lr 'fast': expected a number, or a multiple"),
        ('adapter = "net"\ndual_lr = [1]\n', r"line 2: dual_lr \[1\]: expected a number"),
        ('adapter = "net"\npreset = 5\n', "line 2: preset 5: expected a name in quotes"),
        ('adapter = "net"\npreset = ["paper"]\n', r"line 2: preset \['paper'\]: expected a name in quotes"),
        (
            'adapter = "net"\nmode = strict\n',
            "line 2: not valid TOML: Invalid value \\(a word needs quotes\\); mend it in .*ace.toml",
        ),
        ('adapter = "net"\nmode = "strict\n', "line 2: not valid TOML: "),
        ('adapter = "net"\nrho = 1\nrho = 2\n', "line 3: not valid TOML: Cannot overwrite a value"),
        ('adapter = "net"\nmode = [', "ace.toml at its end: not valid TOML: "),
        ('adapter = "net"\nmode = ' + "[" * 100_000, "ace.toml.*: not valid TOML: "),
        ('adapter = "net"\nrho = ' + "1" * 5000, "ace.toml.*: not valid TOML: "),
        ("", 'ace.toml: expected adapter = "name", found None; mend it in .*ace.toml'),
        ('mode = "strict"\n', 'ace.toml: expected adapter = "name", found None'),
        ('#\nadapter = 5\nmodus = "a"\n', 'ace.toml line 2: expected adapter = "name", found 5'),
        ("mode = 1\n[adapter]\n", 'ace.toml line 2: expected adapter = "name", found {}'),
        (b'adapter = "n\xe9t"\n', r"ace.toml: not valid UTF-8 \(byte 12\); save it as UTF-8"),
        ('adapter = "net"\n'.encode("utf-16"), r"not valid UTF-8 \(byte 0\)"),
        ('adapter = "net"\r\nmode = "hard"\r\n', "line 2: unknown mode 'hard'"),
        ('\ufeffadapter = "net"\nmode = "hard"\n', "line 2: unknown mode 'hard'"),
        ('adapter = "net"\nmode = "a\0"\n', "line 2: not valid TOML"),
    ],
)
def test_mistakes_are_told_with_their_line(tmp_path: Path, text: str | bytes, problem: str) -> None:
    told = refusal(tmp_path, text)
    assert re.search(problem, told), told
    assert NAME in told


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="ace.toml: cannot be read .No such file or directory."):
        load(tmp_path / NAME)
    (tmp_path / NAME).mkdir()
    with pytest.raises(ConfigError, match="ace.toml: cannot be read .Is a directory."):
        load(tmp_path / NAME)


def test_the_line_of_a_setting(tmp_path: Path) -> None:
    file = loaded(tmp_path, '#mode = "off"\nadapter = "net"\n  mode="strict"\n\'rho\' = 1\n"trace" = false\n')
    assert [file.line(key) for key in ("adapter", "mode", "rho", "trace")] == [2, 3, 4, 5]
    assert file.where("mode") == "ace.toml line 3"
    assert file.settings == {"mode": "strict", "rho": 1, "trace": False}


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(max_size=40) | st.text(alphabet='mode=rho"[]#.1\n ', max_size=30).map('adapter = "net"\n{}'.format))
def test_no_file_is_too_odd(tmp_path: Path, text: str) -> None:
    try:
        file = loaded(tmp_path, text)
    except ConfigError as error:
        told = str(error)
    else:
        assert file.adapter == "net"
        try:
            changed = file.with_settings({"mode": "bounded", "epsilon": 0.3})
        except AceError as error:
            told = str(error)
        else:
            assert changed.settings == {**file.settings, "mode": "bounded", "epsilon": 0.3}
            return
    assert NAME in told
    assert "\n" not in told
