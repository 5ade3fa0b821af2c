"""The settings of a run, from a file, the environment and options. Each overrides the one before.

Every field of `Config` has an environment variable: ``ACE_MODE``, ``ACE_DUAL_LR`` and so on.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from typing import Any

from ..errors import ConfigError
from .config import KINDS, SETTINGS, Config, build, preset
from .toml_file import SettingsFile

HOME = ".ace"
"""The folder of what runs leave behind."""
RUNS = f"{HOME}/runs"
"""Where traces go, unless ACE_RUNS names another folder."""
OTHERS = ("ACE_LOAD_PLUGINS", "ACE_QUIET", "ACE_RUN", "ACE_RUNS", "ACE_SEED_SHIFT")
"""Variables that are not settings of a model."""


def variable(setting: str) -> str:
    return f"ACE_{setting.upper()}"


VARIABLES = {variable(name): name for name in (*SETTINGS, "preset")}


def resolve(
    presets: Mapping[str, Mapping[str, Any]],
    *,
    file: SettingsFile | None = None,
    options: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] = os.environ,
) -> Config:
    """The config of all sources, over the adapter's preset. Errors name where the setting stands."""
    in_file = file.settings if file is not None else {}
    settings = {**in_file, **settings_in(environment), **(options or {})}
    try:
        return build(settings, presets)
    except ConfigError as error:
        origin = origins(presets, file=file, options=options, environment=environment)
        told = [f"{origin[key]}: {text}" if key in origin else text for key, text in error.problems]
        raise ConfigError("; ".join(told), error.problems) from None


def origins(
    presets: Mapping[str, Mapping[str, Any]],
    *,
    file: SettingsFile | None = None,
    options: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] = os.environ,
) -> dict[str, str]:
    """Where every setting comes from that is not left at its default."""
    in_file = file.settings if file is not None else {}
    variables = settings_in(environment)
    found: dict[str, str] = {}
    with contextlib.suppress(ConfigError):  # a preset that there is not
        name, base = preset({**in_file, **variables, **(options or {})}, presets)
        found.update(dict.fromkeys(base, f"preset {name}"))
    if file is not None:
        found.update({key: file.where(key) for key in in_file})
    found.update({key: variable(key) for key in variables})
    found.update({key: option(key) for key in options or {}})
    return found


def option(setting: str) -> str:
    return f"--{setting.replace('_', '-')}"


def settings_in(environment: Mapping[str, str]) -> dict[str, Any]:
    """The settings that are set. A variable that is empty sets nothing."""
    found: dict[str, Any] = {}
    for name, setting in VARIABLES.items():
        text = environment.get(name, "").strip()
        if not text:
            continue
        try:
            found[setting] = text if setting == "preset" else KINDS[setting].parse(text)
        except ValueError:
            raise ConfigError(f"{name}={text!r}: expected {KINDS[setting].expected}") from None
    return found


def misspelt(environment: Mapping[str, str]) -> list[str]:
    """A notice for every variable whose name is nearly that of a setting. Other programs have an ACE_ too."""
    known = {*VARIABLES, *OTHERS}
    odd = [name for name in environment if name.startswith("ACE_") and name not in known]
    if not odd:
        return []
    import difflib  # only for a mistake: every script that is patched waits for this module

    notices = []
    for name in odd:
        # Compared without the prefix, which all of them share.
        near = difflib.get_close_matches(name[4:], sorted(each[4:] for each in known), n=1, cutoff=0.75)
        if near and not name.startswith("ACE_UPSTREAM_"):
            notices.append(f"unknown variable {name!r} (did you mean {'ACE_' + near[0]!r}?): it is ignored")
    return notices
