"""The settings of a run, from a file, the environment and options. Each overrides the one before."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ..errors import ConfigError
from .config import Config, build, preset
from .environment import settings_in, variable
from .file import SettingsFile


def resolve(
    presets: Mapping[str, Mapping[str, Any]],
    *,
    file: SettingsFile | None = None,
    options: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] = os.environ,
) -> Config:
    """The config of all sources, over the adapter's preset. Errors name where the setting stands."""
    in_file = file.settings if file is not None else {}
    variables = settings_in(environment)
    settings = {**in_file, **variables, **(options or {})}
    origin: dict[str, str] = {}
    try:
        name, base = preset(settings, presets)
        origin.update(dict.fromkeys(base, f"preset {name}"))
        return build(settings, presets)
    except ConfigError as error:
        if file is not None:
            origin.update({key: file.where(key) for key in in_file})
        origin.update({key: variable(key) for key in variables})
        origin.update({key: option(key) for key in options or {}})
        told = [f"{origin[key]}: {text}" if key in origin else text for key, text in error.problems]
        raise ConfigError("; ".join(told), error.problems) from None


def option(setting: str) -> str:
    return f"--{setting.replace('_', '-')}"
