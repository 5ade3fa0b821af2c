"""``ace-patch run`` and ``ace-patch export``: the steps between the command line and the modules."""

from __future__ import annotations

import atexit
import json
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from .attaching import status
from .checkpoints import export
from .errors import AceWarning
from .hookspecs import hookimpl
from .patching import Patch, patched
from .plugins import registry
from .runner import ScriptError, run_script
from .trace import ABOUT, TRACE, read_trace


class Announcer:
    """Tells on stderr, as it happens, which models were attached: stdout is the script's."""

    def __init__(self) -> None:
        self.models = 0

    @hookimpl
    def ace_attached(self, model: nn.Module) -> None:
        self.models += 1
        now = status(model)
        print(
            f"ace: attached to {type(model).__name__}: {len(now.sites)} sites, mode {now.mode}, "
            f"{now.upstream_parameters:,} + {now.ace_parameters:,} parameters",
            file=sys.stderr,
        )


def prepared(adapter: str, settings: Mapping[str, Any], command: Sequence[str], *, as_json: bool) -> Callable[[], int]:
    """Patch, and return what runs the script. The summary comes when the process ends, after the script's own exits."""
    patch = patched(adapter, **settings)
    announcer = Announcer()
    registry().manager.register(announcer, name="ace_plugins.announcer")
    pid = os.getpid()

    failed = False

    def summarise() -> None:
        if os.getpid() == pid:  # a forked worker of the script inherits this
            _summary(patch, announcer.models, as_json, failed)

    def start() -> int:
        nonlocal failed
        atexit.register(summarise)
        try:
            return run_script(command)
        except ScriptError:
            atexit.unregister(summarise)  # it was never started
            raise
        except BaseException as ended:
            failed = not isinstance(ended, SystemExit) or bool(ended.code)
            raise

    return start


def _summary(patch: Patch, attached: int, as_json: bool, failed: bool) -> None:
    runs = [_last(folder) for folder in TRACE.folders]
    if as_json:
        print(json.dumps({"adapter": patch.plugin.name, "models_attached": attached, "runs": runs}))
        return
    # After a traceback that is what matters, and it explains why no model was built.
    if not attached and not failed and patch.settings.get("mode") != "off":
        upstream = patch.plugin.upstream
        models = ", ".join(upstream.models) if upstream else ""
        print(f"ace: no model was attached: the script built none of {models}", file=sys.stderr)
    if runs:
        from .tables import print_run

        for run in runs:
            print_run(run)


def _last(folder: Path) -> dict[str, Any]:
    """What a run came to, from its trace: the model itself may be gone by now."""
    about = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
    end = read_trace(folder)[-1]
    values = zip(about["sites"], end["gamma"], end["lambda"], end["u"], strict=True)
    return {
        "folder": os.path.relpath(folder),
        "adapter": about["adapter"],
        "mode": about["config"]["mode"],
        "steps": end["step"],
        "sites": [{"name": name, "gamma": g, "lambda": la, "u": u} for name, g, la, u in values],
    }


def export_file(checkpoint: str, output: str) -> dict[str, Any]:
    """Export and count what was removed; notices come back with the answer."""
    import torch

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", AceWarning)
        cleaned = export(checkpoint, output)
    before = torch.load(checkpoint, map_location="cpu", weights_only=True)
    kept = _entries(cleaned)
    return {
        "checkpoint": checkpoint,
        "output": output,
        "kept": kept,
        "removed": _entries(before) - kept,
        "warnings": [str(w.message) for w in caught if issubclass(w.category, AceWarning)],
    }


def _entries(content: Any) -> int:
    return sum(map(_entries, content.values())) if isinstance(content, Mapping) else 1
