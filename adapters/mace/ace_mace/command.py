"""Reads epochs from the command line of ``mace_run_train``, and finds the results it prints."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from ace_plugins import adapter as ace

SCRIPTS = ("mace_run_train", "run_train.py")
OPTION = "--max_num_epochs"
DEFAULT = 2048
# The error tables have one row per data set: | name | energy | force | relative |. The last row of a test set counts.
# If the training has two stages, that row belongs to the second stage.
_ROW = r"^\|\s*(?!train_|valid_|config_type)[^|]+\|"
METRICS = (
    ace.Metric("test force", _ROW + r"[^|]*\|\s*{number}"),
    ace.Metric("test energy", _ROW + r"\s*{number}"),
    ace.Metric("validation force", r"Epoch \d+: .*_F=\s*{number}"),
    ace.Metric("validation energy", r"Epoch \d+: .*_E(?:_per_atom)?=\s*{number}"),
)


def script(argv: Sequence[str]) -> ace.Script | None:
    """Return epochs, metrics and seed of a training script. Options override the file that ``--config`` names."""
    found = ace.Script.with_option(argv, SCRIPTS, OPTION, default=DEFAULT, metrics=METRICS, seed="--seed")
    if found is None or found.source.endswith(OPTION):
        return found
    words = list(argv[1:])
    joined = next((word.partition("=")[2] for word in words if word.startswith("--config=")), None)
    path = joined or (words[words.index("--config") + 1] if "--config" in words[:-1] else None)
    if path is None:
        return found
    try:
        with open(path, encoding="utf-8") as file:
            epochs = re.findall(rf"^\s*{OPTION.lstrip('-')}\s*[:=]\s*(\d+)\s*(?:#.*)?$", file.read(), re.MULTILINE)
    except (OSError, UnicodeDecodeError):
        return found  # the script reports the error itself
    return replace(found, epochs=int(epochs[-1]), source=path) if epochs else found
