"""Telling people what happens, on stderr: stdout is the script's."""

from __future__ import annotations

import os
import sys


def say(text: str, *, anyway: bool = False) -> None:
    """Print one line. Where ACE_QUIET asks for quiet, only what is to be told ``anyway``, which errors are."""
    if sys.stderr is not None and (anyway or not quiet()):
        print(f"ace: {text}", file=sys.stderr)


def quiet() -> bool:
    """Whether the user asked for quiet."""
    return os.environ.get("ACE_QUIET", "").strip().lower() not in ("", "0", "false", "no", "off")
