"""Settings from environment variables: ``ACE_MODE``, ``ACE_DUAL_LR``, one for every field of `Config`."""

from __future__ import annotations

from .config import SETTINGS
from ..errors import ConfigError

TYPE_CHECKING = False  # as typing has it, without waiting for typing: scripts wait for this module
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

RUNS = ".ace/runs"
"""Where traces go, unless ACE_RUNS names another folder."""
OTHERS = ("ACE_LOAD_PLUGINS", "ACE_QUIET", "ACE_RUNS")
"""Variables that are not settings of a model."""
_WORDS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


def variable(setting: str) -> str:
    return f"ACE_{setting.upper()}"


def settings_in(environment: Mapping[str, str]) -> tuple[dict[str, Any], list[str]]:
    """The settings that are set, and a notice for every variable that looks like one and is none."""
    known = {variable(name): name for name in (*SETTINGS, "preset")}
    found: dict[str, Any] = {}
    notices = []
    for name, text in environment.items():
        if name in known and text.strip():
            found[known[name]] = _value(name, text.strip(), SETTINGS.get(known[name]))
        elif name.startswith("ACE_") and name not in (*known, *OTHERS) and not name.startswith("ACE_UPSTREAM_"):
            near = _near(name, (*known, *OTHERS))
            if near:  # others may have variables of that prefix too
                notices.append(f"unknown variable {name!r} (did you mean {near!r}?): it is ignored")
    return found, notices


def _near(name: str, known: Sequence[str]) -> str | None:
    """The variable that was meant; what comes after the prefix has to be near, which all of them share."""
    import difflib

    close = difflib.get_close_matches(name[4:], [each[4:] for each in known], n=1, cutoff=0.75)
    return f"ACE_{close[0]}" if close else None


def _value(name: str, text: str, field: Any) -> Any:
    if field is None or isinstance(field.default, str):
        return text
    try:
        if isinstance(field.default, bool):
            return _WORDS[text.lower()]
        return type(field.default)(text)
    except (KeyError, ValueError):
        kind = {bool: "1 or 0", int: "an integer", float: "a number"}[type(field.default)]
        raise ConfigError(f"{name}={text!r}: expected {kind}") from None
