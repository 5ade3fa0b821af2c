"""``ace.toml``: the settings of a patched checkout, in a file that explains itself and that people edit."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ConfigError, one_of
from .config import SETTINGS

if sys.version_info >= (3, 11):
    from tomllib import loads
else:
    from tomlkit import parse

    def loads(text: str) -> dict[str, Any]:
        return parse(text).unwrap()


NAME = "ace.toml"
_SIGNED = re.compile(r"^# as written by ace-patch, ([0-9a-f]{16}): (.*)\n\Z", re.MULTILINE)
_SIGNATURE = "once you edit the file, 'ace-patch revert' keeps it"
# "Invalid value (at line 2, column 8)" of tomllib, "... at line 2 col 8" of tomlkit.
_AT_LINE = re.compile(r"(.*?) \(?at (line \d+|end of document).*", re.DOTALL)


@dataclass(frozen=True)
class SettingsFile:
    """What an ``ace.toml`` says."""

    path: Path
    text: str
    adapter: str
    settings: Mapping[str, Any]
    """``preset`` and fields of `Config`; what is not here is left to the preset."""

    def where(self, key: str) -> str:
        """For errors: where this setting stands."""
        return f"{self.path.name} line {_line_of(self.text, key)}"

    @property
    def as_written(self) -> bool:
        return is_as_written(self.text)


def signed(body: str) -> str:
    """The text with a last line by which `is_as_written` knows it."""
    return f"{body}# as written by ace-patch, {_checksum(body, _SIGNATURE)}: {_SIGNATURE}\n"


def is_as_written(text: str) -> bool:
    """Whether nobody but ace-patch has written this file."""
    text = text.replace("\r\n", "\n").removeprefix("\ufeff")
    found = _SIGNED.search(text)
    return found is not None and found[1] == _checksum(text[: found.start()], found[2])


def is_ours(text: str) -> bool:
    """Whether this is a settings file of a patched checkout at all: others may have an ace.toml too."""
    return re.search(r"^adapter\s*=", text, re.MULTILINE) is not None or is_as_written(text)


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
        values: dict[str, Any] = loads(text)
    except (ValueError, RecursionError) as error:
        found = _AT_LINE.fullmatch(str(error))
        what, line = (found[1], found[2]) if found else (str(error), "")
        place = f" {line.replace('end of document', 'at its end')}" if line else ""
        hint = " (a word needs quotes)" if what == "Invalid value" else ""
        raise ConfigError(f"{path.name}{place}: not valid TOML: {what}{hint}; mend it in {path}") from error
    adapter = values.pop("adapter", None)
    if not isinstance(adapter, str):
        line = f" line {_line_of(text, 'adapter')}" if adapter is not None else ""
        raise ConfigError(f'{path.name}{line}: expected adapter = "name", found {adapter!r}; mend it in {path}')
    file = SettingsFile(path, text, adapter, values)
    unknown = [key for key in values if key not in SETTINGS and key != "preset"]
    if unknown:
        known = [*SETTINGS, "adapter", "preset"]
        raise ConfigError("; ".join(f"{file.where(key)}: {one_of('setting', key, known)}" for key in unknown))
    if not isinstance(values.get("preset", ""), str):
        told = f"preset {values['preset']!r}: expected a name in quotes"
        raise ConfigError(f"{file.where('preset')}: {told}; mend it in {path}")
    return file


def _line_of(text: str, key: str) -> int:
    """Where a top-level key, or the table of that name, stands."""
    name = re.escape(key)
    found = re.search(rf"""^[ \t]*\[*[ \t]*["']?{name}["']?[ \t]*[=.\]]""", text, re.MULTILINE)
    return text.count("\n", 0, found.start()) + 1 if found else 1


def _checksum(body: str, words: str) -> str:
    import hashlib  # here: every script that is patched waits for this module

    return hashlib.sha256(f"{body}{words}".encode()).hexdigest()[:16]
