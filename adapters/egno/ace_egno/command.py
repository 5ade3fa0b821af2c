"""EGNO's command line: what its scripts say of epochs, in options or in a file that goes over them."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace

from ace_plugins import adapter as ace

from .upstream import CHECKOUT

DEFAULT = 10_000
OPTION = "--config_by_file"
_NUMBER = r"([-+.\de]+|nan|inf)"
METRICS = (
    ace.Metric("test", f"Best Test Loss: {_NUMBER}", rf"==> test epoch \d+ avg loss: {_NUMBER}"),
    ace.Metric("validation", f"Best Val Loss: {_NUMBER}", rf"==> val epoch \d+ avg loss: {_NUMBER}"),
)


def script(argv: Sequence[str]) -> ace.Script | None:
    """What a file of settings says goes over the options, as upstream has it."""
    found = ace.Script.with_option(argv, CHECKOUT.scripts, "--epochs", default=DEFAULT, metrics=METRICS, seed="--seed")
    words = list(argv[1:])
    joined = next((word for word in words if word.startswith(f"{OPTION}=")), None)
    if found is None or (joined is None and OPTION not in words):
        return found
    after = joined.partition("=")[2] if joined else (words[words.index(OPTION) + 1 :] or [""])[0]
    # Without a name upstream takes the one of the script: main_mocap_no.py, configs/config_mocap_no.json.
    name = os.path.basename(argv[0]).replace("main_", "config_").replace(".py", ".json")
    path = os.path.join("configs", name) if not after or after.startswith("-") else after
    try:
        with open(path, encoding="utf-8") as file:
            given = dict(json.load(file))
    except (OSError, ValueError, TypeError):
        return found  # the script's own to complain about
    if "seed" in given:
        found = replace(found, seed="")
    return replace(found, epochs=given["epochs"], source=path) if isinstance(given.get("epochs"), int) else found
