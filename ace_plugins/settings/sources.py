"""The settings of a run, from a file, the environment and options. Each overrides the one before."""

from __future__ import annotations

import os
from dataclasses import dataclass

from ..errors import ConfigError
from ..telling import say
from .config import build, preset
from .environment import settings_in, variable

TYPE_CHECKING = False  # as typing has it, without waiting for typing: scripts wait for this module
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from .config import Config
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
    presets: Mapping[str, Mapping[str, Any]] | None,
    *,
    file: SettingsFile | None = None,
    options: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] = os.environ,
) -> Resolved:
    """The config of all sources. Errors name where the setting stands.

    Without presets, while the adapter is not loaded yet, the config is that of the settings alone.
    """
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
    own = {key: value for key, value in settings.items() if key != "preset" or presets is not None}
    try:
        name, base = preset(own, presets or {})
        origin = {**dict.fromkeys(base, f"preset {name}"), **origin}
        config = build(own, presets)
    except ConfigError as error:
        told = [f"{origin[key]}: {text}" if key in origin else text for key, text in error.problems]
        raise ConfigError("; ".join(told), error.problems) from None
    return Resolved(config, settings, origin, tuple(notices))


def option(setting: str) -> str:
    return f"--{setting.replace('_', '-')}"


class Sources:
    """`resolve` in two steps: before the adapter is loaded, and after."""

    def __init__(self, file: SettingsFile | None, options: Mapping[str, Any] | None = None) -> None:
        self.file = file
        self.options = options
        found = self._resolve(None)
        self.settings, self.notices = found.settings, found.notices

    def where(self, key: str) -> str:
        """For errors: where this setting stands."""
        return self._resolve(None).origin.get(key) or (self.file.where(key) if self.file else option(key))

    def checked(self, presets: Mapping[str, Any] | None) -> Config:
        """The config; without presets all of it that does not depend on them."""
        return self._resolve(presets).config

    def tell_notices(self) -> None:
        if os.environ.get("RANK", "0") in ("", "0"):  # of many processes one
            for notice in self.notices:
                say(notice)

    def _resolve(self, presets: Mapping[str, Any] | None) -> Resolved:
        return resolve(presets, file=self.file, options=self.options)
