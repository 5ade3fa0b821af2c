"""Reads epochs and seed from the command lines of EGNO's scripts."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace

from ace_plugins import adapter as ace

from .upstream import CHECKOUT

DEFAULT = 10_000
OPTION = "--config_by_file"
METRICS = (
    ace.Metric("test", r"Best Test Loss: {number}", r"==> test epoch \d+ avg loss: {number}"),
    ace.Metric("validation", r"Best Val Loss: {number}", r"==> val epoch \d+ avg loss: {number}"),
)


def script(argv: Sequence[str]) -> ace.Script | None:
    """Return epochs, metrics and seed of an upstream script. Values in the configuration file override options."""
    found = ace.Script.with_option(argv, CHECKOUT.scripts, "--epochs", default=DEFAULT, metrics=METRICS, seed="--seed")
    words = list(argv[1:])
    joined = next((word for word in words if word.startswith(f"{OPTION}=")), None)
    if found is None or (joined is None and OPTION not in words):
        return found
    after = joined.partition("=")[2] if joined else (words[words.index(OPTION) + 1 :] or [""])[0]
    # If no configuration file is given, upstream derives its name: main_mocap_no.py reads configs/config_mocap_no.json.
    name = os.path.basename(argv[0]).replace("main_", "config_").replace(".py", ".json")
    path = os.path.join("configs", name) if not after or after.startswith("-") else after
    try:
        with open(path, encoding="utf-8") as file:
            given = dict(json.load(file))
    except (OSError, ValueError, TypeError):
        return found  # the script reports the error itself
    if "seed" in given:
        found = replace(found, seed="")
    return replace(found, epochs=given["epochs"], source=path) if isinstance(given.get("epochs"), int) else found
