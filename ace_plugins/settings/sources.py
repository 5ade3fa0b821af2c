"""Settings from a file, the environment and options, each going before the one named earlier, and where each stands."""

from __future__ import annotations

import os

from .environment import settings_in, variable
from .file import SettingsFile, checked
from ..telling import say

TYPE_CHECKING = False  # as typing has it, without waiting for typing: scripts wait for this module
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from .config import Config


class Sources:
    """What a run is to be, told in several places."""

    def __init__(self, file: SettingsFile | None, options: Mapping[str, Any] | None = None) -> None:
        self.file = file
        self.options = dict(options or {})
        self.environment, self.notices = settings_in(os.environ)
        self.settings = {**(file.settings if file else {}), **self.environment, **self.options}

    def where(self, key: str) -> str:
        """For errors: where this setting stands."""
        if key in self.options:
            return f"--{key.replace('_', '-')}"
        return variable(key) if key in self.environment or self.file is None else self.file.where(key)

    def checked(self, presets: Mapping[str, Any] | None) -> Config:
        """The config; without presets all of it that does not depend on them."""
        settings = self.settings
        if presets is None:
            settings = {key: value for key, value in settings.items() if key != "preset"}
        return checked(settings, presets, self.where)

    def tell_notices(self) -> None:
        if os.environ.get("RANK", "0") in ("", "0"):  # of many processes one
            for notice in self.notices:
                say(notice)
