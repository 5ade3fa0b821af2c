"""Writing ``ace.toml``, and setting settings in one that somebody edited. Only ``ace-patch`` needs this."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import tomlkit
from tomlkit.exceptions import TOMLKitError
from tomlkit.items import Comment

from ..errors import AceError
from .config import FIT, FORMER_LOOPS, NONE, PAPER_ONLY, SETTINGS, build, preset
from .toml_file import SettingsFile, read, signed

_HEAD = """\
# How ACE trains the models of this checkout. Written by 'ace-patch {adapter}', yours to edit.
# A line that begins with '#' shows a default; take the '#' away to set it.
# For one run the environment goes before this file: ACE_MODE=resilient python {script} ...

adapter = {name}

# the adapter's named settings to start from: {presets}
"""
_SHOWN = re.compile(r'#( ?)(\w+) = ("[^"]*"|[^\s#"]+)')
"""A comment that shows a default, with the space that editors add when they comment a line out."""


def written(
    path: Path, adapter: str, script: str, settings: Mapping[str, Any], presets: Mapping[str, Any]
) -> SettingsFile:
    """A new file that explains every setting and shows its default, with these settings set."""
    settings = _current(settings)
    defaults = _defaults(settings, presets)
    names = ", ".join(sorted({*presets, FIT, NONE}))
    head = _HEAD.format(adapter=adapter, script=script, name=_literal(adapter), presets=names)
    parts = [head + _entry("preset", settings, defaults)]
    for name, field in SETTINGS.items():
        if name not in PAPER_ONLY or name in settings or settings.get("loop", defaults["loop"]) == "paper":
            parts.append(f"# {field.metadata['help']}\n{_entry(name, settings, defaults)}")
    return SettingsFile(path, signed("\n".join(parts) + "\n"), adapter, dict(settings))


def updated(file: SettingsFile, changes: Mapping[str, Any], script: str, presets: Mapping[str, Any]) -> SettingsFile:
    """The file with these settings in it. If somebody edited it, comments and order stay."""
    changes = {key: value for key, value in _current(changes).items() if file.settings.get(key) != value}
    if not changes:
        return file
    merged = {**file.settings, **changes}
    if file.as_written:
        return written(file.path, file.adapter, script, merged, presets)
    try:
        text = _edited(file.text, changes, _defaults(merged, presets) if "preset" in changes else {})
        if read(file.path, text.encode()).settings != merged:
            raise ValueError(text)
    except (ValueError, TOMLKitError) as error:
        keys = ", ".join(changes)
        raise AceError(f"{file.path}: could not set {keys} in it; set {keys} there by hand") from error
    return replace(file, text=text, settings=merged)


def _edited(text: str, changes: Mapping[str, Any], defaults: Mapping[str, Any]) -> str:
    """The text with each change in its place, or in that of the default it shows, or at the top; and other defaults."""
    document = tomlkit.parse(text)
    missing = {key: value for key, value in changes.items() if key not in document}
    for key in changes.keys() - missing.keys():
        document[key] = changes[key]
    body = document.body
    for index, (_, item) in enumerate(body):
        shown = _SHOWN.fullmatch(item.as_string().strip()) if isinstance(item, Comment) else None
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


def _current(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings with a former name of the loop replaced, so that no new file has one."""
    return {key: FORMER_LOOPS.get(value, value) if key == "loop" else value for key, value in settings.items()}


def _defaults(settings: Mapping[str, Any], presets: Mapping[str, Any]) -> dict[str, Any]:
    """What holds for whatever is not set."""
    start = {key: value for key, value in settings.items() if key == "preset"}
    config = build(start, presets)
    return {"preset": preset(start, presets)[0]} | {name: getattr(config, name) for name in SETTINGS}


def _entry(key: str, settings: Mapping[str, Any], defaults: Mapping[str, Any]) -> str:
    return f"{key} = {_literal(settings[key])}\n" if key in settings else f"#{key} = {_literal(defaults[key])}\n"


def _literal(value: Any) -> str:
    return str(tomlkit.item(value).as_string())
