"""Named sets of settings, as people write them: ``off,strict,mine:horizon=0.1,rho=2x``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import AceError, ConfigError, one_of
from ..settings.config import KINDS

KNOWN: Mapping[str, Mapping[str, Any]] = {
    "off": {"mode": "off"},
    "strict": {"mode": "strict"},
    "bounded": {"mode": "bounded"},
    "resilient": {"mode": "resilient"},
    "scheduled": {"mode": "scheduled"},
    "paper": {"preset": "paper"},
    "fit": {"preset": "fit"},
}
"""Names that need no settings. ``fit`` is what the adapter does when nothing is said."""
_NAME = re.compile(r"[A-Za-z0-9][\w.+-]*")


def parse_runs(text: str) -> dict[str, dict[str, Any]]:
    """Name -> settings, in the order of the text. A comma that is followed by ``key=value`` goes on with a run."""
    pieces: list[str] = []
    for piece in text.split(","):
        goes_on = "=" in piece and ":" not in piece.partition("=")[0]
        if goes_on and pieces and ":" in pieces[-1]:
            pieces[-1] += f",{piece}"
        else:
            pieces.append(piece.strip())
    runs: dict[str, dict[str, Any]] = {}
    for piece in pieces:
        name, colon, words = piece.partition(":")
        _check_name(name, runs)
        if not colon and name not in KNOWN:
            raise AceError(one_of("run", name, KNOWN, do="or give it settings, as in mine:horizon=0.1,rho=2x"))
        runs[name] = _settings(name, words.split(",")) if colon else dict(KNOWN[name])
    return runs


def runs_of(table: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The same of a table of a file: name -> settings, an empty table where the name says it all."""
    runs: dict[str, dict[str, Any]] = {}
    for name, settings in table.items():
        _check_name(name, runs)
        if not isinstance(settings, Mapping):
            raise AceError(f"run {name!r}: expected a table of settings, found {settings!r}")
        if not settings and name not in KNOWN:
            raise AceError(one_of("run", name, KNOWN, do="or give it settings"))
        _check_keys(name, list(settings))
        runs[name] = dict(settings or KNOWN[name])
    return runs


def _check_name(name: str, runs: Mapping[str, Any]) -> None:
    if not _NAME.fullmatch(name):
        raise AceError(f"run {name!r}: expected a name of letters, digits and . _ + -, then ':' and settings if any")
    if name in runs:
        raise AceError(f"run {name!r} is there twice: expected each name once; call the second one something else")


def _check_keys(name: str, keys: Sequence[str]) -> None:
    for key in keys:
        if key not in (*KINDS, "preset"):
            raise AceError(f"run {name!r}: " + one_of("setting", key, [*KINDS, "preset"]))


def _settings(run: str, words: Sequence[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for word in words:
        key, equals, text = word.partition("=")
        key, text = key.strip(), text.strip()
        if not equals or not text:
            raise AceError(f"run {run!r}: expected key=value, found {word!r}")
        _check_keys(run, [key])
        if key in found:
            raise AceError(f"run {run!r}: {key} is there twice")
        try:
            found[key] = text if key == "preset" else KINDS[key].parse(text)
        except ValueError:
            raise ConfigError(f"run {run!r}: {key} {text!r}: expected {KINDS[key].expected}") from None
    return found
