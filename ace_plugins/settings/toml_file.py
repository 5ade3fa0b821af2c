"""Reads, writes and edits ``ace.toml``, the settings of a patched checkout.

A new file explains every setting and shows its default in a comment. In a file that the user edited, only the
lines of settings that change are edited. tomlkit is imported only where it is needed, because every patched script
imports this module.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..errors import AceError, ConfigError, one_of
from .config import FIT, FORMER_LOOPS, NONE, PAPER_ONLY, SETTINGS, find_preset

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
# Environment variables override this file for one run: ACE_MODE=resilient python {script} ...

adapter = {name}

# the adapter's preset to start from: {presets}
"""
_SIGNATURE = "# as written by ace-patch, {}: once you edit the file, 'ace-patch revert' keeps it\n"
_DEFAULT = re.compile(r'#( ?)(\w+) = ("[^"]*"|[^\s#"]+)')
"""Pattern of a comment that shows a default. The optional space comes from editors that comment out a line."""


@dataclass(frozen=True)
class SettingsFile:
    """The content of an ``ace.toml``."""

    path: Path
    text: str
    adapter: str
    settings: Mapping[str, Any]
    """Settings in the file: ``preset`` and fields of `Config`."""

    def where(self, key: str) -> str:
        """Return the file's name and the line number of a setting, for errors."""
        return f"{self.path.name} line {_line_of(self.text, key)}"

    @property
    def as_written(self) -> bool:
        """True if nobody edited the file since ace-patch wrote it."""
        return is_as_written(self.text)


def is_as_written(text: str) -> bool:
    """Return whether nobody edited this text since ace-patch wrote it, judging by the hash in its last line."""
    text = text.replace("\r\n", "\n")
    return text == _sign(text.rpartition(_SIGNATURE.partition("{")[0])[0])


def _sign(body: str) -> str:
    import hashlib  # slow to import, and every patched script imports this module

    return body + _SIGNATURE.format(hashlib.sha256(body.encode()).hexdigest()[:16])


def is_ours(text: str) -> bool:
    """Return whether a file with this text belongs to ace-patch. Other programs may use the name ace.toml as well."""
    return re.search(r"^adapter\s*=", text, re.MULTILINE) is not None


def read(path: Path, content: bytes | None = None) -> SettingsFile:
    """Parse a settings file, or ``content`` instead if it is given. The keys are checked, the values are not."""
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
    if not isinstance(adapter, str):
        line = f" line {_line_of(text, 'adapter')}" if adapter is not None else ""
        raise ConfigError(f'{path.name}{line}: expected adapter = "name", found {adapter!r}; correct it in {path}')
    file = SettingsFile(path, text, adapter, values)
    unknown = [key for key in values if key not in SETTINGS and key != "preset"]
    if unknown:
        known = [*SETTINGS, "adapter", "preset"]
        raise ConfigError("; ".join(f"{file.where(key)}: {one_of('setting', key, known)}" for key in unknown))
    return file


def _line_of(text: str, key: str) -> int:
    """Return the line number of a top-level key or table; 1 if it is not found."""
    name = re.escape(key)
    found = re.search(rf"""^[ \t]*\[*[ \t]*["']?{name}["']?[ \t]*[=.\]]""", text, re.MULTILINE)
    return text.count("\n", 0, found.start()) + 1 if found else 1


def write(
    path: Path, adapter: str, script: str, settings: Mapping[str, Any], presets: Mapping[str, Any]
) -> SettingsFile:
    """Return a new file, not yet on disk, with these valid settings and with all other defaults in comments."""
    settings = _rename_loops(settings)
    defaults = _defaults(settings, presets)
    names = ", ".join(sorted({*presets, FIT, NONE}))
    head = _HEAD.format(adapter=adapter, script=script, name=_literal(adapter), presets=names)
    parts = [head + _entry("preset", settings, defaults)]
    for name, field in SETTINGS.items():
        if name not in PAPER_ONLY or name in settings or settings.get("loop", defaults["loop"]) == "paper":
            parts.append(f"# {field.metadata['help']}\n{_entry(name, settings, defaults)}")
    return SettingsFile(path, _sign("\n".join(parts) + "\n"), adapter, dict(settings))


def update(file: SettingsFile, changes: Mapping[str, Any], script: str, presets: Mapping[str, Any]) -> SettingsFile:
    """Return the file, not yet on disk, with these valid settings. An edited file keeps its comments and order."""
    changes = {key: value for key, value in _rename_loops(changes).items() if file.settings.get(key) != value}
    if not changes:
        return file
    settings = {**file.settings, **changes}
    if file.as_written:
        return write(file.path, file.adapter, script, settings, presets)
    from tomlkit.exceptions import TOMLKitError

    try:
        text = _edit(file.text, changes, _defaults(settings, presets) if "preset" in changes else {})
        if read(file.path, text.encode()).settings != settings:
            raise ValueError(text)
    except (ValueError, TOMLKitError) as error:
        keys = ", ".join(changes)
        raise AceError(f"{file.path}: could not set {keys} in it; set {keys} there by hand") from error
    return replace(file, text=text, settings=settings)


def _edit(text: str, changes: Mapping[str, Any], defaults: Mapping[str, Any]) -> str:
    """Return the text with each setting on its line, or on the line of its default, or at the top; update defaults."""
    import tomlkit
    from tomlkit.items import Comment

    document = tomlkit.parse(text)
    missing = {key: value for key, value in changes.items() if key not in document}
    for key in changes.keys() - missing.keys():
        document[key] = changes[key]
    body = document.body
    for index, (_, item) in enumerate(body):
        shown = _DEFAULT.fullmatch(item.as_string().strip()) if isinstance(item, Comment) else None
        if shown is None:
            continue
        space, key, _ = shown.groups()
        if key in missing:
            entry = tomlkit.item(missing.pop(key))
            entry.trivia.trail = item.trivia.trail
            body[index] = (tomlkit.key(key), entry)
        elif key in defaults and not space:
            item.trivia.comment = f"#{key} = {_literal(defaults[key])}"
    top = "".join(f"{key} = {_literal(value)}\n" for key, value in missing.items())
    return top + document.as_string()


def _rename_loops(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Replace a former name of the loop by its current name, so that no new file contains a former name."""
    return {key: FORMER_LOOPS.get(value, value) if key == "loop" else value for key, value in settings.items()}


def _defaults(settings: Mapping[str, Any], presets: Mapping[str, Any]) -> dict[str, Any]:
    """Return the default of every setting, given the preset that ``settings`` selects."""
    name, base = find_preset(settings, presets)
    return {"preset": name} | {name: field.default for name, field in SETTINGS.items()} | _rename_loops(base)


def _entry(key: str, settings: Mapping[str, Any], defaults: Mapping[str, Any]) -> str:
    return f"{key} = {_literal(settings[key])}\n" if key in settings else f"#{key} = {_literal(defaults[key])}\n"


def _literal(value: Any) -> str:
    import tomlkit

    return str(tomlkit.item(value).as_string())
