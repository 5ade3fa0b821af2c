"""The settings of a run, from a file, the environment and options. Each overrides the one before."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError
from .config import Config, build, preset
from .environment import settings_in, variable
from .file import SettingsFile


@dataclass(frozen=True)
class Resolved:
    """The settings of a run, and where each of them stands."""

    config: Config
    settings: Mapping[str, Any]
    """What was set, ``preset`` included."""
    origin: Mapping[str, str]
    """Where each setting stands: "ace.toml line 3", "ACE_MODE", "--mode", "preset paper". Not here: the defaults."""
    notices: tuple[str, ...]
    """What looks like a mistake in the environment and is ignored."""


def resolve(
    presets: Mapping[str, Mapping[str, Any]],
    *,
    file: SettingsFile | None = None,
    options: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] = os.environ,
) -> Resolved:
    """The config of all sources, over the adapter's preset. Errors name where the setting stands."""
    variables, notices = settings_in(environment)
    settings: dict[str, Any] = {}
    origin: dict[str, str] = {}
    if file is not None:
        settings.update(file.settings)
        origin.update({key: file.where(key) for key in file.settings})
    settings.update(variables)
    origin.update({key: variable(key) for key in variables})
    settings.update(options or {})
    origin.update({key: option(key) for key in options or {}})
    try:
        name, base = preset(settings, presets)
        origin = {**dict.fromkeys(base, f"preset {name}"), **origin}
        config = build(settings, presets)
    except ConfigError as error:
        told = [f"{origin[key]}: {text}" if key in origin else text for key, text in error.problems]
        raise ConfigError("; ".join(told), error.problems) from None
    return Resolved(config, settings, origin, tuple(notices))


def option(setting: str) -> str:
    return f"--{setting.replace('_', '-')}"
