"""``ace-patch list``."""

from __future__ import annotations

import os
from typing import Any

import click

from ..plugins.plugin import Plugin
from ..plugins.registry import registry
from .options import as_json, print_json
from .tables import print_plugins


@click.command("list")
@as_json
def listing(as_json: bool) -> None:
    """Every adapter: from which distribution, versions wanted and found, healthy or why not."""
    plugins = list(registry())
    if as_json:
        print_json([_described(plugin) for plugin in plugins])
        return
    if not plugins and "ACE_LOAD_PLUGINS" not in os.environ:
        example = "pip install './adapters/schnet[upstream]' in a clone of ace-plugins"
        click.echo(f"no plugins found: install an adapter, for example {example}")
        return
    print_plugins(plugins)
    if registry().left_out:
        click.echo(f"not loaded: {registry().left_out}")


def _described(plugin: Plugin) -> dict[str, Any]:
    return {
        "name": plugin.name,
        "kind": "adapter" if plugin.upstream else "observer" if plugin.problem is None else "unknown",
        "upstream": plugin.upstream.title if plugin.upstream else None,
        "models": list(plugin.upstream.models) if plugin.upstream else [],
        "distribution": plugin.distribution,
        "version": plugin.version,
        "target": plugin.target,
        "requires": [
            {"requirement": r.requirement, "found": r.found, "met": r.met, "upstream": r.upstream}
            for r in plugin.requires
        ],
        "healthy": plugin.problem is None,
        "problem": plugin.problem,
        "hooks": list(plugin.hooks),
    }
