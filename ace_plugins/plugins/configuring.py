"""Settings against the adapter they are for: what its presets say, and what it can do on this machine."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from ..contract.upstreams import AnyShim, Shim
from ..errors import ConfigError
from ..settings.config import Config, build
from .plugin import Plugin


def configured(plugin: Plugin, settings: Mapping[str, Any]) -> Config:
    """The settings over the adapter's preset, checked."""
    config = build(settings, plugin.presets)
    check_config(plugin, config)
    return config


def check_config(plugin: Plugin, config: Config) -> None:
    """What depends on the adapter, or on what is installed."""
    if config.dual_optimizer == "nupi" and find_spec("cooper") is None:
        text = "dual_optimizer 'nupi' needs cooper-optim, found none installed; pip install cooper-optim"
        raise ConfigError(problems=[("dual_optimizer", text)])
    if config.device == "auto":
        return
    if config.device not in {shim.device for shim in shims_of(plugin) if isinstance(shim, Shim)}:
        text = (
            f"device {config.device!r}: adapter {plugin.name!r} redirects no CUDA calls, as {plugin.patches.title} "
            "lets its user choose; expected auto, and the script's own option"
        )
        raise ConfigError(problems=[("device", text)])


def shims_of(plugin: Plugin) -> list[AnyShim]:
    return list(plugin.call("ace_shims") or ()) if plugin.has("ace_shims") else []
