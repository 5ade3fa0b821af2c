"""``ace.toml``: the settings of a patched checkout, in a file that explains itself and that people edit."""

from __future__ import annotations

import numbers
import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from .config import SETTINGS, Config, build
from ..errors import AceError, ConfigError, one_of

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TYPE_CHECKING = False  # as typing has it, without waiting for typing: scripts wait for this module
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

NAME = "ace.toml"
_SIGNED = re.compile(r"^# as written by ace-patch, ([0-9a-f]{16}): (.*)\n\Z", re.MULTILINE)
_VALUE = r"""("(?:[^"\\\n]|\\.)*"|'[^'\n]*'|[^\s#"']+)"""
_HEAD = """\
# How ACE trains the models of this checkout. Written by 'ace-patch {adapter}', yours to edit.
# A line that begins with '#' shows a default; take the '#' away to set it.
# For one run the environment goes before this file: ACE_MODE=resilient python {script} ...
"""


@dataclass(frozen=True)
class SettingsFile:
    """What an ``ace.toml`` says."""

    path: Path
    text: str
    adapter: str
    settings: Mapping[str, Any]
    """``preset`` and fields of `Config`; what is not here is left to the preset."""

    def line(self, key: str) -> int:
        return _line_of(self.text, key)

    def where(self, key: str) -> str:
        """For errors: where this setting stands."""
        return f"{self.path.name} line {self.line(key)}"

    @property
    def as_written(self) -> bool:
        return is_as_written(self.text)

    def with_settings(self, changes: Mapping[str, Any], presets: Mapping[str, Any] | None = None) -> SettingsFile:
        """The same file with these settings in it; everything else stays as it is, comments and order too.

        The defaults it shows are those of its preset, if ``presets`` are given.
        """
        changes = {key: value for key, value in changes.items() if self.settings.get(key) != value}
        if not changes:
            return self
        body = _SIGNED.sub("", self.text) if self.as_written else self.text
        for key, value in changes.items():
            body = _with_setting(body, key, value)
        if "preset" in changes and presets is not None:
            body = _with_defaults(body, build({"preset": changes["preset"]}, presets))
        text = _signed(body) if self.as_written else body
        changed = replace(self, text=text, settings={**self.settings, **changes})
        try:
            again: object = read(self.path, text).settings
        except ConfigError:
            again = None
        if again != changed.settings:
            keys = ", ".join(changes)
            raise AceError(f"{self.path}: could not set {keys} in it; set {keys} there by hand")
        return changed


def is_as_written(text: str) -> bool:
    """Whether nobody but ace-patch has written this file."""
    text = text.replace("\r\n", "\n").removeprefix("\ufeff")
    found = _SIGNED.search(text)
    return found is not None and found[1] == _checksum(text[: found.start()], found[2])


def is_ours(text: str) -> bool:
    """Whether this is a settings file of a patched checkout at all: others may have an ace.toml too."""
    return re.search(r"^adapter\s*=", text, re.MULTILINE) is not None or is_as_written(text)


def new(path: Path, adapter: str, script: str, settings: Mapping[str, Any], presets: Mapping[str, Any]) -> SettingsFile:
    """A file with every setting and its default, and with these ones set."""
    start = build({key: value for key, value in settings.items() if key == "preset"}, presets)
    chosen = settings.get("preset") or ("paper" if "paper" in presets else "none")
    names = ", ".join([*presets, "none"])
    parts = [
        _HEAD.format(adapter=adapter, script=script),
        f"adapter = {_literal(adapter)}\n",
        f"# the adapter's named settings to start from: {names}\n{_entry('preset', settings, chosen)}",
    ]
    for name, field in SETTINGS.items():
        parts.append(f"# {field.metadata['help']}\n{_entry(name, settings, getattr(start, name))}")
    text = _signed("\n".join(parts) + "\n")
    return SettingsFile(path, text, adapter, dict(settings))


def unchecked(path: Path) -> SettingsFile:
    """Read a file; its keys are known, its values may be wrong."""
    return parsed(path, content_of(path))


def content_of(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error


def parsed(path: Path, content: bytes) -> SettingsFile:
    """What the bytes of a file say, as far as its keys go."""
    try:
        text = content.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not valid UTF-8 (byte {error.start}); save it as UTF-8") from error
    return read(path, text)


def read(path: Path, text: str) -> SettingsFile:
    """What a text says, as far as its keys go."""
    try:
        values = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        what, _, where = str(error).partition(" (at ")
        line = where.rstrip(")").partition(",")[0] if where.startswith("line") else "at its end" if where else ""
        place = f" {line}" if line else ""
        hint = " (a word needs quotes)" if what == "Invalid value" else ""
        raise ConfigError(f"{path.name}{place}: not valid TOML: {what}{hint}; mend it in {path}") from error
    adapter = values.pop("adapter", None)
    if not isinstance(adapter, str):
        line = f" line {_line_of(text, 'adapter')}" if adapter is not None else ""
        raise ConfigError(f'{path.name}{line}: expected adapter = "name", found {adapter!r}; mend it in {path}')
    unknown = [key for key in values if key not in SETTINGS and key != "preset"]
    if unknown:
        known = [*SETTINGS, "adapter", "preset"]
        raise ConfigError(
            "; ".join(f"{path.name} line {_line_of(text, k)}: {one_of('setting', k, known)}" for k in unknown)
        )
    if not isinstance(values.get("preset", ""), str):
        found = f"{path.name} line {_line_of(text, 'preset')}"
        raise ConfigError(f"{found}: preset {values['preset']!r}: expected a name in quotes; mend it in {path}")
    return SettingsFile(path, text, adapter, values)


def checked(settings: Mapping[str, Any], presets: Mapping[str, Any] | None, where: Any) -> Config:
    """The config of these settings; ``where(key)`` says in errors where a setting stands."""
    try:
        return build(settings, presets)
    except ConfigError as error:
        if not error.problems:
            raise
        told = (f"{where(key)}: {text}" if key in settings else text for key, text in error.problems)
        raise ConfigError("; ".join(told), error.problems) from None


def _entry(key: str, settings: Mapping[str, Any], default: Any) -> str:
    return f"{key} = {_literal(settings[key])}\n" if key in settings else f"#{key} = {_literal(default)}\n"


def _literal(value: Any) -> str:
    """As TOML: what JSON writes for strings and booleans; numbers as Python writes them."""
    import json

    if isinstance(value, (str, bool)):
        return json.dumps(value, ensure_ascii=False)
    # Not repr of the value itself, which may be numpy's.
    return repr(int(value) if isinstance(value, numbers.Integral) else float(value))


def _with_setting(text: str, key: str, value: Any) -> str:
    name = rf"""(?:{key}|"{key}"|'{key}')[ \t]*=[ \t]*"""
    rest = r"(?=[ \t]*(?:#.*)?$)"
    # In its place; in that of its default; before everything else, since somebody may have opened a table further down.
    for pattern in (rf"^([ \t]*{name}){_VALUE}{rest}", rf"^#[ \t]?({name}){_VALUE}{rest}"):
        text, count = re.subn(pattern, lambda found: found[1] + _literal(value), text, count=1, flags=re.MULTILINE)
        if count:
            return text
    return f"{key} = {_literal(value)}\n{text}"


def _with_defaults(text: str, defaults: Config) -> str:
    """The lines that show a default, as ace-patch writes them, with these ones."""
    for name in SETTINGS:
        if found := re.search(rf"^#{name} = .*$", text, re.MULTILINE):
            entry = f"#{name} = {_literal(getattr(defaults, name))}"
            text = text[: found.start()] + entry + text[found.end() :]
    return text


def _line_of(text: str, key: str) -> int:
    """Where a top-level key, or the table of that name, stands."""
    name = re.escape(key)
    found = re.search(rf"""^[ \t]*\[*[ \t]*["']?{name}["']?[ \t]*[=.\]]""", text, re.MULTILINE)
    return text.count("\n", 0, found.start()) + 1 if found else 1


def _signed(body: str) -> str:
    words = "once you edit the file, 'ace-patch revert' keeps it"
    return f"{body}# as written by ace-patch, {_checksum(body, words)}: {words}\n"


def _checksum(body: str, words: str) -> str:
    import hashlib

    return hashlib.sha256(f"{body}{words}".encode()).hexdigest()[:16]
