"""attach: ACE on a model, with the repairs its upstream needs on today's stack."""

from __future__ import annotations

from typing import Any, TypeVar

from torch import nn

from ..engine.attaching import prepare, put_on
from ..errors import AttachError
from ..plugins.configuring import configured
from ..plugins.plugin import Plugin
from ..plugins.registry import registry
from ..settings.config import Config
from .shims import REPAIRS

M = TypeVar("M", bound=nn.Module)


def attach(model: M, adapter: str | None = None, **settings: Any) -> M:
    """Put ACE on a model, in place, and return it.

    ``adapter`` is the name of an adapter; without it the adapters are asked who claims the model. ``settings`` are
    fields of `Config`, and ``preset`` for a named set of the adapter's. Everything is checked before anything is
    changed. In mode "off" the model stays as it is, down to its parameters.
    """
    if not isinstance(model, nn.Module):
        raise AttachError(f"cannot attach to {type(model).__name__}: expected a torch.nn.Module")
    plugin = registry().adapter(adapter) if adapter is not None else registry().claiming(model)
    return attach_with(model, plugin, configured(plugin, settings))


def attach_with(model: M, plugin: Plugin, config: Config) -> M:
    """`attach`, with the adapter and the settings at hand."""
    ace = prepare(model, plugin, config)
    if config.shims:
        REPAIRS.apply(plugin, config.device)
    if ace is not None:
        put_on(ace, model)
    return model
