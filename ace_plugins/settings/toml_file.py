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
_SIGNATURE = "# as written by ace-patch, {}: once you edit the file, 'ace-patch revert' keeps it\n"


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
    import hashlib  # here: every script that is patched waits for this module

    return body + _SIGNATURE.format(hashlib.sha256(body.encode()).hexdigest()[:16])


def is_as_written(text: str) -> bool:
    """Whether nobody but ace-patch has written this file."""
    text = text.replace("\r\n", "\n")
    return text == signed(text.rpartition(_SIGNATURE.partition("{")[0])[0])


def is_ours(text: str) -> bool:
    """Whether this is a settings file of a patched checkout at all: others may have an ace.toml too."""
    return re.search(r"^adapter\s*=", text, re.MULTILINE) is not None


def read(path: Path, content: bytes | None = None) -> SettingsFile:
    """What a file says; its keys are known, its values may be wrong. ``content`` if it was read already."""
    try:
        text = (path.read_bytes() if content is None else content).decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not valid UTF-8 (byte {error.start}); save it as UTF-8") from error
    try:
        values: dict[str, Any] = loads(text)
    except (ValueError, RecursionError) as error:
        hint = " (a word needs quotes)" if "Invalid value" in str(error) else ""
        what = " ".join(str(error).split())
        raise ConfigError(f"{path.name}: not valid TOML: {what}{hint}; mend it in {path}") from error
    adapter = values.pop("adapter", None)
    if not isinstance(adapter, str):
        line = f" line {_line_of(text, 'adapter')}" if adapter is not None else ""
        raise ConfigError(f'{path.name}{line}: expected adapter = "name", found {adapter!r}; mend it in {path}')
    file = SettingsFile(path, text, adapter, values)
    unknown = [key for key in values if key not in SETTINGS and key != "preset"]
    if unknown:
        known = [*SETTINGS, "adapter", "preset"]
        raise ConfigError("; ".join(f"{file.where(key)}: {one_of('setting', key, known)}" for key in unknown))
    return file


def _line_of(text: str, key: str) -> int:
    """Where a top-level key, or the table of that name, stands."""
    name = re.escape(key)
    found = re.search(rf"""^[ \t]*\[*[ \t]*["']?{name}["']?[ \t]*[=.\]]""", text, re.MULTILINE)
    return text.count("\n", 0, found.start()) + 1 if found else 1
