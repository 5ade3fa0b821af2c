"""Combines a run's settings: preset, ace.toml, environment variables, options. Later sources override earlier ones."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import AceWarning, AdapterError, ConfigError
from .config import FIT, KINDS, SETTINGS, Config, build, find_preset
from .toml_file import SettingsFile

HOME = ".ace"  # folder for the files that runs write
RUNS = f"{HOME}/runs"  # folder for traces, unless the variable ACE_RUNS names another folder
# Variables that are not settings.
OTHERS = ("ACE_LINKS", "ACE_LOAD_PLUGINS", "ACE_QUIET", "ACE_RUN", "ACE_RUNS", "ACE_SEED_SHIFT")


def variable(setting: str) -> str:
    """Return the environment variable of a setting, such as ACE_DUAL_LR."""
    return f"ACE_{setting.upper()}"


def option(setting: str) -> str:
    """Return the command-line option of a setting, such as --dual-lr."""
    return f"--{setting.replace('_', '-')}"


VARIABLES = {variable(name): name for name in (*SETTINGS, "preset")}


@dataclass(frozen=True)
class Resolved:
    """The validated settings of a run, and their origins."""

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
    """Combine and validate settings. From weakest to strongest: preset, file, arguments, environment, options.

    ``presets`` are the adapter's presets by name. The keys of ``options`` (of the command line) and ``arguments``
    (keyword arguments of a Python call) are names of settings. ``adapter`` is the adapter's name, for errors. Warns if
    the environment overrides an argument, because the code then does not show what happens.

    Raises:
        ConfigError: If a setting is unknown or invalid. The error names its origin, except for ``arguments``.
        AdapterError: If the unknown or invalid setting is in the preset.
    """
    from_file, variables, options = file.settings if file else {}, read_environment(environment or {}), options or {}
    given = {**from_file, **(arguments or {}), **variables, **options}
    origins = {key: file.where(key) for key in from_file} if file else {}
    origins |= {key: variable(key) for key in variables} | {key: option(key) for key in options}
    name = FIT
    try:
        name, base = find_preset(given, presets)
        config = build(base, given)
    except ConfigError as error:
        wrong = [text for key, text in error.problems if key not in given]
        if wrong:
            raise AdapterError(f"adapter {adapter!r}: ace_preset returned {name!r} with {'; '.join(wrong)}") from None
        located = [f"{origins[key]}: {text}" if key in origins else text for key, text in error.problems]
        raise ConfigError("; ".join(located), error.problems) from None
    for key, value in (arguments or {}).items():
        if variables.get(key, value) != value:
            text = f"{variable(key)}={variables[key]} overrides {key} = {value!r} in the code"
            warnings.warn(text, AceWarning, stacklevel=4)
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
    """Return a message for each variable whose name resembles one of ours. Other programs use the prefix ACE_ too."""
    known = sorted(name[4:] for name in (*VARIABLES, *OTHERS))  # the prefix ACE_ would make any two names similar
    own = [name[4:] for name in environment if name.startswith("ACE_") and not name.startswith("ACE_UPSTREAM_")]
    unknown = [name for name in own if name not in known]
    if not unknown:
        return []
    import difflib  # slow to import, and every patched script imports this module

    near = {name: difflib.get_close_matches(name, known, n=1, cutoff=0.75) for name in unknown}
    similar = [(f"ACE_{name}", f"ACE_{each[0]}") for name, each in near.items() if each]
    return [f"unknown variable {name!r} (did you mean {meant!r}?): it is ignored" for name, meant in similar]
