"""What is said at the end of a run's first process if it attached no model, or trained none of those it attached.

Other processes of the run may have done it: the first of them to train makes a file, which says so.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress

from ..telling import say

TYPE_CHECKING = False  # as typing has it, without waiting for typing: scripts wait for this module
if TYPE_CHECKING:
    from .request import RunRequest


def note_training(request: RunRequest) -> None:
    """Let the first process know that this one trains."""
    if not request.is_first:
        with suppress(OSError):
            open(request.marker, "x").close()


def trained_elsewhere(request: RunRequest) -> bool:
    """Whether another process of the run has trained a model. The first process asks, once: this removes the file."""
    if not request.is_first:
        return False
    try:
        os.unlink(request.marker)
    except OSError:
        return False
    return True


def had_traceback() -> bool:
    """Whether an exception ended the script. After Ctrl-C people want to see how far it got, so that is none."""
    return isinstance(getattr(sys, "last_value", None), Exception)


def tell_of_no_model(request: RunRequest, elsewhere: bool) -> None:
    """Somebody asked for this very run, and wants to hear that nothing came of it."""
    if not request.is_first or not request.by_command:
        return
    if request.as_json:
        print(json.dumps({"adapter": request.adapter, "models_attached": 0, "spawned": elsewhere, "runs": []}))
    elif not elsewhere and not had_traceback() and request.settings["mode"] != "off":
        say(f"no model was attached: this process built none of {', '.join(request.models)}")
