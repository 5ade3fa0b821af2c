"""Combines the settings of a run: preset, ace.toml, environment variables, options. Later sources override earlier.

Every field of `Config` has an environment variable: ``ACE_MODE``, ``ACE_DUAL_LR`` and so on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import AdapterError, ConfigError
from .config import FIT, KINDS, SETTINGS, Config, build_on, find_preset
from .toml_file import SettingsFile

HOME = ".ace"
"""Folder for the files that runs write."""
RUNS = f"{HOME}/runs"
"""Folder for traces, unless the variable ACE_RUNS names another folder."""
OTHERS = ("ACE_LOAD_PLUGINS", "ACE_QUIET", "ACE_RUN", "ACE_RUNS", "ACE_SEED_SHIFT")
"""Environment variables of ace-plugins that are not settings."""


def variable(setting: str) -> str:
    """Return the environment variable of a setting."""
    return f"ACE_{setting.upper()}"


def option(setting: str) -> str:
    """Return the command-line option of a setting."""
    return f"--{setting.replace('_', '-')}"


VARIABLES = {variable(name): name for name in (*SETTINGS, "preset")}


@dataclass(frozen=True)
class Resolved:
    """The settings of a run, validated, and their origins."""

    config: Config
    origins: Mapping[str, str]
    """Mapping from each setting that some source gives to its origin, for example "ace.toml line 3" or "--mode"."""


def resolve(
    presets: Mapping[str, Mapping[str, Any]],
    *,
    file: SettingsFile | None = None,
    environment: Mapping[str, str] | None = None,
    options: Mapping[str, Any] | None = None,
    arguments: Mapping[str, Any] | None = None,
    adapter: str = "",
) -> Resolved:
    """Combine and validate settings. Each source overrides the ones listed before it.

    Args:
        presets: The adapter's presets: a mapping from names to settings.
        file: The settings in ace.toml.
        environment: Environment variables.
        options: Values of command-line options, by the name of the setting.
        arguments: Keyword arguments of a Python call. Errors about these name no origin.
        adapter: Name of the adapter, for errors about its preset.

    Raises:
        ConfigError: If a setting is unknown or invalid. The error names its origin.
        AdapterError: If the unknown or invalid setting is in the preset.
    """
    sources = (file.settings if file else {}, read_environment(environment or {}), options or {}, arguments or {})
    given = {key: value for source in sources for key, value in source.items()}
    origins = {key: file.where(key) for key in file.settings} if file else {}
    origins |= {key: variable(key) for key in sources[1]} | {key: option(key) for key in sources[2]}
    name = FIT
    try:
        name, base = find_preset(given, presets)
        config = build_on(base, given)
    except ConfigError as error:
        wrong = [text for key, text in error.problems if key not in given]
        if wrong:
            raise AdapterError(f"adapter {adapter!r}: ace_preset returned {name!r} with {'; '.join(wrong)}") from None
        located = [f"{origins[key]}: {text}" if key in origins else text for key, text in error.problems]
        raise ConfigError("; ".join(located), error.problems) from None
    return Resolved(config, {key: f"preset {name}" for key in base if key not in given} | origins)


def read_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the settings that environment variables give. Empty variables are ignored."""
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


def find_misspelt(environment: Mapping[str, str]) -> list[str]:
    """Return a message for each unknown variable whose name resembles a known one. Other programs use ACE_ too."""
    messages = []
    known = {*VARIABLES, *OTHERS}
    for name in environment:
        if name.startswith("ACE_") and name not in known and not name.startswith("ACE_UPSTREAM_"):
            import difflib  # slow to import, and every patched script imports this module

            # Compared without the common prefix ACE_, which would make any two names similar.
            near = difflib.get_close_matches(name[4:], sorted(each[4:] for each in known), n=1, cutoff=0.75)
            messages += [f"unknown variable {name!r} (did you mean 'ACE_{each}'?): it is ignored" for each in near]
    return messages
