"""Telling people what happens, on stderr: stdout is the script's."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


def say(text: str, *, anyway: bool = False) -> None:
    """Print one line. Where ACE_QUIET asks for quiet, only what is to be told ``anyway``, which errors are."""
    if sys.stderr is not None and (anyway or not quiet()):
        print(f"ace: {text}", file=sys.stderr)


def quiet() -> bool:
    """Whether the user asked for quiet."""
    return os.environ.get("ACE_QUIET", "").strip().lower() not in ("", "0", "false", "no", "off")


@contextmanager
def progress(length: int, label: str) -> Iterator[Callable[[int], None] | None]:
    """A bar for what takes a while: what to call with every few that are done; None where nobody watches."""
    if not sys.stderr.isatty():
        yield None
        return
    import click  # here: every process of a run waits for this module

    with click.progressbar(length=length, label=label, file=sys.stderr) as bar:
        yield bar.update
