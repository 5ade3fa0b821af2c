"""Settings from environment variables: ``ACE_MODE``, ``ACE_DUAL_LR``, one for every field of `Config`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import ConfigError
from .config import KINDS, SETTINGS

RUNS = ".ace/runs"
"""Where traces go, unless ACE_RUNS names another folder."""
OTHERS = ("ACE_LOAD_PLUGINS", "ACE_QUIET", "ACE_RUN", "ACE_RUNS")
"""Variables that are not settings of a model."""


def variable(setting: str) -> str:
    return f"ACE_{setting.upper()}"


def settings_in(environment: Mapping[str, str]) -> tuple[dict[str, Any], list[str]]:
    """The settings that are set, and a notice for every variable whose name is nearly that of a setting."""
    known = {variable(name): name for name in (*SETTINGS, "preset")}
    found: dict[str, Any] = {}
    notices = []
    for name, text in environment.items():
        if name in known and text.strip():
            found[known[name]] = _value(name, text.strip(), known[name])
        elif name.startswith("ACE_") and name not in (*known, *OTHERS) and not name.startswith("ACE_UPSTREAM_"):
            near = _near(name, (*known, *OTHERS))
            if near:  # other programs may have variables of that prefix too
                notices.append(f"unknown variable {name!r} (did you mean {near!r}?): it is ignored")
    return found, notices


def _value(name: str, text: str, setting: str) -> Any:
    if setting == "preset":
        return text
    try:
        return KINDS[setting].parse(text)
    except ValueError:
        raise ConfigError(f"{name}={text!r}: expected {KINDS[setting].text}") from None


def _near(name: str, known: Sequence[str]) -> str | None:
    """The variable that was meant. They are compared without the prefix, which all of them share."""
    import difflib  # only for a mistake: every script that is patched waits for this module

    close = difflib.get_close_matches(name[4:], [each[4:] for each in known], n=1, cutoff=0.75)
    return f"ACE_{close[0]}" if close else None
