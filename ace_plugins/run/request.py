"""What a run was asked to be. It is handed to the run's processes in the environment variable ``ACE_RUN``.

Python starts with this module in every process of a run, so it imports little.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ..output import say

VARIABLE = "ACE_RUN"
SHIFT = "ACE_SEED_SHIFT"
"""By how much every seed that the script sets is shifted; set by a comparison of several seeds."""


@dataclass
class RunRequest:
    """Adapter, settings and checkout of a run, the same in all its processes."""

    adapter: str
    settings: dict[str, Any]
    """Every field of `Config`, resolved: nothing is left to presets, files or other variables."""
    origins: dict[str, str]
    """Where each of them comes from that is not at its default."""
    models: list[str]
    """Model classes of upstream, as the adapter names them: "module:Class"."""
    begins: list[str]
    """Modules of upstream that are repaired before they are imported: its package, or none."""
    cloned: bool
    """Whether upstream is a checkout, where a module is a file, and not an installed package."""
    root: str | None
    """The checkout, where the run is in one."""
    as_json: bool
    by_command: bool
    """Asked for by ``ace-patch run``, not by a marked line."""
    process: int
    """The process that was asked for. All others were started by it."""
    marker: str
    """A file that is made by the first of the other processes that trains a model."""
    attended: bool
    """Whether the first process looks for that file. It does not if it is a program such as sh."""

    @classmethod
    def in_environment(cls) -> RunRequest | None:
        """The request that this process was started with, if it was."""
        text = os.environ.get(VARIABLE)
        if not text:
            return None
        try:
            return cls(**json.loads(text))
        except (TypeError, ValueError):
            say(f"{VARIABLE} is not as ace-patch wrote it, and is ignored; ACE_RUNS names the folder for traces")
            return None

    def hand_on(self, environment: MutableMapping[str, str]) -> None:
        """Have the processes that are started with this environment belong to this run."""
        environment[VARIABLE] = json.dumps(dataclasses.asdict(self))

    @property
    def is_first(self) -> bool:
        """Whether this process is the one that was asked for."""
        return os.getpid() == self.process

    # A run may train in processes that its script starts. The first of these to train makes a file, which says so.

    def note_training(self) -> None:
        """Let the first process know that this one trains."""
        if self.attended and not self.is_first:
            with suppress(OSError):
                open(self.marker, "x").close()

    def trained_elsewhere(self) -> bool:
        """Whether another process has trained a model. The first process asks, once: this removes the file."""
        with suppress(OSError):
            if self.is_first:
                os.unlink(self.marker)
                return True
        return False

    def tell_of_no_model(self, elsewhere: bool) -> None:
        """At the end of a process that attached nothing: somebody asked for this very run, and wants to hear that."""
        if not self.is_first or not self.by_command:
            return
        if self.as_json:
            print(json.dumps({"adapter": self.adapter, "models_attached": 0, "spawned": elsewhere, "runs": []}))
        elif not elsewhere and not had_traceback() and self.settings["mode"] != "off":
            say(f"no model was attached: this process built none of {', '.join(self.models)}")


def had_traceback() -> bool:
    """Whether an exception ended the script. After Ctrl-C people want to see how far it got, so that is none."""
    return isinstance(getattr(sys, "last_value", None), Exception)
