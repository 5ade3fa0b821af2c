"""Reads and writes ``ace.toml``, the settings of a patched checkout, with help and defaults in comments."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ConfigError, one_of
from .config import FIT, NONE, PAPER_ONLY, SETTINGS, find_preset

if sys.version_info >= (3, 11):
    from tomllib import loads
else:
    from tomlkit import parse

    def loads(text: str) -> dict[str, Any]:
        return parse(text).unwrap()


NAME = "ace.toml"
_HEAD = """\
# Settings of ACE for the models in this checkout. Written by 'ace-patch {adapter}'; edit it as you like.
# Lines that begin with '#' show defaults: remove the '#' to change one.
# 'ace-patch {adapter}' with options changes settings, and writes this file again without your own comments.
# Environment variables override this file for one run: ACE_MODE=resilient python {script} ...

adapter = "{adapter}"

# the adapter's preset to start from: {presets}
"""
_SIGNATURE = "# as written by ace-patch, {}: once you edit the file, 'ace-patch revert' keeps it\n"


@dataclass(frozen=True)
class SettingsFile:
    """The content of an ``ace.toml``."""

    path: Path
    text: str
    adapter: str
    settings: Mapping[str, Any]  # settings in the file: ``preset`` and fields of `Config`

    def where(self, key: str) -> str:
        """Return the file's name and the line number of a top-level key or table; line 1 if there is none."""
        found = re.search(rf"""^[ \t]*\[*[ \t]*["']?{re.escape(key)}["']?[ \t]*[=.\]]""", self.text, re.MULTILINE)
        line = self.text.count("\n", 0, found.start()) + 1 if found else 1
        return f"{self.path.name} line {line}"


def is_as_written(text: str) -> bool:
    """Return whether the hash in the last line matches this text: it was not edited after ace-patch wrote it."""
    text = text.replace("\r\n", "\n")
    return text == _sign(text.rpartition(_SIGNATURE.partition("{")[0])[0])


def _sign(body: str) -> str:
    import hashlib  # slow to import, and every patched script imports this module

    return body + _SIGNATURE.format(hashlib.sha256(body.encode()).hexdigest()[:16])


def is_ours(text: str) -> bool:
    """Return whether this is the text of a settings file of ace-patch. Other programs may use the name ace.toml too."""
    return re.search(r"^adapter\s*=", text, re.MULTILINE) is not None


def read(path: Path, content: bytes | None = None) -> SettingsFile:
    """Parse a settings file, or its ``content`` if that is given. The keys are checked, the values are not."""
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
        raise ConfigError(f"{path.name}: not valid TOML: {what}{hint}; correct it in {path}") from error
    adapter = values.pop("adapter", None)
    file = SettingsFile(path, text, adapter, values)
    if not isinstance(adapter, str):
        raise ConfigError(f'{file.where("adapter")}: expected adapter = "name", found {adapter!r}; edit {path}')
    unknown = [key for key in values if key not in SETTINGS and key != "preset"]
    if unknown:
        known = [*SETTINGS, "adapter", "preset"]
        raise ConfigError("; ".join(f"{file.where(key)}: {one_of('setting', key, known)}" for key in unknown))
    return file


def write(
    path: Path, adapter: str, script: str, settings: Mapping[str, Any], presets: Mapping[str, Any]
) -> SettingsFile:
    """Return a new file, not yet on disk, with these valid settings and with all other defaults in comments."""
    preset, base = find_preset(settings, presets)
    defaults = {"preset": preset} | {name: field.default for name, field in SETTINGS.items()} | dict(base)

    def entry(key: str) -> str:
        value = json.dumps({**defaults, **settings}[key], ensure_ascii=False)  # valid TOML too
        return f"{'' if key in settings else '#'}{key} = {value}\n"

    names = ", ".join(sorted({*presets, FIT, NONE}))
    parts = [_HEAD.format(adapter=adapter, script=script, presets=names) + entry("preset")]
    for name, field in SETTINGS.items():
        if name not in PAPER_ONLY or name in settings or settings.get("loop", defaults["loop"]) == "paper":
            parts.append(f"# {field.metadata['help']}\n{entry(name)}")
    return SettingsFile(path, _sign("\n".join(parts) + "\n"), adapter, dict(settings))


def update(file: SettingsFile, changes: Mapping[str, Any], script: str, presets: Mapping[str, Any]) -> SettingsFile:
    """Return the file, not yet on disk, with these valid settings. If nothing changes, the text is kept."""
    settings = {**file.settings, **changes}
    return file if settings == file.settings else write(file.path, file.adapter, script, settings, presets)
