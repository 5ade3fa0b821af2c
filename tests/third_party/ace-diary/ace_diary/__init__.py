"""An observer that writes one line per event into diary.txt, for the models of all adapters."""

from __future__ import annotations

from typing import Any

import ace_plugins

from ace_plugins import adapter as ace


def _write(line: str) -> None:
    with open("diary.txt", "a", encoding="utf-8") as diary:
        diary.write(f"{line}\n")


@ace.hookimpl
def ace_attached(model: Any) -> None:
    _write(f"attached {type(model).__name__}: {', '.join(site.name for site in ace_plugins.status(model).sites)}")


@ace.hookimpl
def ace_stepped(model: Any, step: int) -> None:
    if step % 5 == 0:
        _write(f"step {step}: gamma {max(abs(site.gamma) for site in ace_plugins.status(model).sites):.4f}")


@ace.hookimpl
def ace_finished(model: Any) -> None:
    _write(f"finished after {ace_plugins.status(model).steps} steps")
