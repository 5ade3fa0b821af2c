"""Settings become a request: resolved once, with the adapter's presets, and checked as far as torch is not needed."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import AceError
from ..plugins.configuring import check_config
from ..plugins.registry import registry
from ..settings.environment import misspelt
from ..settings.file import SettingsFile
from ..settings.sources import resolve
from ..telling import say
from .request import RunRequest


def asked(
    adapter: str,
    *,
    file: SettingsFile | None = None,
    options: Mapping[str, Any] | None = None,
    root: Path | None = None,
    as_json: bool = False,
    by_command: bool = False,
) -> RunRequest:
    """The request for a run whose first process is this one.

    Options go before the environment, and that before the file.
    """
    if file is not None and file.adapter not in registry().plugins:
        raise AceError(
            f"adapter {file.adapter!r}, which {file.where('adapter')} names, is not installed in this environment: "
            "install it, or run 'ace-patch revert'; 'ace-patch list' shows what there is"
        )
    plugin = registry().adapter(adapter)
    if not plugin.patches.models:
        raise AceError(
            f"adapter {plugin.name!r} names no class that a run could attach to: call attach(model, "
            f"adapter={plugin.name!r}) in the script, and start it without 'ace-patch run'"
        )
    config = resolve(plugin.presets, file=file, options=options)
    check_config(plugin, config)
    if os.environ.get("RANK", "0") in ("", "0"):  # of many processes one
        for notice in misspelt(os.environ):
            say(notice)
    return RunRequest(
        adapter=plugin.name,
        settings=dataclasses.asdict(config),
        models=list(plugin.patches.models),
        cloned=plugin.patches.checkout is not None,
        root=None if root is None else str(root),
        as_json=as_json,
        by_command=by_command,
        process=os.getpid(),
        marker=os.path.join(tempfile.gettempdir(), f"ace-{os.getpid()}-{os.urandom(8).hex()}"),
        attended=not by_command,
    )
